"""A trainer that is told to stop, or whose torchrun is gone, ends: in order if it can, and in bounded time if not.

Python hears of a signal between two instructions of its main thread. A rank that waits in NCCL or CUDA for another one,
which has stopped in the midst of a step, executes none; it would stay for ever, and keep its GPU busy with waiting.
"""

import faulthandler
import os
import signal
import sys
import threading
import time

GRACE_S = 25.0
"""To close servers, threads and files in order; torchrun kills its workers 30 s after it has told them to stop."""
FAILED_S = 60.0
"""The same after an error, of which the other ranks do not know yet, and for what is left after the end."""
_LAUNCHER_POLL_S = 1.0

_lock = threading.Lock()
_end_at = float("inf")


def end_within(seconds: float) -> None:
    """If this process still lives then, write where each of its threads is to stderr, and end it with status 1.

    It needs neither the interpreter nor the main thread. A later call can only shorten the time.
    """
    global _end_at
    with _lock:
        if time.monotonic() + seconds < _end_at:
            _end_at = time.monotonic() + seconds
            faulthandler.dump_traceback_later(seconds, exit=True)


def stop_in_time(grace_s: float = GRACE_S) -> None:
    """Have SIGTERM raise SystemExit in the main thread, which calls this, and bound what follows it or SIGINT.

    Under torchrun also do so when torchrun itself is gone: killed, it would leave its trainers on the GPUs.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child is told is not for this one

    def listen() -> None:
        while os.read(heard, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        end_within(grace_s)

    threading.Thread(target=listen, name="stop-watch", daemon=True).start()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_stop_with, args=(os.getppid(),), name="launcher-watch", daemon=True).start()


def leave_process_groups(error: type[BaseException] | None = None, *_: object) -> None:
    """Destroy all process groups; after an error abort them, since destroying NCCL's waits for all ranks.

    The arguments are those of `__exit__`. The others, in a collective that this rank will not join, hear of it from
    gloo when this process is gone, or from torchrun.
    """
    import torch.distributed as dist  # not above: torch takes seconds, and to watch for signals nobody needs it

    if error is None:
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()


def _stop_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LAUNCHER_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
