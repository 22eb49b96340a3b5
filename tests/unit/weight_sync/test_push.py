"""The common push with threads as workers: what each server gets, which are dropped and when, and how it ends."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from torchtitan.grpo.weight_sync.copies import MemoryCopy
from torchtitan.grpo.weight_sync.push import Dropped, Push

BYTES = 64
EXPECTED = [1, 7, 3, BYTES, 99]


def nothing() -> None:
    pass


def content(version: int, index: int) -> torch.Tensor:
    """The bytes of a bucket."""
    return torch.full((BYTES,), (17 * version + index) % 251, dtype=torch.uint8)


@dataclass
class Worker:
    """Takes part in a push as a server's link does: posts buckets, `in_flight` of them at once, and reads each when it
    has been on the wire for `delay_s(index)`. Ends before bucket `leaves_at`."""

    name: str
    delay_s: Callable[[int], float] = lambda index: 0.0
    in_flight: int = 2
    leaves_at: int | None = None
    got: list[torch.Tensor] = field(default_factory=list)
    expected: list[int] | None = None
    outcome: str = ""
    timeout_s: float = 5.0

    def run(self, push: Push, buckets: int) -> None:
        seat = push.seat(self.name, self.timeout_s, nothing)
        posted: deque[tuple[int, torch.Tensor]] = deque()

        def land() -> None:
            index, wire = posted.popleft()
            time.sleep(self.delay_s(index))
            self.got.append(wire.clone())

        try:
            for index in range(buckets):
                if index == self.leaves_at:
                    self.outcome = "left"
                    push.ended(self.name, None)
                    return
                posted.append((index, seat.bucket(index)[0]))
                while len(posted) > self.in_flight - 1:
                    land()
                seat.release(index + 1 - len(posted))
            while posted:
                land()
            seat.release(buckets)
            self.expected = seat.expected()
        except (Dropped, TimeoutError) as why:
            self.outcome = f"dropped: {why}"
            push.ended(self.name, None)
            return
        self.outcome = "finished"
        push.ended(self.name, {"total": 1.0})


@dataclass
class Lead:
    """Fills wire buffers in halves, with a pause in between, so that a buffer filled too early is noticed."""

    push: Push
    wires: list[torch.Tensor]
    pack_s: Callable[[], float] = lambda: 0.0

    def run(self, buckets: int) -> None:
        for index in range(buckets):
            self.push.wait_for_buffer(index)
            wire, full = self.wires[index % len(self.wires)], content(self.push.version, index)
            wire[: BYTES // 2] = full[: BYTES // 2]
            time.sleep(self.pack_s())
            wire[BYTES // 2 :] = full[BYTES // 2 :]
            self.push.offer(wire, None)
        self.push.complete(EXPECTED, {"gather": 0.5})


@dataclass
class Outcome:
    push: Push
    dropped: dict[str, str]
    settled: int
    lead_s: float


def run_push(
    workers: list[Worker], buckets: int, num_buffers: int, straggler_s: float, pack_s=lambda: 0.0, version: int = 7
) -> Outcome:
    """Returns when every worker has ended."""
    dropped: dict[str, str] = {}
    names = [worker.name for worker in workers]
    push = Push(version, buckets, num_buffers, names, straggler_s, dropped.__setitem__)
    wires = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(num_buffers)]
    threads = [threading.Thread(target=worker.run, args=(push, buckets), daemon=True) for worker in workers]
    settled = []
    for thread in threads:
        thread.start()
    started = time.monotonic()
    Lead(push, wires, pack_s).run(buckets)
    lead_s = time.monotonic() - started
    push.on_settled(lambda: settled.append(set(push.servers)))
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for worker in workers:
        push.ended(worker.name, None)  # late words change nothing
    assert settled in ([set(push.servers)], [])
    return Outcome(push, dropped, len(settled), lead_s)


def assert_whole(worker: Worker, buckets: int, version: int = 7) -> None:
    assert worker.outcome == "finished"
    assert worker.expected == EXPECTED
    assert len(worker.got) == buckets
    for index, got in enumerate(worker.got):
        assert torch.equal(got, content(version, index)), f"{worker.name}: bucket {index} is not that of version 7"


def push_of(seed: int) -> tuple[list[Worker], set[str], int, Outcome]:
    """Any number of servers, buckets and buffers, at any pace. Some leave, some stall for longer than allowed.

    Returns:
        The servers, which of them stalled, the buckets, and what became of it.
    """
    rng = random.Random(seed)
    buckets, num_buffers = rng.randint(1, 14), rng.randint(1, 5)
    workers, stalled = [], set()
    for number in range(rng.randint(1, 6)):
        name, slowest_s = f"server{number}", rng.choice([0, 0.001, 0.006])
        fate, at = rng.choice(["well"] * 4 + ["leaves", "stalls"]), rng.randrange(buckets)
        if fate == "stalls":
            stalled.add(name)

        private = random.Random(rng.random())

        def delay_s(index, slowest_s=slowest_s, fate=fate, at=at, private=private) -> float:
            return 1.0 if fate == "stalls" and index == at else slowest_s * private.random()

        leaves_at = at if fate == "leaves" else None
        workers.append(Worker(name, delay_s, rng.randint(1, num_buffers), leaves_at))
    return workers, stalled, buckets, run_push(workers, buckets, num_buffers, 0.4, lambda: rng.choice([0, 0.002]))


@pytest.mark.parametrize("seed", range(25))
def test_a_server_that_finishes_has_every_bucket_unchanged(seed):
    for _ in range(4):  # on a busy machine a server that is well may stand still for 0.4 s, and is dropped
        workers, stalled, buckets, outcome = push_of(seed)
        if outcome.dropped.keys() <= stalled:
            break
    assert outcome.settled == 1
    assert outcome.dropped.keys() <= stalled
    for worker in workers:
        if worker.leaves_at is not None:
            assert worker.outcome == "left"
        elif worker.name in outcome.dropped:
            assert worker.outcome == f"dropped: {outcome.dropped[worker.name]}"
        else:
            assert_whole(worker, buckets)
    assert outcome.push.servers.keys() == {worker.name for worker in workers if worker.outcome == "finished"}
    assert outcome.push.seconds == {"gather": 0.5}


def test_a_straggler_is_dropped_by_name_and_the_other_server_continues():
    quick = Worker("quick")
    slow = Worker("slow", lambda index: 1.0 if index == 3 else 0.0)
    outcome = run_push([quick, slow], buckets=8, num_buffers=2, straggler_s=0.25)
    assert_whole(quick, 8)
    why = "kept the other servers waiting for over 0.25 s with bucket 4 of 8 of version 7"
    assert outcome.dropped == {"slow": why}
    assert slow.outcome == f"dropped: {why}"
    assert 0.25 <= outcome.lead_s < 1.0, "after straggler_s, and not when it would have come"


def test_the_last_buckets_and_the_only_bucket_can_be_late_too():
    for buckets, num_buffers in ((8, 2), (1, 4)):
        quick = Worker("quick")
        slow = Worker("slow", lambda index, last=buckets - 1: 1.0 if index == last else 0.0)
        outcome = run_push([quick, slow], buckets, num_buffers, straggler_s=0.2)
        assert_whole(quick, buckets)
        assert outcome.dropped.keys() == {"slow"}
        assert outcome.lead_s < 1.0


def test_no_server_is_dropped_while_all_are_equally_late():
    workers = [Worker(f"server{n}", lambda index: 0.5 if index == 2 else 0.0) for n in range(3)]
    outcome = run_push(workers, buckets=5, num_buffers=2, straggler_s=0.2)
    assert outcome.dropped == {}
    for worker in workers:
        assert_whole(worker, 5)


def test_no_server_is_dropped_because_the_leader_is_slow():
    workers = [Worker("one", in_flight=1), Worker("two", lambda index: 0.001, in_flight=1)]
    outcome = run_push(workers, buckets=3, num_buffers=1, straggler_s=0.3, pack_s=lambda: 0.6)
    assert outcome.dropped == {}


def test_a_server_may_be_late_for_longer_than_the_trainer_may_pack():
    """Neither the late one nor the one that waits for it fails."""
    quick, slow = Worker("quick", timeout_s=0.1), Worker("slow", lambda index: 0.6 if index == 1 else 0.0)
    outcome = run_push([quick, slow], buckets=4, num_buffers=2, straggler_s=5.0)
    assert outcome.dropped == {}
    for worker in (quick, slow):
        assert_whole(worker, 4)


def test_a_single_server_is_never_dropped():
    alone = Worker("alone", lambda index: 0.4)
    outcome = run_push([alone], buckets=3, num_buffers=2, straggler_s=0.1)
    assert outcome.dropped == {}
    assert_whole(alone, 3)


def test_the_wait_starts_again_when_the_ready_server_has_left():
    push = Push(7, 4, 1, ["ready", "late", "later"], 2.0, lambda server, why: dropped.append(server))
    dropped: list[str] = []
    push.offer(content(7, 0), None)
    push.seat("ready", 5, nothing).release(1)
    waiting = threading.Thread(target=push.wait_for_buffer, args=(1,), daemon=True)
    waiting.start()
    time.sleep(1.2)
    push.ended("ready", None)
    time.sleep(1.2)
    push.seat("late", 5, nothing).release(1)  # 2.4 s after "ready" was, but "later" has kept nobody waiting yet
    time.sleep(0.3)
    assert dropped == []
    push.seat("later", 5, nothing).release(1)
    waiting.join(5)
    assert not waiting.is_alive()
    assert dropped == []


def test_two_late_servers_are_dropped_together():
    quick, *slow = [Worker("quick"), *(Worker(f"slow{n}", lambda index: 0.8) for n in range(2))]
    outcome = run_push([quick, *slow], buckets=4, num_buffers=2, straggler_s=0.2)
    assert outcome.dropped.keys() == {"slow0", "slow1"}
    assert outcome.lead_s < 0.8
    assert_whole(quick, 4)


def test_no_participants():
    settled = []
    push = Push(7, 3, 2, [], 0.1, lambda server, why: None)
    Lead(push, [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]).run(3)
    push.on_settled(lambda: settled.append(push.servers))
    assert settled == [{}]


@pytest.mark.parametrize(("buckets", "num_buffers"), [(1, 1), (1, 3), (3, 3), (2, 5), (6, 1)])
def test_few_buckets_and_few_buffers(buckets, num_buffers):
    workers = [Worker(f"server{n}", lambda index: 0.002, in_flight=num_buffers) for n in range(2)]
    outcome = run_push(workers, buckets, num_buffers, straggler_s=1.0)
    assert outcome.dropped == {}
    for worker in workers:
        assert_whole(worker, buckets)


def test_a_buffer_is_not_filled_before_all_have_let_go():
    push = Push(7, 3, 2, ["one", "two"], 10.0, lambda server, why: None)
    push.wait_for_buffer(0)
    push.wait_for_buffer(1)
    free = threading.Event()
    threading.Thread(target=lambda: (push.wait_for_buffer(2), free.set()), daemon=True).start()
    push.seat("one", 5, nothing).release(1)
    assert not free.wait(0.15)
    push.seat("two", 5, nothing).release(1)
    assert free.wait(5)


def test_a_failed_push_wakes_everyone():
    push = Push(7, 3, 2, ["bucket", "checksums", "posting"], 10.0, lambda server, why: None)
    for index in range(3):
        if index < 2:
            push.offer(content(7, index), None)
    outcomes: dict[str, str] = {}

    def expect_dropped(name: str, wait: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                wait()
                outcomes[name] = "went on"
            except Dropped as why:
                outcomes[name] = str(why)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    posting = push.seat("posting", 30, nothing)
    threads = [
        expect_dropped("bucket", lambda: push.seat("bucket", 30, nothing).bucket(2)),
        expect_dropped("checksums", lambda: push.seat("checksums", 30, nothing).expected()),
    ]
    time.sleep(0.1)
    started = time.monotonic()
    push.fail()
    threads.append(expect_dropped("posting", lambda: posting.release(1)))
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - started < 5, "they may wait for 30 s"
    assert outcomes == dict.fromkeys(["bucket", "checksums", "posting"], "the push of version 7 failed")
    for wait in (lambda: posting.bucket(0), posting.raise_if_dropped):
        with pytest.raises(Dropped):
            wait()


def test_a_timeout_names_the_missing_bucket_and_closing_ends_the_wait():
    push = Push(7, 3, 2, ["one"], 0.1, lambda server, why: None)
    with pytest.raises(TimeoutError, match="bucket 2 of version 7"):
        push.offer(content(7, 0), None)
        push.seat("one", 0.1, nothing).bucket(1)
    with pytest.raises(TimeoutError, match="the checksums of version 7"):
        push.seat("one", 0.1, nothing).expected()

    def closing() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push.seat("one", 5, closing).bucket(1)


def test_a_push_settles_once_on_the_last_thread():
    for last in ("worker", "lead"):
        push, settled = Push(7, 1, 1, ["one", "two"], 10.0, lambda server, why: None), []
        push.ended("two", None)
        if last == "worker":
            push.on_settled(lambda settled=settled: settled.append(1))
            assert settled == []
        push.ended("one", {"total": 2.0})
        if last == "lead":
            push.on_settled(lambda settled=settled: settled.append(1))
        push.ended("one", None)
        assert settled == [1]
        assert push.servers == {"one": {"total": 2.0}}


def test_a_host_copy_feeds_what_was_stored():
    copy = MemoryCopy([BYTES, 2 * BYTES], pinned=False)
    wire = torch.empty(2 * BYTES, dtype=torch.uint8)
    for version in (3, 4):
        copy.begin()
        assert copy.version == -1
        for index, size in enumerate([BYTES, 2 * BYTES]):
            wire[:size] = 10 * version + index
            copy.store(index, wire[:size])
        copy.complete(version, [1, version])
        wire.zero_()
        feed = copy.feed()
        assert (feed.version, feed.expected()) == (version, [1, version])
        for index, size in enumerate([BYTES, 2 * BYTES]):
            assert feed.bucket(index)[0].tolist() == [10 * version + index] * size
            feed.release(index + 1)


class Standstill:
    """A push whose servers finish their answers first. It begins, with version 9, when `lead` has ended."""

    def __init__(self, names: list[str], straggler_s: float, drain_s: float):
        self.dropped: dict[str, str] = {}
        self.push = Push(7, 4, 2, names, straggler_s, self.dropped.__setitem__, drain_s)
        self.began_s: float | None = None
        self._started = time.monotonic()
        self.lead = threading.Thread(target=self._lead, daemon=True)
        self.lead.start()

    def _lead(self) -> None:
        self.push.wait_until_still(nothing)
        self.push.begin(9)
        self.began_s = time.monotonic() - self._started

    def server(self, name: str, comes_s: float, drains_s: float) -> threading.Thread:
        def run() -> None:
            seat = self.push.seat(name, 5.0, nothing)
            time.sleep(comes_s)
            try:
                seat.stopping()
                time.sleep(drains_s)
                seat.stopped()
            except Dropped:
                return
            assert seat.version == 9, "the newest version once all are paused is sent"
            self.push.ended(name, {"total": 1.0})

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def test_draining_does_not_count_as_straggling():
    still = Standstill(["quick", "long"], straggler_s=0.5, drain_s=5.0)
    threads = [still.server("quick", 0.0, 0.0), still.server("long", 0.0, 1.2)]
    for thread in [*threads, still.lead]:
        thread.join(5)
        assert not thread.is_alive()
    assert still.dropped == {}
    assert 1.2 <= still.began_s < 4
    assert still.push.servers.keys() == {"quick", "long"}


def test_a_server_that_is_not_told_to_pause_is_dropped_while_another_drains():
    still = Standstill(["quick", "long", "absent"], straggler_s=0.5, drain_s=5.0)
    threads = [still.server("quick", 0.0, 0.0), still.server("long", 0.0, 1.6), still.server("absent", 3.0, 0.0)]
    deadline = time.monotonic() + 2.8
    while not still.dropped and time.monotonic() < deadline:
        time.sleep(0.01)
    why = "kept the other servers waiting for over 0.5 s with the pause of version 7"
    assert still.dropped == {"absent": why}
    for thread in [*threads, still.lead]:
        thread.join(5)
        assert not thread.is_alive()
    assert 1.6 <= still.began_s < 3.0
    assert still.push.servers.keys() == {"quick", "long"}


def test_a_server_that_fails_while_draining_is_not_waited_for():
    still = Standstill(["quick", "long"], straggler_s=0.2, drain_s=5.0)
    still.push.seat("long", 5.0, nothing).stopping()
    quick = still.server("quick", 0.0, 0.0)
    time.sleep(0.4)
    assert still.began_s is None
    still.push.ended("long", None)
    for thread in (quick, still.lead):
        thread.join(5)
        assert not thread.is_alive()
    assert still.push.servers.keys() == {"quick"}
