"""What torchtitan 0.2.2 needs to import and run where there is no accelerator or no Triton.

Both gaps are upstream's: it imports Triton unconditionally for its mixture-of-experts kernels, and it takes
the device type to be "cuda" when none is found. Nothing here changes a machine that has both.
"""

import importlib.util
import sys
import types

import torch._utils


def _refuse_moe(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("torchtitan's mixture-of-experts kernels need Triton, which is not installed")


def install() -> None:
    """Prepare torchtitan's modules for this machine. Call before any torchtitan module is imported."""
    kernels = "torchtitan.models.moe.kernels"
    if importlib.util.find_spec("triton") is None and kernels not in sys.modules:
        stand_in = types.ModuleType(kernels)
        stand_in.generate_permute_indices = _refuse_moe
        sys.modules[kernels] = stand_in

    detect = torch._utils._get_available_device_type
    if detect() is None and "torchtitan.tools.utils" not in sys.modules:
        # torchtitan.tools.utils binds the device type when it is first imported: answer "cpu" just then.
        torch._utils._get_available_device_type = lambda: "cpu"
        try:
            importlib.import_module("torchtitan.tools.utils")
        finally:
            torch._utils._get_available_device_type = detect
