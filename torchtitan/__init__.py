"""Overlay over the installed torchtitan: adds `torchtitan.grpo`, leaves every other module upstream's.

Inside a checkout this file shadows upstream's `torchtitan/__init__.py`. `extend_path` puts the installed
package behind ours, so `torchtitan.models`, `torchtitan.components` and the rest still come from there.
Where torchtitan is not installed (an inference server's environment), only `torchtitan.grpo` exists.
"""

import pkgutil
from importlib.metadata import PackageNotFoundError, version

__path__ = pkgutil.extend_path(__path__, __name__)

try:
    __version__ = version("torchtitan")
except PackageNotFoundError:
    __version__ = None
else:
    from torchtitan.grpo import compat

    compat.install()
