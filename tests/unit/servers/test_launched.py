"""What a launcher that keeps servers and rank 0 tell one another. tests/integration/test_ray.py has them in a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.servers import launched
from torchtitan.grpo.servers.launched import LaunchedServers, Notices
from torchtitan.grpo.servers.state import ServerState

FIRST, SECOND = ServerState("http://a:1"), ServerState("http://b:1")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_POLL_S", 0.01)
    monkeypatch.setattr(launched, "MARGIN_S", 0.0)
    monkeypatch.setattr(launched, "RETURN_S", 0.0)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[LaunchedServers]:
    with closing(LaunchedServers(tmp_path / "servers", "mine", 20.0)) as servers:
        servers.start()
        yield servers


def until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rank_0_asks_for_servers_and_hears_of_their_ends_and_returns(servers, tmp_path):
    mine, other = (Notices(tmp_path / "servers", token) for token in ("mine", "another run's"))
    mine.write([FIRST])
    assert not (tmp_path / "servers" / "state.json").exists(), "it has not seen yet that servers are wanted"
    assert mine.is_wanted() and not other.is_wanted()
    ended: list[tuple[str, str, bool]] = []
    servers.on_end = lambda url, why: ended.append((url, why, servers.may_return(url, 0.0)))
    again: list[str] = []
    servers.on_healthy = again.append
    up = [replace(FIRST, healthy=True), replace(SECOND, healthy=True)]

    mine.write([FIRST, ServerState()])
    assert not servers.urls_file.exists(), "one has no address yet"
    mine.write(up)
    servers.wait_healthy()
    assert servers.urls == servers.urls_file.read_text().split() == ["http://a:1", "http://b:1"]
    assert not servers.may_return("http://a:1", 0.0), "it serves"
    assert not servers.may_return("http://c:1", 0.0), "nobody knows it"

    lost = replace(up[1], healthy=False, ends=1, why="server 1 ended with SIGKILL")
    mine.write([up[0], lost])
    until(lambda: ended)
    assert ended == [("http://b:1", "server 1 ended with SIGKILL", True)]
    moved = replace(lost, url="http://c:1", healthy=True, restarts=1)
    mine.write([up[0], moved])
    until(lambda: servers.restarts and len(again) == 3)
    assert again == ["http://a:1", "http://b:1", "http://c:1"]
    assert servers.urls_file.read_text() == "http://a:1\nhttp://c:1\n"
    assert len(ended) == 1 and not servers.may_return("http://c:1", 0.0)

    mine.write([up[0], replace(moved, healthy=False, ends=2, given_up="server 1 stays down")])
    until(lambda: len(ended) == 2)
    assert not servers.may_return("http://c:1", time.monotonic()) and "stays down" in servers.why_down("http://c:1")
    assert servers.why_down("http://a:1") == ""


def test_a_server_that_has_just_returned_counts_as_returning(servers, tmp_path, monkeypatch):
    """It may be lost for a reason of before its return, which rank 0 has found late."""
    monkeypatch.setattr(launched, "RETURN_S", 60.0)
    notices = Notices(tmp_path / "servers", "mine")
    assert notices.is_wanted()
    notices.write([replace(FIRST, healthy=True)])
    servers.wait_healthy()
    assert servers.may_return("http://a:1", 0.0)
    notices.write([replace(FIRST, url="http://d:1", healthy=True, ends=1, restarts=1)])
    until(lambda: servers.urls == ["http://d:1"])
    assert servers.may_return("http://a:1", 0.0), "the fleet may not have read its new address yet"


def test_what_another_launcher_says_is_not_heard_and_its_files_stay(servers, tmp_path):
    folder = tmp_path / "servers"
    mine, other = Notices(folder, "mine"), Notices(folder, "another run's")
    assert mine.is_wanted() and not other.is_wanted()
    mine.write([replace(FIRST, healthy=True)])
    servers.wait_healthy()
    other.write([replace(SECOND, healthy=True)])
    other.remove()
    assert servers.urls_file.read_text() == "http://a:1\n", "nobody has asked the other launcher"
    (folder / "state.json").write_text('{"token": "an earlier run", "servers": []}')
    time.sleep(0.1)
    assert servers.urls == ["http://a:1"]
    mine.remove()
    assert list(folder.iterdir()) == []


def test_a_server_that_does_not_come_up_is_named(tmp_path):
    notices = Notices(tmp_path, "mine")
    with closing(LaunchedServers(tmp_path, "mine", 1.0)) as servers:
        servers.start()
        assert notices.is_wanted()
        notices.write([replace(FIRST, healthy=True), SECOND])
        with pytest.raises(UserError, match=r"^server 1 \(http://b:1\) did not serve within 1 s \(\[rollout\] start"):
            servers.wait_healthy()
        notices.write([FIRST, replace(SECOND, given_up="server 1 ended; its log ends with: no memory")])
        with pytest.raises(UserError, match="ends with: no memory"):
            until(servers.wait_healthy)
