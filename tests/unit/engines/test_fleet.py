"""The fleet: which servers are in traffic or lost, and a list of servers that changes."""

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from torchtitan.grpo.config.urls import read_urls, url_problem
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import http_url

A, B, C = "http://a:8000", "http://b:8000", "https://c:8001"


def make(url: str) -> Server:
    return Server(url, VllmControl(url))


def fleet_of(*urls: str, min_servers: int = 1) -> Fleet:
    return Fleet(list(urls), make, min_servers)


class Changes:
    """Counts the calls of a listener, and looks at the fleet in each: a listener is called outside the lock."""

    def __init__(self, fleet: Fleet) -> None:
        self.count = 0
        self.fleet = fleet
        fleet.add_listener(self)

    def __call__(self) -> None:
        self.fleet.describe()
        self.count += 1


class UrlsFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> None:
        """Replace the file as a user should: write another, then rename it."""
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        os.replace(beside, self.path)


@pytest.fixture
def urls_file(tmp_path) -> UrlsFile:
    return UrlsFile(tmp_path / "servers.txt")


def listed_fleet(urls_file: UrlsFile, text: str, min_servers: int = 1) -> Fleet:
    urls_file.write(text)
    return Fleet([], make, min_servers, str(urls_file.path))


def test_a_server_starts_out_of_traffic_and_is_admitted(caplog) -> None:
    caplog.set_level(logging.INFO)
    fleet = fleet_of(A + "/", B)
    a, b = fleet.servers
    assert a.url == A
    assert fleet.eligible(-1) == []
    fleet.admit(a, 0)
    assert fleet.eligible(-1) == fleet.eligible(0) == [a]
    assert fleet.eligible(1) == []
    fleet.admit(b, 3)
    fleet.admit(a, 3)
    assert fleet.eligible(3) == [a, b]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"{A} is in traffic, with weights of version 0",
        f"{B} is in traffic, with weights of version 3",
    ]


def test_servers_with_new_enough_weights_are_eligible_in_their_order() -> None:
    fleet = fleet_of(A, B, C)
    a, b, c = fleet.servers
    for server, version in ((a, 5), (b, 5), (c, 4)):
        fleet.admit(server, version)
    assert fleet.eligible(-1) == fleet.eligible(4) == [a, b, c]
    assert fleet.eligible(5) == [a, b]
    fleet.withdraw(b, "slow", lost=False)
    assert fleet.eligible(5) == [a]


def test_withdraw_logs_a_change_once_and_lost_stays_until_admitted(caplog) -> None:
    caplog.set_level(logging.WARNING)
    fleet = fleet_of(A, B)
    a, _ = fleet.servers
    fleet.admit(a, 1)
    fleet.withdraw(a, "takes more than 1 s", lost=False)
    fleet.withdraw(a, "connection\nrefused")
    fleet.withdraw(a, "attempt 2: connection refused")
    fleet.withdraw(a, "being fed", lost=False)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{A} is out of traffic: takes more than 1 s"),
        ("WARNING", f"{A} is lost: connection refused"),
    ]
    assert a.lost and not a.in_traffic and a.reason == "being fed"
    fleet.admit(a, 2)
    assert (a.in_traffic, a.lost, a.suspected, a.reason, a.version) == (True, False, False, "", 2)


def test_suspicion_lasts_until_the_worker_knows(caplog) -> None:
    caplog.set_level(logging.WARNING)
    fleet = fleet_of(A, B)
    a, b = fleet.servers
    fleet.suspect(b, RuntimeError("never admitted"))
    assert not b.suspected
    fleet.admit(a, 1)
    for _ in range(3):
        fleet.suspect(a, RuntimeError("reset by peer"))
    assert a.suspected and not a.in_traffic and not a.lost
    assert [record.getMessage() for record in caplog.records] == [
        f"{A} is out of traffic: a request failed: reset by peer"
    ]
    fleet.check()
    fleet.withdraw(a, "gone")
    fleet.suspect(a, RuntimeError("a request that was still under way"))
    assert a.lost and not a.suspected and a.reason == "gone"
    fleet.admit(a, 2)
    assert fleet.eligible(2) == [a]


@pytest.mark.parametrize("forgiven", ["never", "by an answer", "by a loss"])
def test_a_healthy_server_that_goes_on_failing_comes_back_later(monkeypatch, forgiven) -> None:
    now = 100.0
    monkeypatch.setattr("torchtitan.grpo.engines.fleet.time", SimpleNamespace(monotonic=lambda: now))
    fleet = fleet_of(A)
    (a,) = fleet.servers
    fleet.admit(a, 0)
    for version, wait_s in enumerate((0.0, 1.0, 2.0, 4.0, 8.0, 8.0) if forgiven == "never" else (0.0, 0.0, 0.0), 1):
        fleet.suspect(a, RuntimeError("bad answer"))
        if wait_s:
            now += wait_s - 0.1
            fleet.admit(a, version)
            assert (a.in_traffic, a.suspected, a.version) == (False, True, version)
            now += 0.1
        fleet.admit(a, version)
        assert a.in_traffic and not a.suspected
        if forgiven == "by an answer":
            fleet.answered(a)
        elif forgiven == "by a loss":
            fleet.withdraw(a, "restarted")
            fleet.admit(a, version)


def test_too_few_servers_names_the_lost_and_the_key() -> None:
    fleet = fleet_of(A, B, C, min_servers=2)
    a, b, c = fleet.servers
    fleet.check()  # none has weights yet, none is lost
    fleet.admit(a, 7)
    fleet.withdraw(a, "connection refused")
    fleet.withdraw(b, "slow", lost=False)
    fleet.check()
    fleet.withdraw(c, "no acknowledgement within 60 s")
    with pytest.raises(FleetError) as raised:
        fleet.check()
    assert str(raised.value) == (
        "1 of 3 servers left, [rollout] min_servers = 2: "
        f"{A}: lost, version 7, connection refused; {C}: lost, version -1, no acknowledgement within 60 s"
    )
    fleet.admit(a, 8)
    fleet.check()


def test_a_list_must_have_enough_servers_at_the_start(urls_file) -> None:
    with pytest.raises(UserError, match=r"min_servers = 2 is over .* urls_file \(.*servers.txt\), 1"):
        listed_fleet(urls_file, A, min_servers=2)


def test_every_change_calls_the_listeners(urls_file) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n{B}\n")
    changes = Changes(fleet)
    a, _ = fleet.servers
    fleet.admit(a, 0)
    fleet.admit(a, 1)
    fleet.suspect(a, RuntimeError("reset"))
    fleet.withdraw(a, "gone")
    assert changes.count == 4
    fleet.reread()
    assert changes.count == 4
    urls_file.write(f"{A}\n")
    fleet.reread()
    assert changes.count == 5


def test_rereading_adds_removes_and_keeps(urls_file) -> None:
    fleet = listed_fleet(urls_file, f"# two\n{A}\n\n  {B}/  # the slow one\n")
    a, b = fleet.servers
    assert [a.url, b.url] == [A, B]
    fleet.admit(a, 4)
    fleet.admit(b, 4)
    assert fleet.reread() == ([], [])
    urls_file.write(f"{C}\n{A}\n")
    added, removed = fleet.reread()
    assert removed == [b] and [server.url for server in added] == [C]
    assert fleet.servers == [*added, a]
    assert a.in_traffic and a.version == 4
    assert not added[0].in_traffic
    assert fleet.reread() == ([], [])
    urls_file.write(f"{A}\n{C}\n{B}\n")
    (again,), removed = fleet.reread()
    assert again.url == B and again is not b and again.version == -1 and removed == []


def test_nothing_brings_a_removed_server_back(urls_file) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n{B}\n")
    a, b = fleet.servers
    for server in (a, b):
        fleet.admit(server, 1)
    urls_file.write(f"{A}\n")
    assert fleet.reread() == ([], [b])
    assert not b.in_traffic and "urls_file" in b.reason
    changes = Changes(fleet)
    fleet.admit(b, 2)
    fleet.suspect(b, RuntimeError("reset"))
    fleet.withdraw(b, "gone")
    assert (b.in_traffic, b.lost, b.version, changes.count) == (False, False, 1, 0)
    assert fleet.eligible(-1) == [a]


def test_a_list_that_shrinks_below_min_servers(urls_file) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n{B}\n", min_servers=2)
    urls_file.write(f"{A}\n")
    fleet.reread()
    with pytest.raises(FleetError, match=r"1 of 1 servers left, \[rollout\] min_servers = 2: no other .*servers.txt"):
        fleet.check()


@pytest.mark.parametrize("text", [f"{A}\nhttp//b:8000\n", "", f"{A}\n{A}/\n", f"{A}\n\x00\x00\x00"])
def test_a_bad_list_is_logged_once_and_changes_nothing(urls_file, caplog, text) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n{B}\n")
    before = fleet.servers
    urls_file.write(text)
    for _ in range(3):
        assert fleet.reread() == ([], [])
    assert fleet.servers == before
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(urls_file.path) in caplog.text
    urls_file.write(f"{A}\n{C}\n")
    added, removed = fleet.reread()
    assert [server.url for server in added] == [C] and removed == before[1:]


def test_a_missing_list_is_logged_once_and_changes_nothing(urls_file, caplog) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n{B}\n")
    aside = urls_file.path.with_suffix(".aside")
    urls_file.path.rename(aside)
    for _ in range(3):
        assert fleet.reread() == ([], [])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No such file" in caplog.text
    aside.rename(urls_file.path)
    assert fleet.reread() == ([], [])
    assert len(fleet.servers) == 2
    urls_file.path.unlink()
    fleet.reread()
    assert len(caplog.records) == 2


def test_an_unchanged_list_is_not_opened(urls_file, monkeypatch) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n")
    opened = []
    monkeypatch.setattr("torchtitan.grpo.engines.fleet.read_urls", lambda path: opened.append(path) or [A])
    assert fleet.reread() == ([], [])
    assert opened == []
    urls_file.write(f"{A}\n")
    assert fleet.reread() == ([], [])
    assert opened == [str(urls_file.path)]


def test_a_list_that_is_being_written_waits_for_the_next_call(urls_file, monkeypatch) -> None:
    fleet = listed_fleet(urls_file, f"{A}\n{B}\n")

    def read_while_written(path: str) -> list[str]:
        half = read_urls(path)
        urls_file.write(f"{A}\n{B}\n{C}\n")
        return half

    urls_file.write(f"{A}\n")
    with monkeypatch.context() as patch:
        patch.setattr("torchtitan.grpo.engines.fleet.read_urls", read_while_written)
        assert fleet.reread() == ([], [])
    assert len(fleet.servers) == 2
    added, removed = fleet.reread()
    assert [server.url for server in added] == [C] and removed == []


def test_a_fleet_without_a_list_has_nothing_to_reread() -> None:
    fleet = fleet_of(A)
    assert fleet.reread() == ([], [])
    assert len(fleet.servers) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("b:8000", "is no base address: write http://host:port"),
        ("ftp://b:8000", "is no base address"),
        ("http://", "is no base address"),
        ("http://b:0", "is no base address"),
        ("http://b :80", "is no base address"),
        ("http://b:80/?x=1", "is no base address"),
        ("http://b:port", "write http://host:port"),
        ("http://b:80000", "write http://host:port"),
        ("http://[::1:80", "write http://host:port"),
        ("http://b..c:80", "label empty or too long"),
        ("http://me:hunter2@b:80", "a user or password for b: use [rollout] api_key_env"),
        (A, f"{A} is in line 2 already"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says) -> None:
    path = tmp_path / "servers.txt"
    path.write_text(f"# servers\n{A}\n{line}\n")
    with pytest.raises(UserError) as raised:
        read_urls(path)
    message = str(raised.value)
    assert message.startswith(f"[rollout] urls_file: {path} line 3: ")
    assert says in message
    assert "hunter2" not in message


def test_a_list_that_cannot_be_read(tmp_path) -> None:
    path = tmp_path / "servers.txt"
    with pytest.raises(UserError, match=r"\[rollout\] urls_file: .*servers.txt: No such file"):
        read_urls(path)
    with pytest.raises(UserError, match=r"urls_file: .*: Is a directory"):
        Fleet([], make, urls_file=str(tmp_path))
    path.write_text("# nobody\n\n")
    with pytest.raises(UserError, match="lists no server"):
        read_urls(path)
    path.write_bytes(b"# \xff\r\nhttp://[::1]:80\r\n")
    assert read_urls(path) == [http_url("::1", 80)] == ["http://[::1]:80"]
    path.write_bytes(b"http://b\xff:80\r\n")
    with pytest.raises(UserError, match=r"line 1: .*Invalid character"):
        read_urls(path)


@pytest.mark.parametrize("host", ["node7", "127.0.0.1", "::1", "fe80::1"])
def test_an_address_that_is_printed_can_be_given(host) -> None:
    url = http_url(host, 8000)
    assert url_problem(url) is None
    assert (urlsplit(url).hostname, urlsplit(url).port) == (host, 8000)


def test_many_threads(urls_file) -> None:
    """Workers, a collector and a reader of the list at once: no error, and each worker's last call wins."""
    urls = [f"http://s{i}:80" for i in range(8)]
    fleet = listed_fleet(urls_file, "\n".join(urls))
    kept = fleet.servers[:4]
    errors = []

    def guarded(call) -> None:
        try:
            for i in range(200):
                call(i)
        except Exception as error:
            errors.append(error)

    def work(server: Server):
        def step(i: int) -> None:
            fleet.withdraw(server, f"push {i}", lost=False)
            fleet.admit(server, i)

        return step

    def relist(i: int) -> None:
        urls_file.write("\n".join(urls[: 4 + i % 5]))
        fleet.reread()

    def ask(i: int) -> None:
        for server in fleet.eligible(-1)[:1]:
            fleet.suspect(server, RuntimeError("reset"))
        fleet.check()

    calls = [*(work(server) for server in kept), relist, ask]
    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert fleet.servers[:4] == kept
    assert [server.version for server in kept] == [199] * 4


def test_a_silent_server_leaves_traffic_unless_it_loads_weights_or_is_the_last(caplog) -> None:
    fleet = fleet_of(A, B)
    a, b = fleet.servers
    fleet.admit(a, 1)
    fleet.admit(b, 1)
    a.updating = True
    fleet.fall_silent(a, "no reply")
    assert a.in_traffic and not a.silent
    a.updating = False
    fleet.fall_silent(a, "no reply")
    fleet.fall_silent(b, "no reply")
    assert (a.silent, a.in_traffic, a.lost) == (True, False, False) and b.in_traffic and not b.silent
    assert f"{A} is out of traffic: it does not reply: no reply" in caplog.text
    fleet.heard(a)
    assert not a.silent and not a.in_traffic, "weight sync says when it is back"
    fleet.admit(a, 1)
    fleet.withdraw(b, "kept others waiting", lost=False)
    fleet.fall_silent(b, "no reply")
    assert b.silent, "it has requests although it is out of traffic"
    fleet.withdraw(b, "gone")
    assert not b.silent
