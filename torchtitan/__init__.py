"""Overlay over the installed torchtitan: adds `torchtitan.grpo`, leaves every other module upstream's.

Inside a checkout this file shadows upstream's `torchtitan/__init__.py`. `extend_path` puts the installed
package behind ours, so `torchtitan.models`, `torchtitan.components` and the rest still come from there.
Where torchtitan is not installed (an inference server's environment), only `torchtitan.grpo` exists.
"""

import pkgutil
import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, version

__path__ = pkgutil.extend_path(__path__, __name__)


class _BeforeUpstream(MetaPathFinder):
    """Finds nothing. The first import of an upstream module prepares the machine for all of them: `grpo.compat`.

    Not before: that imports torch, which a reward worker, say, does not need.
    """

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}.") and not f"{name}.".startswith(f"{__name__}.grpo."):
            sys.meta_path.remove(self)
            from torchtitan.grpo import compat

            compat.install()


try:
    __version__ = version("torchtitan")
except PackageNotFoundError:
    __version__ = None
else:
    sys.meta_path.insert(0, _BeforeUpstream())
