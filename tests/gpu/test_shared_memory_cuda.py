"""Transport "ipc" on CUDA: two processes on one GPU, and embedded servers that read the trainer's memory."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.servers import supervised
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.weight_sync.link import GroupLink, Pause
from torchtitan.grpo.weight_wire.buckets import (
    Bucket,
    Checksum,
    TensorSpec,
    combine_checksums,
    plan_buckets,
    plan_to_json,
)
from torchtitan.grpo.weight_wire.receiver import PROTOCOL
from torchtitan.grpo.weight_wire.rendezvous import Rendezvous
from torchtitan.grpo.weight_wire.shared_buffers import allocate
from torchtitan.grpo.weight_wire.transport import Group, wait
from torchtitan.grpo.weight_wire.version_names import own_run, version_name

CUDA = torch.device("cuda:0")
BYTES = 256 << 20

READER = """
import sys, time, torch
from torchtitan.grpo.weight_wire.buckets import Checksum
from torchtitan.grpo.weight_wire.rendezvous import join_store
from torchtitan.grpo.weight_wire.transport import Group, wait

port, buckets, act, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], torch.device("cuda:0")
torch.zeros(1, device=device)
group = Group("ipc", join_store("127.0.0.1", port, 60.0), 1, 2, device, 60.0, "127.0.0.1")
checksum = Checksum(device, 256 << 20)
for _ in range(buckets):
    work = group.borrow()
    wait(work, time.monotonic() + 60, "a bucket", group.raise_if_abandoned, group.rest)
    print(int(checksum(work.wire)), torch.cuda.memory_allocated() < (256 << 20), flush=True)
    if act == "hold":
        time.sleep(60)
    group.give_back(work)
group.abort()
time.sleep(0.5)
"""


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(CUDA)
    return total - free


@pytest.fixture
def reader() -> Iterator[Callable[..., tuple[Rendezvous, subprocess.Popen]]]:
    """Starts a reader; `reader(buckets, act)` returns the rendezvous and the process."""
    started = []

    def start(buckets: int, act: str = "") -> tuple[Rendezvous, subprocess.Popen]:
        rendezvous = Rendezvous("ipc", 2, CUDA, 60.0, "127.0.0.1")
        command = [sys.executable, "-c", READER, str(rendezvous.port), str(buckets), act]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return rendezvous, process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_memory_that_torch_holds_and_does_not_use_is_found():
    """The driver gives nothing while torch's allocator keeps all of it."""
    left, _ = torch.cuda.mem_get_info(CUDA)
    held = torch.empty(left - BYTES // 2, dtype=torch.uint8, device=CUDA)
    del held
    assert torch.cuda.mem_get_info(CUDA)[0] < BYTES
    assert allocate(BYTES, CUDA).numel() == BYTES


def finish(group: Group, work) -> None:
    wait(work, time.monotonic() + 60, "the reader", None, group.rest)


def joined(rendezvous: Rendezvous) -> Group:
    rendezvous.joined.result(60)
    return rendezvous.group()


def test_the_reader_sees_the_bytes_that_the_stream_has_written(reader):
    """A bucket is announced when the device has filled it, and its buffer is not written before it is released."""
    rendezvous, process = reader(6)
    group, checksum = joined(rendezvous), Checksum(CUDA, BYTES)
    buffers, expected, stream = [allocate(BYTES, CUDA) for _ in range(2)], [], torch.cuda.Stream(CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        works = []
        for index in range(6):
            if index >= 2:
                finish(group, works[index - 2])
            wire = buffers[index % 2]
            torch.cuda._sleep(20_000_000)  # the bytes come late
            wire.random_(0, 256)
            expected.append(checksum(wire))
            works.append(group.broadcast(wire))
        for work in works:
            finish(group, work)
    said = process.communicate(timeout=60)[0].split()
    assert said[::2] == [str(int(value)) for value in expected]
    assert set(said[1::2]) == {"True"}, "the reader allocates nothing for it"


def test_a_killed_reader_keeps_no_memory(reader):
    torch.cuda.empty_cache()
    before = used_bytes()
    rendezvous, process = reader(1, "hold")
    group = joined(rendezvous)
    wire = allocate(BYTES, CUDA)
    work = group.broadcast(wire)
    while not group._pg._sent[0].told:
        group._pg.advance()
    process.stdout.readline()
    process.kill()
    with pytest.raises(RuntimeError, match="the other end has closed the connection"):
        finish(group, work)
    group.abort()
    process.wait(30)
    del wire, work, group, rendezvous
    torch.cuda.empty_cache()
    deadline = time.monotonic() + 10
    while used_bytes() > before + (BYTES >> 1):
        assert time.monotonic() < deadline, "the memory is still taken"
        time.sleep(0.1)


def test_an_embedded_server_loads_from_the_trainers_memory(tmp_path):
    """Through the real link and routes: an acknowledged version, with checksums at both ends."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY_QWEN3), dtype=torch.bfloat16).to(CUDA)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    specs = [TensorSpec(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()]
    whole = Whole(plan_buckets(specs, 1 << 18), weights)
    plan = {"protocol": PROTOCOL, "run": own_run(), "num_buffers": 2, "timeout_seconds": 60.0}
    with supervised("embedded", tmp_path, TINY_QWEN3, gpus=(0,)) as running:
        control = VllmControl(running.urls[0], None, 60.0)
        link = GroupLink(control, "ipc", CUDA, 60.0, Pause(), lambda: None, lambda: None, lambda: 0)
        link.connect(plan | {"plan": plan_to_json(whole.buckets)})
        link.stop(7)
        link.update(whole, whole.buckets, 2)
        assert len(whole.buckets) > 2
        assert link.bytes_done == sum(bucket.payload_bytes for bucket in whole.buckets)
        assert control.weight_version() == version_name(7)
        link.close()


class Whole:
    """A version whose buckets are all there."""

    version = 7

    def __init__(self, buckets: list[Bucket], weights: dict[str, torch.Tensor]):
        self.buckets = buckets
        self.wires = [allocate(bucket.wire_bytes, CUDA) for bucket in buckets]
        checksum, self.sums = Checksum(CUDA, max(bucket.payload_bytes for bucket in buckets)), []
        for bucket, wire in zip(buckets, self.wires, strict=True):
            for name, view in bucket.views(wire):
                view.copy_(weights[name])
            self.sums.append(int(checksum(wire[: bucket.payload_bytes])))
            fields = [self.version, bucket.index, bucket.payload_bytes, self.sums[-1]]
            bucket.trailer(wire).copy_(torch.tensor(fields))

    def bucket(self, index: int) -> tuple[torch.Tensor, None]:
        return self.wires[index], None

    def release(self, count: int) -> None:
        pass

    def expected(self) -> list[int]:
        tensors = sum(len(bucket.tensors) for bucket in self.buckets)
        size = sum(bucket.payload_bytes for bucket in self.buckets)
        return [1, self.version, tensors, size, combine_checksums(self.sums)]
