"""torchrun's agent whose ranks are forked: `forked_torchrun.py [torchrun's flags] SCRIPT [arguments ...]`.

The rendezvous, the watch over the ranks and the handling of signals are torchrun's. Only the imports are spared: the
process that runs this file has them. With FORKED_SERVERS in its environment, or FORKED_SERVERS_OF_RANKS where this
process itself is forked, a rank forks so many of its servers, see `forked_servers`. It has the command line of a rank.
"""

import os
import runpy
import shlex
import sys
import threading
from pathlib import Path

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser


def rank(script: str, arguments: list[str]) -> None:
    """One rank. The agent wants a function that returns, or an exception; grpo_train.py ends by `os._exit`."""
    from tests.helpers import forked_servers

    sys.argv = [script, *arguments]
    forked_servers.rename([sys.executable, "-u", *sys.argv])
    forked_servers.prepare(int(os.environ.get("FORKED_SERVERS_OF_RANKS") or os.environ.get("FORKED_SERVERS", 0)))
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


def python_for_scripts(folder: Path) -> Path:
    """A program that is Python, except that `-m torch.distributed.run` is this file after all imports."""
    path, python = folder / "python", shlex.quote(sys.executable)
    start = "import tests.helpers.unwatched; from tests.helpers.ranks import import_everything; import_everything(); "
    start += "from tests.helpers.forked_torchrun import main; main()"
    path.write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "-m torch.distributed.run" ]; then shift 2; exec {python} -c \'{start}\' "$@"; fi\n'
        f'exec {python} "$@"\n'
    )
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
