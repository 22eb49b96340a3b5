"""Supervisor and guard with small real processes. tests/integration/test_own_servers.py has them in a run."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from process_group import group_members

from tests.helpers.servers import processes_of, server_pids
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.servers import kept_server, restarts
from torchtitan.grpo.servers.kept_server import Launch, with_temporary_folder
from torchtitan.grpo.servers.ports import PORTS, ReservedPort
from torchtitan.grpo.servers.supervisor import Supervisor
from torchtitan.grpo.weight_wire.version_names import FOLDER_PREFIX, MEMORY, own_run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")

# A server with two workers, one in its process group and one that has left it. Neither hears SIGTERM. One that crashes
# has been asked for its health before.
PROGRAM = """
import http.server, os, signal, subprocess, sys, threading, time
role, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "worker":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if role == "crashes" and not dying.is_alive():
            dying.start()
    def log_message(self, *_): pass
dying = threading.Timer(0.4, lambda: (print("out of memory", flush=True), os._exit(3)))
print("starting", role, flush=True)
if role == "crashes" and os.path.exists(os.path.join(folder, "crash")):
    sys.exit("out of memory")
if role == "silent":
    signal.pause()
if role == "workers":
    for own_group in (False, True):
        subprocess.Popen([sys.executable, "-I", "-S", __file__, "worker", folder, "0"], start_new_session=own_group)
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy)
server.serve_forever()
"""


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Start a supervisor of such servers."""
    (tmp_path / "server.py").write_text(PROGRAM)
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.1)
    monkeypatch.setattr(restarts, "BACKOFF_MAX_S", 0.2)
    for name, seconds in {
        "GRACE_S": 0.5,
        "HEALTH_S": 0.2,
        "RETURN_S": 0.0,
    }.items():
        monkeypatch.setattr(kept_server, name, seconds)
    started: list[Supervisor] = []

    def start(*roles: str, start_timeout_s: float = 20.0) -> Supervisor:
        def launch(i: int, role: str) -> Launch:
            words = [sys.executable, "-I", "-S", str(tmp_path / "server.py"), role, str(tmp_path)]
            return Launch(str(i), lambda port: ([*words, str(port)], dict(os.environ)), HttpControl)

        launches = [launch(i, role) for i, role in enumerate(roles)]
        started.append(Supervisor(launches, tmp_path / "logs", tmp_path / "urls.txt", start_timeout_s))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def own_weights() -> Iterator[Path]:
    """Where a trainer in this process would have weights for servers."""
    folder = MEMORY / f"{FOLDER_PREFIX}{own_run()}-test"
    folder.mkdir()
    yield folder
    folder.rmdir()


def launch_of(program: str) -> Launch:
    return Launch("0", lambda port: ([program], dict(os.environ)), HttpControl)


def server_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("server ")]


def temporary_folder(pid: int) -> Path:
    """What a process was started with as TMPDIR."""
    variables = dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if word)
    return Path(variables["TMPDIR"])


def until(what: str, seen: Callable[[], object], limit_s: float = 10.0) -> float:
    started = time.monotonic()
    while not seen():
        assert time.monotonic() < started + limit_s, f"not within {limit_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


def test_a_server_that_is_killed_comes_back_at_its_address_and_its_workers_do_not_outlive_it(
    supervise, tmp_path, own_weights
):
    ended: list[tuple[str, bool]] = []
    keeps = supervise("workers", "plain")
    # Asked at once: soon after, it may serve again.
    keeps.on_end = lambda url, why: ended.append((f"{url} {why}", keeps.may_return(url, time.monotonic() - 1000)))
    keeps.wait_healthy()
    again: list[str] = []
    keeps.on_healthy = again.append
    first, second = keeps.urls
    assert (tmp_path / "urls.txt").read_text() == f"{first}\n{second}\n"
    assert not keeps.may_return(first, time.monotonic() - 1000), "it serves"
    before = {Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2]: pid for pid in server_pids(tmp_path)}
    killed, other = (before[url.rpartition(":")[2]] for url in (first, second))
    workers = set(processes_of(tmp_path)) - {killed, other}
    os.kill(killed, signal.SIGKILL)
    until("noticed", lambda: ended, 5)
    assert ended == [(f"{first} server 0 ended with SIGKILL", True)]
    until("started again", lambda: keeps.restarts == 1 and len(server_pids(tmp_path)) == 2)
    keeps.wait_healthy()
    assert keeps.urls == [first, second] and keeps.restarts == 1
    until("told", lambda: again == [first])
    assert own_weights.exists(), "its owner lives"
    assert other in server_pids(tmp_path), "the other server goes on"
    left = workers & set(processes_of(tmp_path))
    assert len(left) == 1, "of the first server's guard and workers; the other's guard is there"
    keeps.close()
    assert processes_of(tmp_path) == [] and not (tmp_path / "urls.txt").exists()


def test_a_server_that_ends_while_others_use_its_memory_starts_when_they_are_done(supervise, tmp_path):
    keeps = supervise("plain")
    keeps.wait_healthy()
    keeps.may_restart.clear()
    os.kill(server_pids(tmp_path)[0], signal.SIGKILL)
    until("noticed", lambda: keeps.states[0].ends)
    time.sleep(0.6)  # the pause is 0.1 s here
    assert keeps.restarts == 0 and keeps.may_return(keeps.urls[0], 0.0)
    keeps.may_restart.set()
    keeps.wait_healthy()
    keeps.may_restart.clear()
    os.kill(server_pids(tmp_path)[0], signal.SIGKILL)
    until("noticed again", lambda: keeps.states[0].ends == 2)
    assert keeps.states[0].down
    keeps.close()
    assert not any(thread.name == "server 0" for thread in threading.enumerate())


def test_a_server_that_is_told_to_end_is_down_then_and_starts_again(supervise, tmp_path):
    keeps = supervise("plain")
    keeps.wait_healthy()
    (pid,) = server_pids(tmp_path)
    keeps.may_restart.clear()
    keeps.end(keeps.urls[0], "does not sleep")
    (state,) = keeps.states
    assert state.down and not state.healthy and state.why == "server 0 does not sleep"
    assert server_pids(tmp_path) == []
    keeps.end(keeps.urls[0], "once more")  # has no effect
    keeps.may_restart.set()
    keeps.wait_healthy()
    assert keeps.restarts == 1 and not keeps.states[0].down and server_pids(tmp_path) != [pid]


def test_a_guard_that_is_killed_leaves_no_server_behind(supervise, tmp_path):
    keeps = supervise("plain")
    keeps.wait_healthy()
    (server,) = server_pids(tmp_path)
    (guard,) = set(processes_of(tmp_path)) - {server}
    before = temporary_folder(server)
    os.kill(guard, signal.SIGKILL)
    until("the server is gone", lambda: not group_members(guard), 5)
    until("started again", lambda: keeps.restarts == 1 and server_pids(tmp_path))
    keeps.wait_healthy()
    assert not before.exists() and temporary_folder(server_pids(tmp_path)[0]).is_dir()


def test_what_a_server_leaves_in_its_temporary_folder_goes_with_it(supervise, tmp_path):
    keeps = supervise("plain")
    keeps.wait_healthy()
    (server,) = server_pids(tmp_path)
    first = temporary_folder(server)
    (first / "left").mkdir()
    (first / "left" / "socket").touch()
    os.kill(server, signal.SIGKILL)
    until("started again", lambda: keeps.restarts == 1 and server_pids(tmp_path))
    second = temporary_folder(server_pids(tmp_path)[0])
    assert not first.exists() and second.is_dir() and second != first
    listed = tmp_path / "urls.txt"
    listed.write_text("http://a:1\n")
    keeps.close()
    assert not second.exists()
    assert listed.read_text() == "http://a:1\n", "of servers that took their place"


def test_a_temporary_folder_is_short_enough_for_sockets():
    short = with_temporary_folder({"A": "1", "TMPDIR": "/tmp"}, "/tmp/grpo-abc")
    assert short["A"] == "1" and short["TMPDIR"] == "/tmp/grpo-abc"
    assert Path(short["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(tempfile.gettempdir())
    assert with_temporary_folder({"TORCHINDUCTOR_CACHE_DIR": "/c"}, "/tmp/x")["TORCHINDUCTOR_CACHE_DIR"] == "/c"
    assert with_temporary_folder({"A": "1"}, "/tmp/" + 70 * "x") == {"A": "1"}


def test_nothing_outlives_an_owner_that_is_killed(tmp_path):
    """The guard alone: nobody is left to tell it."""
    (tmp_path / "server.py").write_text(PROGRAM)
    (folder := tmp_path / "temporary").mkdir()
    (weights := tmp_path / "weights-run-1").mkdir()
    (weights / "version").touch()
    left = str(tmp_path / "weights-run-*")
    guard = Path(kept_server.__file__).with_name("guard.py")
    words = [sys.executable, "-I", "-S", str(tmp_path / "server.py"), "workers", str(tmp_path), "0"]
    owner = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', {str(guard)!r}, str(os.getpid()), '0.3', {str(folder)!r}, "
        f"{left!r}, *{words!r}], process_group=0)\n"
        "time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", owner])
    try:
        until("server and workers run", lambda: len(processes_of(tmp_path)) == 5)  # and owner and guard
        process.kill()
        process.wait()
        until("nothing is left", lambda: not processes_of(tmp_path), 5)
        assert not folder.exists() and not weights.exists()
    finally:
        process.kill()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


def test_a_server_that_never_serves_is_named_with_its_log(supervise, tmp_path):
    keeps = supervise("plain", "silent", start_timeout_s=3.0)
    said = r"server 1 \(http://127\.0\.0\.1:\d+\) did not serve within 3 s \(\[rollout\] start_timeout_seconds\) before"
    with pytest.raises(UserError, match=said + r".*its log .*/logs/1\.log ends with:\nstarting silent"):
        keeps.wait_healthy()
    assert keeps.restarts == 0 and len(server_pids(tmp_path)) == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "2001:db8::1"])
def test_an_address_of_another_machine_is_named(host, tmp_path):
    said = rf"no server can listen at {host} \(.+\): name an address of this machine"
    with (
        closing(Supervisor([launch_of("true")], tmp_path, None, 10.0, host)) as keeps,
        pytest.raises(UserError, match=said),
    ):
        keeps.start()


def test_a_folder_for_logs_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    urls = tmp_path / "urls.txt"
    urls.write_text("http://another's\n")
    said = "file/logs: logs cannot be written there: Not a directory"
    keeps = Supervisor([launch_of("true")], tmp_path / "file" / "logs", urls, 10.0)
    with closing(keeps), pytest.raises(UserError, match=said):
        keeps.start()
    assert urls.exists(), "it is not this supervisor's"


def test_a_log_that_cannot_be_written_is_named(supervise, tmp_path):
    (tmp_path / "logs" / "0.log").mkdir(parents=True)
    keeps = supervise("plain")
    with pytest.raises(
        UserError, match=r"could not be started: .*Is a directory: .*/logs/0\.log.*\n\(it cannot be read"
    ):
        keeps.wait_healthy()
    keeps.close()
    assert not (tmp_path / "urls.txt").exists() and not server_threads()


def test_a_thread_that_fails_is_told(supervise, monkeypatch):
    keeps = supervise("crashes")
    keeps.wait_healthy()

    def fail(url: str, why: str) -> None:
        raise ZeroDivisionError(why)

    keeps.on_end = fail
    until("left alone", lambda: keeps.why_down(keeps.urls[0]))
    with pytest.raises(UserError, match=r"server 0 \(http.*\) is left alone: ZeroDivisionError"):
        keeps.check()


def test_a_program_that_does_not_exist_is_named(tmp_path):
    with closing(Supervisor([launch_of("/no/such/program")], tmp_path, tmp_path / "urls.txt", 10.0)) as keeps:
        keeps.start()
        with pytest.raises(
            UserError, match=r"ended with exit status 127 before it served.*\n/no/such/program: No such"
        ):
            keeps.wait_healthy()


def test_a_server_that_crashes_again_and_again_stays_down_and_ends_the_run(supervise, tmp_path):
    keeps = supervise("crashes")
    keeps.wait_healthy()
    fleet = Fleet(keeps.urls, lambda url: Server(url, HttpControl(url)))
    fleet.keeper = keeps
    (tmp_path / "crash").touch()
    until("ended", lambda: keeps.may_return(keeps.urls[0], 0.0))
    fleet.withdraw(fleet.servers[0], "nobody listens there")
    fleet.check()  # it will return
    until("given up", lambda: keeps.why_down(keeps.urls[0]), 20)
    assert keeps.restarts == restarts.RESTARTS_MAX
    with pytest.raises(
        FleetError, match=r"0 of 1 servers left.*\n.*for the 6th time in \d+ s, and is not started(.*\n)+"
    ):
        fleet.check()
    assert (tmp_path / "logs" / "0.log").read_text().count("starting crashes") == 6
    with pytest.raises(UserError, match="out of memory"):
        keeps.check()


def test_a_lost_server_that_is_well_counts_as_left_for_a_while(supervise, monkeypatch):
    """What is wrong may show first in a request, and its feeding takes time."""
    monkeypatch.setattr(kept_server, "RETURN_S", 1.0)
    keeps = supervise("plain")
    keeps.wait_healthy()
    (url,), now = keeps.urls, time.monotonic()
    assert keeps.may_return(url, now)
    until("too late", lambda: not keeps.may_return(url, now), 3)
    assert not keeps.may_return("http://127.0.0.1:1", now)


def test_a_server_that_hangs_is_started_again(supervise, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_server, "HUNG_S", 0.5)
    monkeypatch.setattr("torchtitan.grpo.engines.http_control._HEALTH_REQUEST_S", 0.3)
    keeps = supervise("plain")
    keeps.wait_healthy()
    (server,) = server_pids(tmp_path)
    os.kill(server, signal.SIGSTOP)
    until("started again", lambda: keeps.restarts and server_pids(tmp_path) not in ([], [server]))
    keeps.wait_healthy()


def test_a_taken_port_is_not_given_to_a_server(supervise):
    with socket.socket() as taken:
        reserved = ReservedPort("127.0.0.1")  # a port where another run's server will listen is not to be taken
        port = reserved.port
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        reserved.close()
        first, second = supervise("plain"), supervise("plain")
        assert len({*first.urls, *second.urls, f"http://127.0.0.1:{port}"}) == 3
        first.wait_healthy()
        second.wait_healthy()


def test_a_server_moves_if_its_port_is_taken_and_the_list_follows(supervise, tmp_path):
    """The first attempt to write the list fails."""
    keeps, urls = supervise("plain"), tmp_path / "urls.txt"
    keeps.wait_healthy()
    before = keeps.urls
    keeps.may_restart.clear()
    os.kill(server_pids(tmp_path)[0], signal.SIGKILL)
    until("ended", lambda: keeps.states[0].ends)
    urls.unlink()
    (urls / "in the way").mkdir(parents=True)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(before[0].rpartition(":")[2])))
        taken.listen()
        keeps.may_restart.set()
        until("not listed", lambda: "cannot be written" in keeps.states[0].why)
        assert keeps.urls != before
        shutil.rmtree(urls)
        keeps.wait_healthy()
        assert urls.read_text() == f"{keeps.urls[0]}\n"
        assert keeps.may_return(before[0], time.monotonic() + 60), "the fleet may not have read its new address yet"


def test_ports_are_outside_those_of_connections():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert PORTS.stop <= low


def test_close_ends_threads_and_is_quick(supervise):
    keeps = supervise("plain", "plain")
    started = time.monotonic()
    keeps.close()
    assert time.monotonic() - started < 10, "they have 20 s to start"
    assert not server_threads()
