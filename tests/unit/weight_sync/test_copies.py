"""Versions through copies only (`transport = "disk"`): a real sync thread and worker, with a slow link."""

import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from torchtitan.grpo.config.job_config import WeightSync
from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.weight_sync.board import Board, Closing, Mode
from torchtitan.grpo.weight_sync.link import Pause
from torchtitan.grpo.weight_sync.push import VersionCopy
from torchtitan.grpo.weight_sync.sync_thread import Leader
from torchtitan.grpo.weight_sync.worker import ServerWorker

COPY_S, UPDATE_S, AGREE_S = 0.02, 0.02, 0.01


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
    """A server that reads a version for `UPDATE_S`."""

    def __init__(self, copy: Folder) -> None:
        self.check = lambda: None
        self.copy = copy
        self.given: list[int] = []

    def stop(self, version: int) -> None:
        time.sleep(UPDATE_S / 2)
        if self.copy.version != version:
            self.copy.faults.append(f"version {version} became {self.copy.version} in its reader's hands")

    def update(self, feed: SimpleNamespace, buckets: list, num_buffers: int) -> dict[str, float]:
        time.sleep(UPDATE_S / 2)
        self.given.append(feed.version)
        return {"total": UPDATE_S}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("agree_s", [0.0, AGREE_S], ids=["one-rank", "ranks-that-agree"])
def test_a_server_gets_every_version_that_it_has_time_for(agree_s, monkeypatch):
    copy = Folder()
    link = Link(copy)
    monkeypatch.setattr(ServerWorker, "_make_link", staticmethod(lambda *_: link))
    fleet = Fleet(["http://server"], lambda url: Server(url, SimpleNamespace(is_healthy=lambda: True)))
    buckets = [SimpleNamespace(index=0, payload_bytes=1)]
    board = Board(fleet, buckets, 1, 10.0, 1.0, Pause(True, True, 10.0), {}, copy, copies_only=True)
    worker = ServerWorker(fleet.servers[0], board, "disk", None)
    worker.mode, board.workers = Mode.ALONE, [worker]

    snapshots = SimpleNamespace(newest=-1)

    @contextmanager
    def hold(*_):
        time.sleep(agree_s)
        yield SimpleNamespace(version=snapshots.newest, seconds=lambda: 0.0)

    snapshots.hold = hold
    packer = SimpleNamespace(
        snapshots=snapshots,
        buckets=board.buckets,
        bytes=1,
        device=SimpleNamespace(type="cpu"),
        stopwatch=SimpleNamespace(take=dict),
        on_stream=nullcontext,
        gather=lambda *_: None,
        pack=lambda *_: None,
        expected_acknowledgement=lambda version: [],
    )
    ranks = SimpleNamespace(command=lambda *_: time.sleep(agree_s))
    leader = Leader(ranks, packer, WeightSync(async_weight_update=True), board, lambda server: worker)
    leader.start()
    worker.start()
    try:
        for version in range(40):  # a new one comes before the copy of the one before is whole
            snapshots.newest = version
            board.notify()
            time.sleep(0.8 * COPY_S)
        deadline = time.monotonic() + 10
        while fleet.servers[0].version < 39 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        leader.closing = True
        board.close()
        for thread in (leader, worker):
            thread.join(10)
    assert not any(isinstance(thread, Leader | ServerWorker) for thread in threading.enumerate())
    assert leader.error is None and copy.faults == []
    assert link.given == sorted(link.given) and link.given[-1] == 39
    assert len(link.given) >= 5, "versions pass the server by while it waits"


def test_no_push_begins_when_the_workers_have_been_told_to_end():
    """They would never leave it, and the leader would wait for them."""
    fleet = Fleet(["http://server"], lambda url: Server(url, SimpleNamespace()))
    board = Board(fleet, [], 1, 10.0, 1.0, Pause(True, True, 10.0), {}, None, copies_only=False)
    board.close()
    with pytest.raises(Closing):
        board.begin_push(lambda servers, on_drop: pytest.fail("a push began"))
