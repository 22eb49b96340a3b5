"""In a checkout, hides upstream's `torchtitan/__init__.py` and gives way to `torchtitan_overlay`. Never installed."""

import sys

del sys.modules[__name__]
import torchtitan_overlay  # noqa: E402, F401
