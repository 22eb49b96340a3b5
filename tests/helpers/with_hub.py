"""A script in a forked process, with what `huggingface_hub` reads from the environment when it is imported.

The process that the ranks are forked from has imported it long before.
"""

import importlib
import runpy
import sys

from huggingface_hub import constants

if __name__ == "__main__":
    importlib.reload(constants)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
