"""torchrun with clean ends: `python -m torchtitan.grpo.process.launch [torchrun's flags] grpo_train.py [arguments]`.

Flags, agent and rendezvous are torchrun's own. Three things differ:

- The exit status is the run's: 75 if it was stopped and has saved, 2 if it was refused. torchrun's is 1 for both.
- A rank that has failed has said why. Nothing follows but one line, if it was killed or failed otherwise.
- nohup has its effect. torchrun hears SIGHUP although nohup has it ignored.

LOGLEVEL=WARNING brings torchrun's own log back.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from torchtitan.grpo.errors import REFUSED
from torchtitan.grpo.process.stopping import STATUS_FOLDER, STOPPED, signal_name

_FAILED = 1


def main(arguments: list[str]) -> int:
    """Run the ranks of this node to their end.

    Returns:
        0, also if a signal came after the last step; the status of a run that was stopped or refused; 128 plus the
        number of the signal that ended the first rank that failed, or this process; else that rank's status.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    args = parse_args(arguments)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        args.signals_to_handle = args.signals_to_handle.replace("SIGHUP,", "")
    with tempfile.TemporaryDirectory(prefix="torchtitan-grpo-") as folder:
        os.environ[STATUS_FOLDER] = folder
        try:
            run(args)
        except ChildFailedError as error:
            return _said(*error.get_first_failure())
        except SignalException as ended:
            left = _left(Path(folder))
            return STOPPED if STOPPED in left else 0 if left and set(left) == {0} else 128 + ended.sigval
        except RendezvousError as error:
            print(f"error: the nodes of the run did not meet: {error}", file=sys.stderr)
            return _FAILED
    return 0


def _left(folder: Path) -> list[int]:
    """The exit statuses of the newest attempt's ranks, by what they have left in the folder; -1 for those that left
    nothing."""
    left = [tuple(map(int, path.name.split("-"))) for path in folder.iterdir()]
    newest = max((attempt for attempt, *_ in left), default=0)
    statuses = [status for attempt, _, _, status in left if attempt == newest]
    ranks = max((ranks for _, ranks, *_ in left), default=0)
    return statuses + [-1] * (ranks - len(statuses))


def _said(rank: int, failure: ProcessFailure) -> int:
    """Print how a rank ended, unless it has said so itself, and return its status as a shell counts."""
    if failure.exitcode in (STOPPED, REFUSED):
        return failure.exitcode
    status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    how = f"was killed by {signal_name(-failure.exitcode)}" if failure.exitcode < 0 else f"ended with {status}"
    print(f"error: rank {rank} on {socket.gethostname()} (process {failure.pid}) {how}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
