"""The process between a supervisor and one server: `python -I -S guard.py PARENT_PID GRACE_S FOLDER LEFT COMMAND...`.

It leads the server's process group, and ends with the server's exit status (128 plus the number of a signal). Whatever
happens, it leaves no process of the server behind:

    the server ends            what is left of its group, such as an engine core, is ended
    SIGTERM to the guard       the whole group is ended
    the supervisor is gone     the same. That holds after kill -9 and a crash, which run no code in the supervisor
    the guard is killed        the kernel kills the server (parent-death signal), and the supervisor its group

A group is ended by SIGTERM, and by SIGKILL after GRACE_S. The guard is also the reaper of the server's orphans (Linux),
so that a worker that has left the group is found too. At the end it removes FOLDER, which has the server's temporary
files. If the supervisor is gone by then, it also removes the folders that match LEFT, which the supervisor would have
removed. It imports the standard library only, and starts in 20 ms.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

POLL_S = 0.25
KILLED_S = 5.0
"""How long processes may take to go after SIGKILL: a GPU's memory is freed first."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, grace_s: float, folder: str, left: str, command: list[str]) -> int:
    try:
        return _guard(parent, grace_s, command)
    finally:
        import shutil  # takes a third of the start

        shutil.rmtree(folder, ignore_errors=True)
        if os.getppid() != parent:
            import glob

            for each in glob.glob(left):
                shutil.rmtree(each, ignore_errors=True)


def _guard(parent: int, grace_s: float, command: list[str]) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Both only wake `select`: a handler must exist for the pipe to be written.
    heard, told = os.pipe()
    os.set_blocking(told, False)
    os.set_blocking(heard, False)
    stop: list[int] = []
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a terminal that closes: the supervisor decides

    guard, server = os.getpid(), os.fork()
    if server == 0:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # killed before that
                os._exit(1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    status = None
    while status is None and not stop and os.getppid() == parent:
        select.select([heard], [], [], POLL_S)
        _drain(heard)
        status = _reaped(server)
        _reap_orphans(0 if status is not None else server)
    return _end(server, status, grace_s)


def _end(server: int, status: int | None, grace_s: float) -> int:
    """End every process of the server, and return its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    for pid in _others():  # those that left the group
        _kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        status = _reaped(server) if status is None else status
        _reap_orphans(server if status is None else 0)
        if status is not None and not _others():
            break
        time.sleep(0.02)
    if status is None:
        _kill(server, signal.SIGKILL)
    deadline = time.monotonic() + KILLED_S
    while ((left := _others()) or status is None) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        status = _reaped(server) if status is None else status
        _reap_orphans(server if status is None else 0)
    return 1 if status is None else status


def _others() -> list[int]:
    """The processes of this group and the descendants of this process, without itself and without zombies."""
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:  # not Linux: the group gets its signals all the same
        return []
    own, group = os.getpid(), os.getpgrp()
    parents, members = {}, set()
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, its_group = file.read().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        pid = int(name)
        if state not in (b"Z", b"X"):
            parents[pid] = int(parent)
            if int(its_group) == group:
                members.add(pid)
    found = {own}
    grew = True
    while grew:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        grew = bool(new)
    return sorted((found | members) - {own})


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reaped(pid: int) -> int | None:
    """The exit status of a child that has ended."""
    try:
        ended, wait_status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 1
    if not ended:
        return None
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _reap_orphans(but: int) -> None:
    """Take the exit statuses of ended children, except `but`, whose status is wanted."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == but:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def _drain(heard: int) -> None:
    try:
        while os.read(heard, 512):
            pass
    except BlockingIOError:
        pass


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:]))
