"""For all tests."""

import gc
import os
import signal

import torchtitan_overlay  # noqa: F401  what it prepares comes before all other imports

import tests.helpers  # noqa: F401  puts scripts/ on the path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a wrong path may look like an id of the hub
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # their processes inherit it, also where nohup has it ignored
gc.disable()  # imports make what stays, and to look through it takes a tenth of their time


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
