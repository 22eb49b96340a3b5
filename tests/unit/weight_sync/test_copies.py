"""Versions through copies, as `transport = "disk"` has no others: a real sync thread and workers, with slow links."""

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from torchtitan.grpo.config.job_config import WeightSync
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.weight_sync import worker as worker_module
from torchtitan.grpo.weight_sync.board import Board, Closing, Mode
from torchtitan.grpo.weight_sync.copies import VersionCopy
from torchtitan.grpo.weight_sync.link import Pause, WeightSyncError
from torchtitan.grpo.weight_sync.push import Push
from torchtitan.grpo.weight_sync.sync_thread import Leader
from torchtitan.grpo.weight_sync.worker import ServerWorker

COPY_S, UPDATE_S, AGREE_S, LATE_S = 0.02, 0.02, 0.01, 0.1


class Folder(VersionCopy):
    """Records writes to it while it has readers."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def begin(self) -> None:
        if self.readers:
            self.faults.append(f"begun under {self.readers} reader(s)")
        super().begin()

    def store(self, index: int, wire: object) -> None:
        time.sleep(COPY_S)

    def feed(self) -> SimpleNamespace:
        return SimpleNamespace(version=self.version)


class Link:
    """A server that reads a version for `UPDATE_S`. While `thawed` is not set, it never ends."""

    def __init__(self, copy: Folder) -> None:
        self.check = lambda: None
        self.copy = copy
        self.given: list[int] = []
        self.connected = 0  # by its worker
        self.thawed = threading.Event()
        self.thawed.set()

    def connect(self, plan_info: dict) -> None:
        self.connected += 1

    def stop(self, version: int) -> None:
        time.sleep(UPDATE_S / 2)
        if self.copy.readers and self.copy.version != version:
            self.copy.faults.append(f"version {version} became {self.copy.version} in its reader's hands")

    def update(self, feed: SimpleNamespace, buckets: list, num_buffers: int) -> dict[str, float]:
        time.sleep(UPDATE_S / 2)
        if not self.thawed.is_set():
            assert self.thawed.wait(10)
        self.check()
        self.given.append(feed.version)
        return {"total": UPDATE_S}

    def close(self) -> None:
        pass


class Servers:
    """A leader and workers, which begin in these modes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modes: list[Mode], copies_only: bool, agree_s: float = 0.0):
        self.copy = Folder()
        self.links = {f"http://server{i}": Link(self.copy) for i in range(len(modes))}
        monkeypatch.setattr(ServerWorker, "_make_link", staticmethod(lambda server, *_: self.links[server.url]))
        control = SimpleNamespace(is_healthy=lambda: True, weight_version=lambda: None)
        self.fleet = Fleet(list(self.links), lambda url: Server(url, control), min_servers=0)
        buckets = [SimpleNamespace(index=0, payload_bytes=1)]
        pause, config = Pause(True, True, 10.0), WeightSync(timeout_seconds=10.0, straggler_seconds=LATE_S)
        self.board = board = Board(self.fleet, buckets, 1, config, pause, {}, self.copy, copies_only)
        self.workers = board.workers = [ServerWorker(server, board, "", None) for server in self.fleet.servers]
        self.snapshots = SimpleNamespace(newest=-1)

        @contextmanager
        def hold(*_):
            time.sleep(agree_s)
            yield SimpleNamespace(version=self.snapshots.newest, seconds=lambda: 0.0)

        self.snapshots.hold = hold
        packer = SimpleNamespace(
            snapshots=self.snapshots,
            buckets=buckets,
            bytes=1,
            device=SimpleNamespace(type="cpu"),
            stopwatch=SimpleNamespace(take=dict),
            on_stream=nullcontext,
            gather=lambda *_: None,
            pack=lambda *_: None,
            expected_acknowledgement=lambda version: [],
        )
        ranks = SimpleNamespace(command=lambda *_: time.sleep(agree_s))
        self.leader = Leader(ranks, packer, WeightSync(async_weight_update=True), board, lambda server: None)
        for worker, mode in zip(self.workers, modes, strict=True):
            worker.mode = mode

    def __enter__(self) -> "Servers":
        for thread in (self.leader, *self.workers):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leader.closing = True
        self.board.close()
        for link in self.links.values():
            link.thawed.set()
        for thread in (self.leader, *self.workers):
            thread.join(10)
        assert not any(isinstance(thread, Leader | ServerWorker) for thread in threading.enumerate())
        assert self.leader.error is None and self.copy.faults == []
        for link in self.links.values():
            assert link.given == sorted(link.given)

    def publish(self, version: int) -> None:
        self.snapshots.newest = version
        self.board.notify()

    def wait_for(self, version: int, *servers: Server) -> None:
        until(lambda: all(server.serves(version) for server in servers))


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("agree_s", [0.0, AGREE_S], ids=["one-rank", "ranks-that-agree"])
def test_a_server_gets_every_version_that_it_has_time_for(agree_s, monkeypatch):
    with Servers(monkeypatch, [Mode.ALONE], True, agree_s) as servers:
        for version in range(40):  # a new one comes before the copy of the one before is whole
            servers.publish(version)
            time.sleep(0.8 * COPY_S)
        servers.wait_for(39, *servers.fleet.servers)
    (link,) = servers.links.values()
    assert link.given[-1] == 39
    assert len(link.given) >= 5, "versions pass the server by while it waits"


def test_a_server_that_freezes_while_it_reads_a_copy_keeps_no_version_from_the_others(monkeypatch):
    with Servers(monkeypatch, [Mode.ALONE] * 2, True) as servers:
        (stuck, other), (link, _) = servers.fleet.servers, servers.links.values()
        servers.publish(1)
        servers.wait_for(1, stuck, other)
        link.thawed.clear()
        servers.publish(2)
        servers.wait_for(2, other)
        for version in (3, 4):
            servers.publish(version)
            servers.wait_for(version, other)
        assert not stuck.in_traffic and "kept the other servers waiting" in stuck.reason
        link.thawed.set()
        servers.wait_for(4, stuck)
    assert link.given == [1, 4], "what it had of version 2 may be torn"


def test_a_server_that_falls_silent_before_it_is_stopped_gives_up_its_copy(monkeypatch):
    """Its answers may take minutes to end, so it is not late."""
    with Servers(monkeypatch, [Mode.ALONE] * 2, True) as servers:
        (stuck, other), (link, _) = servers.fleet.servers, servers.links.values()
        servers.publish(1)
        servers.wait_for(1, stuck, other)
        servers.board.pause = Pause(in_flight=False)

        def stop(version: int) -> None:
            while True:
                link.check()
                time.sleep(0.002)

        link.stop, stuck.control = stop, SimpleNamespace(is_healthy=lambda: False)
        servers.publish(2)
        servers.wait_for(2, other)
        servers.publish(3)
        time.sleep(3 * LATE_S)
        assert other.version == 2 and stuck.in_traffic
        servers.fleet.fall_silent(stuck, "no reply")
        servers.wait_for(3, other)


def test_a_publish_that_waits_goes_on_without_a_server_that_freezes_while_it_reads_a_copy(monkeypatch):
    with Servers(monkeypatch, [Mode.ALONE] * 2, True) as servers:
        (stuck, other), (link, _) = servers.fleet.servers, servers.links.values()
        link.thawed.clear()
        servers.leader.waited_for = 1
        servers.publish(1)
        until(lambda: servers.leader.settled(1))
        assert other.serves(1) and not stuck.in_traffic


def test_a_server_that_freezes_in_a_push_of_its_own_keeps_no_version_from_one_that_comes_back(monkeypatch):
    monkeypatch.setattr(worker_module, "HEALTH_S", 0.05)
    with Servers(monkeypatch, [Mode.COMMON, Mode.LOST], False) as servers:
        (stuck, back), (link, _) = servers.fleet.servers, servers.links.values()
        servers.board.push_s = 0.01  # of one before
        link.thawed.clear()
        servers.publish(1)
        servers.wait_for(1, back)
        assert not stuck.in_traffic and "kept the other servers waiting" in stuck.reason
        link.thawed.set()
        servers.wait_for(1, stuck)


def test_a_server_that_drains_for_long_alone_in_traffic_keeps_no_version_from_one_that_comes_back(monkeypatch):
    monkeypatch.setattr(worker_module, "HEALTH_S", 0.05)
    with Servers(monkeypatch, [Mode.COMMON, Mode.LOST], False, AGREE_S) as servers:
        (busy, back), link = servers.fleet.servers, servers.links["http://server0"]
        servers.board.pause = Pause(in_flight=False)
        servers.board.sent, servers.board.push_s = 0, 0.01  # of one before
        draining, drained = threading.Event(), threading.Event()

        def stop(version: int) -> None:
            draining.set()
            while not drained.is_set():
                link.check()
                time.sleep(0.002)

        link.stop = stop
        servers.fleet.admit(busy, 0)
        servers.publish(1)
        until(draining.is_set)
        servers.wait_for(1, back)
        servers.publish(2)
        assert busy.in_traffic and not link.given, "it still answers"
        drained.set()
        servers.wait_for(2, busy, back)
        assert link.given == [2], "the newest wins"


def reads_slowly(link: Link, first_s: float = 6 * LATE_S) -> list[int]:
    """A server that works, and takes six times as long as it may, or `first_s` for the first version. Those that it
    began with."""
    begun: list[int] = []

    def update(feed: SimpleNamespace, buckets: list, num_buffers: int) -> dict[str, float]:
        begun.append(feed.version)
        deadline = time.monotonic() + (first_s if len(begun) == 1 else 6 * LATE_S)
        while time.monotonic() < deadline:
            link.check()
            time.sleep(0.002)
        return {"total": 6 * LATE_S}

    link.update = update
    return begun


def test_a_slow_server_gets_a_whole_version_in_the_end(monkeypatch):
    with Servers(monkeypatch, [Mode.ALONE] * 2, True) as servers:
        slow, link = servers.fleet.servers[0], servers.links["http://server0"]
        begun = reads_slowly(link, first_s=10.0)
        deadline = time.monotonic() + 10
        while slow.version < 0:
            assert time.monotonic() < deadline
            servers.publish(servers.snapshots.newest + 1)
            time.sleep(LATE_S / 2)
        assert len(begun) > 1, "others wait for it"


def test_a_server_that_comes_back_after_a_publish_that_waited_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(worker_module, "_BACKOFF_S", 0.01)
    with Servers(monkeypatch, [Mode.ALONE] * 2, True) as servers:
        slow, other = servers.fleet.servers
        servers.leader.waited_for = 1
        servers.publish(1)
        servers.wait_for(1, slow, other)
        begun = reads_slowly(link := servers.links[slow.url])
        servers.fleet.distrust(slow, "its answers are not the policy's")
        until(lambda: link.connected)
        servers.wait_for(1, slow)
        assert begun == [1]


def give_up(servers: Servers) -> None:
    """As the leader does with late readers."""
    with servers.board.lock:
        for reader in list(servers.copy.readers):
            reader.drop("it is late")


def test_a_server_whose_files_were_removed_since_it_was_late_is_not_lost(monkeypatch):
    """`[rollout] min_servers` would end the run."""
    with Servers(monkeypatch, [Mode.ALONE], True) as servers:
        (server,), (link,) = servers.fleet.servers, servers.links.values()
        update = link.update

        def fail(*_: object) -> None:
            link.update = update
            give_up(servers)
            raise WeightSyncError(link, "apply", 1, 0, "HTTP 400: no such file")

        link.update = fail
        servers.publish(1)
        servers.wait_for(1, server)
        assert server.losses == 0


def test_a_server_that_fails_as_it_is_late_is_not_kept_from_pushes(monkeypatch):
    monkeypatch.setattr(worker_module, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(worker_module, "HEALTH_S", 0.05)
    with Servers(monkeypatch, [Mode.ALONE, Mode.COMMON], False) as servers:
        (server, _), (link, _), (worker, _) = servers.fleet.servers, servers.links.values(), servers.workers
        update = link.update

        def fail(*_: object) -> None:
            link.update, link.close = update, close
            raise WeightSyncError(link, "apply", 1, 0, "HTTP 500")

        def close() -> None:  # the leader may look meanwhile
            link.close = lambda: None
            give_up(servers)
            servers.board.workers = [worker]  # nobody is left in common

        link.update = fail
        servers.publish(1)
        servers.wait_for(1, server)
        servers.board.workers = servers.workers


def test_a_push_may_take_as_long_as_the_last_one_whoever_has_waited_for_its_end(monkeypatch):
    board = Servers(monkeypatch, [Mode.COMMON, Mode.ALONE], False).board
    board.copy_wanted, board._waited_since, board.push_s = True, time.monotonic() - 100, 10.0
    dropped: list[str] = []
    push = Push(1, 1, 1, ["slow"], 0.01, lambda url, why: dropped.append(url), None, board.copy_is_late)
    thread = threading.Timer(0.1, push.ended, ("slow", {}))
    thread.start()
    push.offer(None, None)
    push.complete([], {})
    thread.join()
    assert not dropped
    assert board.copy_is_late(time.monotonic() - 11)
    nobody = SyncReport(1, 0, 1, {"total": 0.01}, {}, missed=1, waited=False)
    board.push_settled(nobody)
    assert board.push_s == 10.0, "a push that lost all its servers says nothing of a push's time"
    board.push_s = 0.0
    assert not board.copy_is_late(0.0), "the first push may take any time"


def test_no_push_begins_when_the_workers_have_been_told_to_end():
    """They would never leave it, and the leader would wait for them."""
    fleet = Fleet(["http://server"], lambda url: Server(url, SimpleNamespace()))
    board = Board(fleet, [], 1, WeightSync(), Pause(True, True, 10.0), {}, None, copies_only=False)
    board.close()
    with pytest.raises(Closing):
        board.begin_push(lambda servers, on_drop: pytest.fail("a push began"))


def test_a_look_for_late_readers_takes_linear_time():
    """The main thread's publish waits for the board's lock."""
    asked: list[VersionCopy] = []
    copy = VersionCopy()
    copy.readers = [SimpleNamespace(began=time.monotonic(), too_late=0)] * 64
    board = Board(Fleet([], None), [], 1, WeightSync(), Pause(), {}, copy, copies_only=True)
    board.workers = [SimpleNamespace(is_idle=asked.append) for _ in range(64)]
    board.drop_late_readers()
    assert len(asked) == 64
