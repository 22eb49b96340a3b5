"""A trainer that gets a signal, or loses its torchrun, ends in bounded time: saved if it can, in order if it can.

Python handles a signal between two bytecode instructions of the main thread. A rank that waits in NCCL or CUDA for a
rank that has stopped executes none. Without a limit it would wait forever and keep its GPU busy. So a thread hears the
signals:

1. The first SIGTERM, SIGINT or SIGHUP asks the run to stop (`asks_first`), if there is one that would lose something.
2. After SAVING_SHARE of the time, or at a second signal, the main thread gets SystemExit, and closes.
3. At the end of the time the process ends, and writes every thread's stack.
"""

import contextlib
import faulthandler
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio

GRACE_S = 25.0
"""Time from a signal to the end of the process. torchrun kills its workers 30 s after its SIGTERM."""
SAVING_SHARE = 0.8
"""Share of that time in which a run may end its step and save. The rest is for closing servers, threads and files."""
AT_ONCE_S = 5.0
"""Time to close after a second signal."""
FAILED_S = 60.0
"""Time to close after an error, which the other ranks have not seen yet."""
DONE_S = 600.0
"""Time to close after the last step: what is written elsewhere, as to W&B, may take long."""
STOPPED = 75
"""Exit status of a run that was asked to stop and has saved its last step. It is EX_TEMPFAIL: run it again."""
STATUS_FOLDER = "TORCHTITAN_GRPO_STATUS_FOLDER"
"""Environment variable of `launch`: the folder where each rank leaves a file that is named by the attempt, the number
of ranks of this node, its own, and its exit status."""
ECHO_S = 3.0
"""A signal so soon after the first is the same one: torchrun and Slurm pass on what their processes got already."""
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_INTERRUPT = signal.SIGALRM
"""What the process sends to itself. It must not be taken for a second signal."""
_LAUNCHER_POLL_S = 1.0
_AGENT_S = 5.0
_LEAVE_S = 0.5
_AGAIN_S = 2.0
"""How long the main thread may take to begin closing before it is told again."""

_lock = threading.Lock()
_end_at = math.inf
_closing = _interrupting = False
_status = 128 + signal.SIGTERM
_is_owned = False
"""`run_and_exit` ends the process."""
_status_folder: str | None = None
"""Of `run_and_exit`: no program that the process starts has it, or its status would be taken for this rank's."""
_owed: int | None = None
"""The status of `stop`, whatever the main thread ends with."""
_ask: Callable[[int], bool] | None = None


class StopRequested(Exception):
    """Every rank ends here, before it trains the next step: the run was asked to stop, or rank 0 has failed.

    Attributes:
        why: On the other ranks, rank 0's error; "" if a signal asked.
        refused: Whether that is a UserError.
    """

    def __init__(self, why: str = "", refused: bool = False) -> None:
        super().__init__(why)
        self.why, self.refused = why, refused


class Stopped(SystemExit):
    """The run ends because it was asked to. `words`, if any, are the last line that it prints. Raise `stopped`."""

    def __init__(self, status: int, words: str = "") -> None:
        super().__init__(status)
        self.words = words


def stopped(status: int, words: str) -> Stopped:
    """What to raise when a run has stopped. If closing takes too long, the process ends like that all the same."""

    def leave() -> None:
        while time.monotonic() < _end_at - _LEAVE_S:
            time.sleep(_LEAVE_S / 2)
        _leave(status, words)

    threading.Thread(target=leave, name="leave", daemon=True).start()
    return Stopped(status, words)


def end_within(seconds: float) -> None:
    """The main thread closes from now on. If the process still lives after `seconds`, write the stack of every thread
    to stderr and exit with status 1.

    Neither the interpreter nor the main thread is needed for that. A later call can only shorten the time. So does
    SIGTERM, which does not interrupt what is closing already: an error would be lost before it is printed.
    """
    global _closing
    _closing = True
    _exit_within(seconds)


@contextlib.contextmanager
def closes_within(seconds: float, words: str) -> Iterator[None]:
    """Around closing after the last step. If it takes longer, every thread's stack is written, and these words, and a
    process that `run_and_exit` owns ends with status 0. A signal does not interrupt it, and leaves it less time."""
    global _closing
    closed, until = threading.Event(), time.monotonic() + seconds

    def leave() -> None:
        while time.monotonic() < min(until, _end_at - _LEAVE_S):
            if closed.wait(_LEAVE_S / 2):
                return
        faulthandler.dump_traceback()
        if _is_owned:
            _leave(0, words)
        print(words, file=sys.stderr, flush=True)

    was, _closing = _closing, True
    threading.Thread(target=leave, name="leave", daemon=True).start()
    try:
        yield
    finally:
        closed.set()
        _closing = was


def signal_name(number: int) -> str:
    """As the system writes it; `signal 40` of one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_within(seconds: float) -> None:
    global _end_at
    with _lock:
        if time.monotonic() + seconds < _end_at:
            _end_at = time.monotonic() + seconds
            faulthandler.dump_traceback_later(seconds, exit=True)


def stop_in_time(grace_s: float = GRACE_S) -> None:
    """Hear SIGTERM, SIGINT and SIGHUP from now on, and bound the time after them. A SIGHUP that the process was started
    to ignore, as by nohup, stays ignored.

    Call it from the main thread. There they raise SystemExit with 128 plus the signal's number, unless `asks_first`
    has the run asked before. It is raised again until `end_within` is called: it may come inside a callback of C++
    (`torch.save` has one), which turns it into another error that the program survives.

    Under torchrun, its end counts as SIGTERM: a killed torchrun would leave its trainers on the GPUs.

    Raises:
        SystemExit: It has ended already.
    """
    launcher = os.getppid()
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(_INTERRUPT, _on_interrupt)
    for number in _HEARD:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _heard_by_thread)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_signals)
    threading.Thread(target=_listen, args=(heard, grace_s), name="stop-watch", daemon=True).start()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not _agent_answers():
            print("torchrun ended while this process started", file=sys.stderr)
            sys.exit(_status)
        threading.Thread(target=_stop_with, args=(launcher,), name="launcher-watch", daemon=True).start()


@contextlib.contextmanager
def asks_first(ask: Callable[[int], bool]) -> Iterator[None]:
    """Inside, the first signal calls `ask` with its number, in a thread; it must not wait.

    True means that the main thread will end by itself. It is then interrupted only when that takes too long, or at a
    second signal.
    """
    global _ask
    _ask = ask
    try:
        yield
    finally:
        _ask = None


def _listen(heard: int, grace_s: float) -> None:
    global _status
    number = _next_signal(heard, math.inf)
    first, ask = time.monotonic(), _ask
    _status = 128 + number
    _exit_within(grace_s)
    saves = ask is not None and not _closing and ask(number)
    if not (saves and _is_told_again(heard, first, first + SAVING_SHARE * grace_s)):
        threading.Thread(target=_interrupt, name="interrupt", daemon=True).start()
        _is_told_again(heard, first, math.inf)
    _exit_within(AT_ONCE_S)
    _interrupt()


def _is_told_again(heard: int, first: float, until: float) -> bool:
    """Whether another signal comes before `until` that is no echo of the `first`."""
    while time.monotonic() < until:
        if _next_signal(heard, until) and time.monotonic() > first + ECHO_S:
            return True
    return False


def _next_signal(heard: int, until: float) -> int:
    """Wait for one of _HEARD, and return it; 0 if none comes before `until`."""
    while (left_s := until - time.monotonic()) > 0:
        if select.select([heard], [], [], None if left_s == math.inf else left_s)[0]:
            number = os.read(heard, 1)[0]
            if number in _HEARD:
                return number
    return 0


def _interrupt() -> None:
    """Raise SystemExit in the main thread until it closes."""
    global _interrupting
    _interrupting = True
    while not _closing:
        os.kill(os.getpid(), _INTERRUPT)
        time.sleep(_AGAIN_S)


def _on_interrupt(*_: object) -> None:
    if _interrupting and not _closing:
        raise Stopped(_status)


def _heard_by_thread(*_: object) -> None:
    """The handler of signals: it must exist for `set_wakeup_fd` to tell the thread."""


def _forget_signals() -> None:
    """In a forked child, whose signals are not this process's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(_INTERRUPT, signal.SIG_DFL)


def stop(status: int, grace_s: float = GRACE_S - 1, saves: bool = False) -> None:
    """End this process with `status`: in order if the main thread can within `grace_s`.

    For other threads than the main one. Does not return.

    Args:
        saves: A run that can be asked (`asks_first`) is asked before, and has SAVING_SHARE of that time to save.
    """
    global _status, _owed
    _status = _owed = status
    if saves and _ask is not None and not _closing and _ask(0):
        time.sleep(SAVING_SHARE * grace_s)
        grace_s *= 1 - SAVING_SHARE
    threading.Thread(target=_interrupt, name="interrupt", daemon=True).start()
    time.sleep(grace_s)
    os._exit(status)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run `main`, which closes everything, and end the process with the status that it returns or raises.

    What a stopped run has to say is the last that it prints. An interrupt gives no traceback. What is printed where
    nobody listens (`>&-`) is lost.

    The interpreter's teardown is left out. With torch it takes over a second in each process, and it may hang: on a
    thread of an environment, or on a connection to another rank.
    """
    global _is_owned, _status_folder
    _is_owned, words = True, ""
    _status_folder = os.environ.pop(STATUS_FOLDER, None)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        status = main()
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
        words = stopped.words if isinstance(stopped, Stopped) else stopped.code if isinstance(stopped.code, str) else ""
    except KeyboardInterrupt:  # before `stop_in_time`
        status = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    _leave(status, words)


def _leave(status: int, words: str) -> NoReturn:
    status = status if _owed is None else _owed
    if _status_folder:
        names = ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE", "RANK")
        left = "-".join([*(os.environ[name] for name in names), str(status & 0xFF)])
        with contextlib.suppress(OSError), open(os.path.join(_status_folder, left), "w"):
            pass  # a name needs no room on a full disk
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    print(words, end="\n" if words else "", file=sys.stderr, flush=True)
    os._exit(status)


def run_loop(loop: "asyncio.AbstractEventLoop") -> None:
    """Run an event loop until it is stopped. An exit in a task, which has it as its result too, does not end it."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue


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
