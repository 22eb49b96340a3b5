"""torchrun's agent whose ranks are forked: `forked_torchrun.py [torchrun's flags] SCRIPT [arguments ...]`.

The rendezvous, the watch over the ranks and the handling of signals are torchrun's. Only the imports are spared: the
process that runs this file has them.
"""

import os
import runpy
import sys
import threading

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser


def rank(script: str, arguments: list[str]) -> None:
    """One rank. The agent wants a function that returns, or an exception; grpo_train.py ends by `os._exit`."""
    sys.argv = [script, *arguments]
    leave, os._exit = os._exit, sys.exit
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        os._exit = leave
    # The agent confirms the result at once. One that is stopping does not, and waits for this process.
    unconfirmed = threading.Timer(1.0, leave, [0])
    unconfirmed.daemon = True
    unconfirmed.start()


def main() -> None:
    flags = ["--start-method", "fork", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    flags += ["--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "chaos"]
    given = get_args_parser().parse_args([*flags, *sys.argv[1:]])
    config, _, _ = config_from_args(given)
    elastic_launch(config, rank)(given.training_script, given.training_script_args)


if __name__ == "__main__":
    main()
