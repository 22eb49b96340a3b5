"""One server's worker beside a real board and fleet: when it connects again, and what a drop leaves behind."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from torchtitan.grpo.config.job_config import WeightSync
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.http_control import NoReply
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.weight_sync import worker as worker_module
from torchtitan.grpo.weight_sync.board import Board, Mode
from torchtitan.grpo.weight_sync.copies import VersionCopy
from torchtitan.grpo.weight_sync.link import Pause, WeightSyncError
from torchtitan.grpo.weight_sync.push import Push
from torchtitan.grpo.weight_sync.sync_thread import Leader
from torchtitan.grpo.weight_sync.worker import ServerWorker

LATE_S = 0.05
PATIENT_S = 10.0
"""On a busy machine a server that is well may stand still for longer than `LATE_S`."""


class Link:
    """Of a server that refuses to connect, or takes `update_s` for a version."""

    def __init__(self, update_s: float, refuses: bool = False) -> None:
        self.check: Callable[[], None] = lambda: None
        self.update_s, self.refuses = update_s, refuses
        self.connected: list[float] = []

    def connect(self, plan_info: dict) -> None:
        self.connected.append(time.monotonic())
        if self.refuses:
            raise WeightSyncError("http://server", "connect", -1, 0, "HTTP 500")

    def stop(self, version: int) -> None:
        pass

    def update(self, feed, buckets: list, num_buffers: int) -> dict[str, float]:
        deadline = time.monotonic() + self.update_s
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.001)
        feed.release(1)
        return {"total": self.update_s}

    def close(self) -> None:
        pass


class Asking(SimpleNamespace):
    """A link that keeps what it can ask."""

    def __init__(self, *args: object, **asks: Callable) -> None:
        super().__init__(**asks)


class Copy(VersionCopy):
    def feed(self) -> SimpleNamespace:
        return SimpleNamespace(version=self.version, release=lambda count: None)


class Servers:
    """Workers of some servers; no leader."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        links: list[Link],
        mode: Mode = Mode.COMMON,
        healthy: Callable[[], bool] = lambda: True,
    ):
        by_url = {f"http://server{i}": link for i, link in enumerate(links)}
        control = SimpleNamespace(is_healthy=healthy, weight_version=lambda: None)
        monkeypatch.setattr(ServerWorker, "_make_link", staticmethod(lambda server, *_: by_url[server.url]))
        self.fleet = Fleet(list(by_url), lambda url: Server(url, control), min_servers=0)
        buckets = [SimpleNamespace(index=0, payload_bytes=1)]
        self.board = Board(
            self.fleet,
            buckets,
            1,
            WeightSync(timeout_seconds=10.0, straggler_seconds=LATE_S),
            Pause(),
            {},
            Copy(),
            copies_only=False,
        )
        self.workers = self.board.workers = [ServerWorker(s, self.board, "gloo", None) for s in self.fleet.servers]
        for worker in self.workers:
            worker.mode = mode

    def push(self, version: int, late_s: float = PATIENT_S) -> Push:
        """To the servers that take part in pushes. Those that are late are dropped."""
        push = self.board.begin_push(lambda urls, on_drop: Push(version, 1, 1, urls, late_s, on_drop))
        self.board.sending(version)
        push.offer(None, None)
        push.complete([], {})
        return push


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def make(*args, **kwargs) -> Servers:
        made.append(Servers(monkeypatch, *args, **kwargs))
        for worker in made[-1].workers:
            worker.start()
        return made[-1]

    yield make
    for servers in made:
        servers.board.close()
        for worker in servers.workers:
            worker.join(10)
            assert not worker.is_alive()


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def in_common(board: Board) -> list[ServerWorker]:
    """Between two steps of the workers: amid one, such a server is not in traffic yet."""
    with board.lock:
        return board.in_common()


def test_two_stragglers_of_one_drop_take_part_in_later_pushes(make):
    """Listeners take so long with the first one's drop that the second one has connected again before its own."""
    links = [Link(0.0), Link(60.0), Link(60.0)]
    servers = make(links)
    _, *late = servers.workers
    leader = threading.current_thread()
    servers.fleet.add_listener(lambda: time.sleep(0.1) if threading.current_thread() is leader else None)
    servers.push(1, LATE_S)
    until(lambda: all(worker.mode is Mode.ALONE for worker in late))
    for link in links:
        link.update_s = 0.0
    servers.board.copy.complete(1, [])
    servers.board.copy_made()
    until(lambda: len(servers.fleet.eligible(1)) == 3)
    assert servers.board.in_common() == servers.workers
    servers.push(2)
    until(lambda: len(servers.fleet.eligible(2)) == 3)


def updates_on_demand(link: Link) -> tuple[threading.Event, threading.Event]:
    """Its next updates have begun, and may end."""
    begun, finish = threading.Event(), threading.Event()

    def update(feed, buckets: list, num_buffers: int) -> dict[str, float]:
        begun.set()
        assert finish.wait(10)
        return {"total": 1.0}

    link.update = update
    return begun, finish


@pytest.mark.parametrize("newest", [1, 2])
def test_a_server_that_finishes_as_it_is_dropped_is_not_left_out(make, newest):
    """It has the whole version. It enters traffic if that is the newest."""
    servers = make([Link(0.0)])
    (worker,) = servers.workers
    begun, finish = updates_on_demand(worker.link)
    push = servers.board.begin_push(lambda urls, on_drop: Push(1, 1, 1, urls, LATE_S, on_drop))
    assert begun.wait(10)
    with servers.board.lock:
        worker.drop(push, "late")
        servers.board.sending(newest)
    assert servers.board.in_common() == []
    finish.set()
    until(lambda: in_common(servers.board) == [worker])
    assert servers.fleet.servers[0].in_traffic is (newest == 1)
    assert servers.board.push_wanted is (newest == 2), "no other server would have to wait for it"


def test_a_server_that_refuses_is_left_alone_and_one_that_was_dead_is_back_soon(make, monkeypatch):
    monkeypatch.setattr(worker_module, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(worker_module, "_DEAD_S", 0.05)
    monkeypatch.setattr(worker_module, "_REFUSES_S", 0.64)
    alive, asked = True, 0

    def healthy() -> bool:
        nonlocal asked
        asked += 1
        if not alive:
            raise EngineError("nobody listens there")
        return True

    link = Link(0.0, refuses=True)
    make([link], Mode.LOST, healthy)
    until(lambda: len(link.connected) == 9)
    pauses = [after - before for before, after in zip(link.connected, link.connected[1:], strict=False)]
    assert sum(pauses[:4]) < 0.5 < min(pauses[6:]), pauses
    for name in ("_BACKOFF_S", "_REFUSES_S"):  # after a refusal `until` would wait in vain
        monkeypatch.setattr(worker_module, name, 60.0)
    alive, asked = False, 0
    until(lambda: asked >= 11)  # often
    alive, link.refuses = True, False
    until(lambda: len(link.connected) == 10)


def test_a_server_that_its_keeper_has_started_again_is_connected_at_once(make, monkeypatch):
    monkeypatch.setattr(worker_module, "_BACKOFF_S", 60.0)
    monkeypatch.setattr(worker_module, "_DEAD_S", 60.0)
    alive = False
    link = Link(0.0)
    servers = make([link], Mode.LOST, lambda: alive)
    (worker,) = servers.workers
    until(lambda: worker.server.lost)
    alive = True
    servers.fleet.started(worker.url)
    until(lambda: link.connected)


def test_a_silent_server_delays_no_push_and_gets_the_newest_weights_once_it_replies(make):
    replies = True

    def healthy() -> bool:
        if not replies:
            raise NoReply("no reply")
        return True

    servers = make([Link(0.0), Link(0.0)], healthy=healthy)
    silent, other = servers.workers
    servers.push(1)
    until(lambda: len(servers.fleet.eligible(1)) == 2)
    replies = False
    servers.fleet.fall_silent(silent.server, "no reply")
    servers.fleet.fall_silent(other.server, "no reply")
    assert servers.fleet.eligible(1) == [other.server], "somebody must answer"
    silent.link.update_s = 5.0
    servers.push(2, LATE_S)
    until(lambda: servers.fleet.eligible(2) == [other.server])
    assert not silent.dropped and silent.server.version == 1
    silent.link.update_s = 0.0
    replies = True
    until(lambda: not silent.server.silent and silent.mode is Mode.ALONE)
    servers.board.copy.complete(2, [])
    servers.board.copy_made()
    until(lambda: len(servers.fleet.eligible(2)) == 2)


def test_a_silent_server_does_not_hold_up_those_that_have_drained(make):
    drains, quick = Link(0.0), Link(0.0)
    servers = make([drains, quick])
    worker, other = servers.workers
    servers.push(1)
    until(lambda: len(servers.fleet.eligible(1)) == 2)

    def stop(version: int) -> None:
        while True:
            drains.check()
            time.sleep(0.001)

    drains.stop = stop
    push = servers.board.begin_push(lambda urls, on_drop: Push(2, 1, 1, urls, 60.0, on_drop, drain_s=60.0))
    timer = threading.Timer(0.1, servers.fleet.fall_silent, [worker.server, "no reply"])
    timer.start()
    waiting = time.monotonic()
    push.wait_until_still(lambda: None)
    assert time.monotonic() - waiting < 10
    assert not worker.server.in_traffic and other.server.in_traffic
    push.fail()


def test_a_server_that_is_lost_while_a_push_begins_has_left_that_push(make, monkeypatch):
    """Else it would be dropped again as soon as it is back."""
    monkeypatch.setattr(worker_module, "HEALTH_S", 0.01)
    looking, answer = threading.Event(), threading.Event()

    def healthy() -> bool:
        if not answer.is_set():
            looking.set()
            assert answer.wait(10)
            raise EngineError("cut off")
        return True

    link = Link(0.0)
    servers = make([link], Mode.COMMON, healthy)
    (worker,) = servers.workers
    assert looking.wait(10)
    push = servers.board.begin_push(lambda urls, on_drop: Push(1, 1, 1, urls, LATE_S, on_drop))
    worker.drop(push, "late")
    settled = threading.Event()
    push.on_settled(settled.set)
    answer.set()
    assert settled.wait(10), "it will not acknowledge"
    until(lambda: in_common(servers.board) == [worker])
    servers.push(2)
    until(lambda: servers.fleet.eligible(2))
    assert len(link.connected) == 1


def test_a_server_that_fails_is_out_of_traffic_before_its_push_ends(make, monkeypatch):
    """Else whoever waits for that end still asks it."""
    link = Link(0.0)
    servers = make([link])
    (server,) = servers.fleet.servers
    servers.push(1)
    until(lambda: server.in_traffic)
    in_traffic, ended = [], Push.ended

    def update(*_: object) -> None:
        raise WeightSyncError(server.url, "verify", 2, 1, "not those sent")

    def watched(push: Push, url: str, seconds: dict[str, float] | None) -> None:
        if push.version == 2:  # the first may still be ending: its server is back in traffic before that
            in_traffic.append(server.in_traffic)
        ended(push, url, seconds)

    link.update = update
    monkeypatch.setattr(Push, "ended", watched)
    servers.push(2)
    assert in_traffic == [False]


def test_a_link_asks_the_fleet_what_runs_at_its_server():
    """Whose requests may be those of another process."""
    engine = SimpleNamespace(link=f"{__name__}:Asking", disk_link=f"{__name__}:Asking")
    fleet = Fleet(["http://a", "http://b"], lambda url: Server(url, SimpleNamespace(), engine=engine))
    board = Board(
        fleet, [], 1, WeightSync(timeout_seconds=10.0, straggler_seconds=LATE_S), Pause(), {}, Copy(), copies_only=False
    )
    server, other = fleet.servers
    link = ServerWorker(server, board, "gloo", None).link
    fleet.admit(server, 3)
    server.in_flight, other.in_flight = 2, 5
    assert (link.requests_in_flight(), link.versions_in_use()) == (2, {3})
    fleet.requests_in_flight = {server: 7}.get
    fleet.versions_in_use = {server: {1, 2}}.get
    assert (link.requests_in_flight(), link.versions_in_use()) == (7, {1, 2})
    link.hold()
    assert server.held and not other.held


def test_servers_that_rest_are_neither_asked_nor_connected_nor_fed_until_they_rise(make, monkeypatch):
    """One is being fed meanwhile, and comes to rest behind it. One is suspected, and one refuses to connect."""
    monkeypatch.setattr(worker_module, "HEALTH_S", 0.02)
    monkeypatch.setattr(worker_module, "_SUSPECT_LOOK_S", 0.01)
    asked: list[float] = []
    refusing = Link(0.0, refuses=True)
    servers = make([Link(0.0), Link(0.0), refusing], healthy=lambda: asked.append(time.monotonic()) is None)
    fleet, workers = servers.fleet, servers.workers
    begun, finish = updates_on_demand(workers[0].link)
    fleet.started(fleet.servers[2].url)
    workers[2]._lose("it is gone")
    until(lambda: refusing.connected)
    push = servers.board.begin_push(lambda urls, on_drop: Push(1, 1, 1, urls, 10.0, on_drop))
    servers.board.sending(1)
    push.offer(None, None)
    threading.Thread(target=push.complete, args=([], {}), daemon=True).start()
    assert begun.wait(10)
    until(lambda: fleet.servers[1].in_traffic)
    fleet.suspect(fleet.servers[1], EngineError("no reply"))
    fleet.rest()
    until(lambda: all(server.at_rest for server in fleet.servers[1:]))
    assert not fleet.servers[0].at_rest, "it is being fed"
    finish.set()
    until(lambda: fleet.servers[0].at_rest)
    assert fleet.servers[0].in_traffic and fleet.servers[0].version == 1
    before = len(asked), len(refusing.connected)
    fleet.started(fleet.servers[2].url)
    time.sleep(0.7)  # over the pause after a refusal
    assert (len(asked), len(refusing.connected)) == before and all(server.at_rest for server in fleet.servers)
    refusing.refuses = False
    fleet.rise()
    until(lambda: len(refusing.connected) > before[1])
    until(lambda: not fleet.servers[1].suspected and fleet.servers[1].in_traffic)
    assert not any(server.at_rest for server in fleet.servers)


def test_a_server_that_is_listed_again_is_left_alone_until_its_last_update_has_ended(make, monkeypatch):
    """Else its old worker may resume it amid the new one's update."""
    monkeypatch.setattr(worker_module, "_BACKOFF_S", 0.01)
    servers = make([Link(0.0)])
    board, (old,) = servers.board, servers.workers
    begun, finish = updates_on_demand(old.link)
    board.begin_push(lambda urls, on_drop: Push(1, 1, 1, urls, LATE_S, on_drop))
    assert begun.wait(10)
    board.config.timeout_seconds = 0.1
    new = ServerWorker(old.server, board, "gloo", None)
    new.link = Link(0.0)
    board.replace_workers([old], [new])
    servers.workers = [old, new]
    old.remove()
    new.start()
    until(lambda: old.server.lost)
    assert "waiting for the end of what it was told before it left the list of servers" in old.server.reason
    assert old.is_alive() and not new.link.connected
    finish.set()
    until(lambda: new.link.connected)
    assert not old.is_leaving()


def test_an_event_of_one_server_costs_the_other_workers_nothing(monkeypatch):
    """At each version there are as many events as servers, so one that asks every worker is quadratic."""
    servers = Servers(monkeypatch, [Link(0.0) for _ in range(3)])
    first = servers.workers[0]
    asked: list[ServerWorker] = []

    def asks(worker: ServerWorker, name: str) -> object:
        asked.append(worker)
        return object.__getattribute__(worker, name)

    monkeypatch.setattr(ServerWorker, "__getattribute__", asks)
    for event in (
        lambda: servers.fleet.admit(first.server, 1),
        lambda: servers.fleet.suspect(first.server, EngineError("it was reset")),
        lambda: servers.fleet.started(first.url),
        lambda: servers.fleet.withdraw(first.server, "it is gone"),
    ):
        event()
        assert set(asked) <= {first}


def test_a_list_that_changes_while_servers_drain_is_read_meanwhile(make, monkeypatch):
    """That may take as long as the longest answer: a server that has left the list must get no request so long."""
    servers = make([Link(0.0), Link(0.0)])
    stays, leaves = servers.fleet.servers
    servers.push(1)
    until(lambda: len(servers.fleet.eligible(1)) == 2)
    monkeypatch.setattr("torchtitan.grpo.engines.fleet.read_urls", lambda path: [stays.url])
    monkeypatch.setattr(servers.fleet, "_stamp", "of an older list")
    ranks = SimpleNamespace(command=lambda kind: kind)
    leader = Leader(ranks, SimpleNamespace(), servers.board.config, servers.board, lambda server: None)
    push = servers.board.begin_push(lambda urls, on_drop: Push(2, 1, 1, urls, PATIENT_S, on_drop, PATIENT_S))
    push.wait_until_still(leader._while_servers_drain)
    assert servers.fleet.eligible(1) == [stays] and not leaves.in_traffic
    push.fail()
