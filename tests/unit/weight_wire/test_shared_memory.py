"""Transport "ipc" between two real processes, on the CPU. tests/gpu has CUDA's side."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.ranks import Ranks
from torchtitan.grpo.weight_wire.rendezvous import Rendezvous
from torchtitan.grpo.weight_wire.shared_buffers import allocate
from torchtitan.grpo.weight_wire.transport import Group, in_thread, wait

CPU = torch.device("cpu")
LOCALHOST = "127.0.0.1"
BYTES = 1 << 16

# For each bucket it prints its size, the sum of its bytes, and how many of the trainer's files are mapped.
READER = """
import sys, time, torch
from torchtitan.grpo.weight_wire import shared_memory
from torchtitan.grpo.weight_wire.rendezvous import join_store
from torchtitan.grpo.weight_wire.transport import Group, wait

port, buckets, act = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if act == "elsewhere":
    shared_memory.location = lambda device: {"host": "there", "boot": "another", "device": "cpu"}
store = join_store("127.0.0.1", port, 20.0)
group = Group("ipc", store, 1, 2, torch.device("cpu"), 20.0, "127.0.0.1")
for _ in range(buckets):
    work = group.borrow()
    wait(work, time.monotonic() + 20, "a bucket", group.raise_if_abandoned, group.rest)
    files = sum("memfd:torchtitan-grpo" in line for line in open("/proc/self/maps"))
    print(work.wire.numel(), int(work.wire.long().sum()), files, flush=True)
    if act == "hold":
        time.sleep(60)
    group.give_back(work)
if act == "idle":
    del work
    deadline = time.monotonic() + 20
    while "memfd:torchtitan-grpo" in open("/proc/self/maps").read() and time.monotonic() < deadline:
        time.sleep(0.02)
    print("still mapped" if time.monotonic() > deadline else "nothing is mapped", flush=True)
    sys.exit()
table = torch.tensor([[0, 0], [1, -(1 << 63)]])
wait(group.all_reduce(table), time.monotonic() + 20, "the sum", group.raise_if_abandoned, group.rest)
print(table.tolist(), flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's. The process that readers are forked from has imported everything, which no rendezvous waits for."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "nothing.py").touch()
    Ranks(1, folder / "nothing.py", log=folder / "log", found=False).check()
    (folder / "reader.py").write_text(READER)
    return folder / "reader.py"


@pytest.fixture
def meet(script: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Rendezvous, Ranks]]]:
    """A rendezvous with a reader in a process of its own."""
    readers = []

    def meet(buckets: int, act: str = "") -> tuple[Rendezvous, Ranks]:
        rendezvous = Rendezvous("ipc", 2, CPU, 20.0, LOCALHOST)
        readers.append(Ranks(1, script, rendezvous.port, buckets, act, log=tmp_path / "said", found=False))
        return rendezvous, readers[-1]

    yield meet
    for reader in readers:
        reader.kill()


def finish(group: Group, work) -> None:
    wait(work, time.monotonic() + 20, "the reader", None, group.rest)


def test_buckets_are_read_where_they_are(meet):
    """Buffers are mapped once. A bucket from elsewhere is put into a buffer first."""
    rendezvous, reader = meet(5)
    group = rendezvous.group()
    buffers = [allocate(BYTES, CPU), allocate(BYTES, CPU)]
    for index in range(4):
        wire = buffers[index % 2][: BYTES - index]
        wire.fill_(index)
        finish(group, group.broadcast(wire))
    assert rest_s(group) < 0.9e-3, "a bucket that is filled soon is seen sooner than a poll can end"
    finish(group, group.broadcast(torch.full((100,), 9, dtype=torch.uint8)))
    table = torch.zeros(2, 2, dtype=torch.int64)
    finish(group, group.all_reduce(table))
    reader.check(20)
    said = reader.log.splitlines()
    sizes = [(BYTES - index, index * (BYTES - index)) for index in range(4)] + [(100, 900)]
    assert said == [f"{size} {total} {files}" for (size, total), files in zip(sizes, [1, 2, 2, 2, 3], strict=True)] + [
        "[[0, 0], [1, -9223372036854775808]]"
    ]
    assert table.tolist() == [[0, 0], [1, -(1 << 63)]]
    group.abort()


def rest_s(group: Group) -> float:
    """The shortest of some rests while the device fills a bucket."""
    group._pg._sent.append(SimpleNamespace(told=False))
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        group.rest(0.0002)
        seconds.append(time.perf_counter() - started)
    group._pg._sent.clear()
    return min(seconds)


def test_a_reader_that_is_killed_is_noticed_at_once_and_keeps_nothing(meet):
    rendezvous, reader = meet(1, "hold")
    group = rendezvous.group()
    work = group.broadcast(allocate(BYTES, CPU))
    reader.wait_until("the bucket is held", lambda: reader.log.endswith("\n"), 20)
    reader.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the other end has closed the connection"):
        finish(group, work)
    assert time.monotonic() - started < 10, "`finish` waits for 20 s"
    group.abort()
    del group, work, rendezvous
    deadline = time.monotonic() + 5
    while "memfd:torchtitan-grpo" in Path("/proc/self/maps").read_text():
        assert time.monotonic() < deadline, "the buffer is still there"
        time.sleep(0.05)


def test_a_reader_forgets_a_trainer_that_is_gone(meet):
    rendezvous, reader = meet(1, "idle")
    group = rendezvous.group()
    finish(group, group.broadcast(allocate(BYTES, CPU)))
    group.abort()
    reader.check(30)
    assert reader.log.splitlines()[1:] == ["nothing is mapped"]


def test_a_reader_on_another_machine_is_refused_with_both_named(meet):
    rendezvous, reader = meet(1, "elsewhere")
    assert reader.wait(20) == 1
    errors = reader.log
    rendezvous.give_up(in_thread(lambda: None, "served"))
    assert 'ValueError: transport "ipc" cannot reach this server: it is on host there, device cpu, and the' in errors
    assert f"trainer on host {os.uname().nodename}, device cpu" in errors
    with pytest.raises(RuntimeError, match="given up"):
        rendezvous.joined.result(5)
