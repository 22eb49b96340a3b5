"""A trainer that gets a signal, or loses its torchrun, ends in bounded time, and in order if it can.

Python handles a signal between two bytecode instructions of the main thread. A rank that waits in NCCL or CUDA for a
rank that has stopped executes none. Without a limit it would wait forever and keep its GPU busy.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

GRACE_S = 25.0
"""Time to close servers, threads and files in order. torchrun kills its workers 30 s after its SIGTERM."""
FAILED_S = 60.0
"""The same after an error, which the other ranks have not seen yet, and after the last step."""
_LAUNCHER_POLL_S = 1.0
_AGENT_S = 5.0
_AGAIN_S = 2.0
"""How long the main thread may take to begin closing before it is told again."""

_lock = threading.Lock()
_end_at = float("inf")
_closing = False
_status = 143


def end_within(seconds: float) -> None:
    """The main thread closes from now on. If the process still lives after `seconds`, write the stack of every thread
    to stderr and exit with status 1.

    Neither the interpreter nor the main thread is needed for that. A later call can only shorten the time. So does
    SIGTERM, which does not interrupt what is closing already: an error would be lost before it is printed.
    """
    global _closing
    _closing = True
    _exit_within(seconds)


def _exit_within(seconds: float) -> None:
    global _end_at
    with _lock:
        if time.monotonic() + seconds < _end_at:
            _end_at = time.monotonic() + seconds
            faulthandler.dump_traceback_later(seconds, exit=True)


def stop_in_time(grace_s: float = GRACE_S) -> None:
    """Make SIGTERM raise SystemExit in the main thread, and bound the time after SIGTERM or SIGINT.

    Call it from the main thread. SystemExit is raised again until `end_within` is called: it may come inside a callback
    of C++ (`torch.save` has one), which turns it into another error that the program survives.

    Under torchrun the process also stops when torchrun is gone: a killed torchrun would leave its trainers on the GPUs.

    Raises:
        SystemExit: It is gone already.
    """
    launcher = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: None if _closing else sys.exit(_status))
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this process's

    def listen() -> None:
        while os.read(heard, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        _exit_within(grace_s)
        while not _closing:
            time.sleep(_AGAIN_S)
            if not _closing:
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, name="stop-watch", daemon=True).start()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not _agent_answers():
            print("torchrun ended while this process started", file=sys.stderr)
            sys.exit(_status)
        threading.Thread(target=_stop_with, args=(launcher,), name="launcher-watch", daemon=True).start()


def stop(status: int, grace_s: float = GRACE_S - 1) -> None:
    """End this process with `status`: in order, as after SIGTERM, if the main thread can within `grace_s`.

    For other threads than the main one. Does not return.
    """
    global _status
    _status = status
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(status)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run `main`, which closes everything, and end the process with the status that it returns or raises.

    The interpreter's teardown is left out. With torch it takes over a second in each process, and it may hang: on a
    thread of an environment, or on a connection to another rank.
    """
    try:
        status = main()
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave_process_groups(error: type[BaseException] | None = None, *_: object) -> None:
    """Destroy all process groups; after an error abort them, because destroying NCCL's waits for all ranks.

    The arguments are those of `__exit__`. Ranks that wait for this one in a collective learn of its end from gloo or
    torchrun.
    """
    import torch.distributed as dist  # late: importing torch takes seconds, and signals come before

    if error is None:
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()


def _agent_answers() -> bool:
    """Whether torchrun's store is there. The parent's number does not tell if torchrun died during the imports."""
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=_AGENT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass  # another host's, perhaps slow: joining the process group will say more
    return True


def _stop_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LAUNCHER_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
