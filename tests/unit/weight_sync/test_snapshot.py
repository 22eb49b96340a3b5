import random
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.qwen3 import Qwen3Adapter
from torchtitan.grpo.model.shards import canonical_name
from torchtitan.grpo.weight_sync import snapshot
from torchtitan.grpo.weight_sync.packer import Packer
from torchtitan.grpo.weight_sync.published import PublishedTensor, PublishedWeights, model_weights
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.snapshot import Holding, SnapshotBuffer, Snapshots, overlap, primary_holdings
from torchtitan.grpo.weight_wire.buckets import TensorSpec, plan_buckets
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

CPU = torch.device("cpu")


def tiny_qwen3(tied: bool) -> tuple[nn.Module, Qwen3Adapter]:
    args = Qwen3ModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, head_dim=16, hidden_dim=48, max_seq_len=16,
        enable_weight_tying=tied, attn_type="varlen", attn_mask_type="block_causal",
    )  # fmt: skip
    return Qwen3Model(args), Qwen3Adapter(args, None)


def tiny_llama3() -> tuple[nn.Module, Llama3StateDictAdapter]:
    args = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=16)
    return Transformer(args), Llama3StateDictAdapter(args, None)


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def received(packer: Packer, buffer: SnapshotBuffer) -> dict[str, torch.Tensor]:
    tensors = {}
    for bucket in packer.buckets:
        packer.gather(bucket, buffer)
        wire = packer.pack(bucket, buffer).clone()
        assert bucket.trailer(wire).tolist()[:3] == [buffer.version, bucket.index, bucket.payload_bytes]
        tensors.update(bucket.views(wire))
    return tensors


def same(newest: int) -> int:
    """How a single rank agrees."""
    return newest


def nothing() -> None:
    pass


@contextmanager
def running(call):
    """Run `call` in a thread, and raise its error here."""
    errors = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def small_snapshots(count: int, numel: int = 16) -> tuple[nn.Module, Snapshots]:
    """Snapshots of a model whose only parameter `fill` sets to the version."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(numel))
    snapshots = Snapshots({"weight": model.weight}, torch.float32, count)
    (owned,) = primary_holdings([snapshots.held], snapshots.shapes)
    snapshots.allocate(owned)
    return model, snapshots


def fill(model: nn.Module, version: int) -> None:
    with torch.no_grad():
        model.weight.fill_(version)


def slow_copies(snapshots: Snapshots, seconds) -> None:
    """Make each copy pause for `seconds()` in the middle, like a large one."""

    def copy(buffer) -> None:
        ((target,), (parameter,)) = snapshots._copies[buffer.index]
        half = target.numel() // 2
        target[:half].copy_(parameter.detach()[:half])
        time.sleep(seconds())
        target[half:].copy_(parameter.detach()[half:])

    snapshots._copy = copy


@pytest.mark.parametrize("large", [0, 10, 10**6], ids=["one-by-one", "both", "together"])
def test_a_snapshot_is_one_moment(large, monkeypatch):
    monkeypatch.setattr(snapshot, "_LARGE", large)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    snapshots = Snapshots({name: parameters[name] for name in names[::-1]}, torch.bfloat16)
    (owned,) = primary_holdings([snapshots.held], snapshots.shapes)
    snapshots.allocate(owned)
    assert snapshots.newest == -1
    addresses = set()
    for version in (1, 4, 5):
        randomise(model, version)
        expected = torch.cat([dict(model.named_parameters())[name].flatten() for name in names[::-1]]).bfloat16()
        snapshots.take(version)
        randomise(model, 99)
        assert snapshots.newest == version
        with snapshots.hold(same, 1, nothing) as buffer:
            assert buffer.version == version
            assert torch.equal(buffer.flat, expected)
            assert buffer.seconds() > 0
            addresses.add(buffer.flat.data_ptr())
    assert addresses == {buffer.flat.data_ptr() for buffer in snapshots.buffers}
    with pytest.raises(ValueError, match="version 5 of the weights after version 5"):
        snapshots.take(5)


def test_a_held_version_does_not_change_while_newer_ones_are_taken():
    model, snapshots = small_snapshots(2)
    fill(model, 1)
    snapshots.take(1)
    with snapshots.hold(same, 1, nothing) as buffer:
        for version in (2, 3, 4):
            fill(model, version)
            snapshots.take(version)
            assert (buffer.version, buffer.flat.unique().tolist()) == (1, [1.0])
    with snapshots.hold(same, 1, nothing) as buffer:
        assert (buffer.version, buffer.flat.unique().tolist()) == (4, [4.0])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_of_the_version_held_in_any_interleaving(seed, count):
    """The trainer takes snapshots at random moments. A sync thread holds them. Other ranks may be ahead."""
    rng = random.Random(100 * count + seed)
    model, snapshots = small_snapshots(count, 4096)
    slow_copies(snapshots, lambda: rng.choice([0, 0, 0.002]))
    versions, held = 150, []

    def train() -> None:
        for version in range(1, versions + 1):
            fill(model, version)
            snapshots.take(version, 5.0)
            fill(model, -1)  # the next step changes the weights
            time.sleep(rng.choice([0, 0, 0.0005, 0.003]))

    def agree(newest: int) -> int:
        time.sleep(rng.choice([0, 0.001, 0.004]))
        return min(newest + rng.choice([0, 0, 1, 2] if count == 2 else [0, 0, 1]), versions)

    with running(train):
        while not held or held[-1] < versions:
            with snapshots.hold(agree, 5.0, nothing) as buffer:
                version = buffer.version
                for pause_s in (0, rng.choice([0, 0.002, 0.006])):
                    time.sleep(pause_s)
                    assert buffer.version == version > 0
                    assert buffer.flat.unique().tolist() == [version]
                held.append(version)
    assert held == sorted(held)
    assert len(set(held)) > 10
    assert all(buffer.readers == 0 for buffer in snapshots.buffers)


def test_a_version_that_other_ranks_agreed_on_is_waited_for_and_not_skipped():
    model, snapshots = small_snapshots(2)
    for version in (1, 2):
        fill(model, version)
        snapshots.take(version)
    agreed = threading.Event()

    def agree(newest: int) -> int:
        assert newest == 2
        agreed.set()
        return 4

    def train() -> None:
        agreed.wait(5)
        for version in (3, 4, 5, 6, 7):  # at once: nothing waits for the thread that awaits version 4
            fill(model, version)
            snapshots.take(version, 5.0)

    with running(train), snapshots.hold(agree, 5.0, nothing) as buffer:
        assert (buffer.version, buffer.flat.unique().tolist()) == (4, [4.0])
        time.sleep(0.05)
        assert (buffer.version, buffer.flat.unique().tolist()) == (4, [4.0])
    assert snapshots.newest == 7


def test_versions_taken_while_the_ranks_agree_are_kept_until_they_have():
    model, snapshots = small_snapshots(2)
    fill(model, 1)
    snapshots.take(1)
    taken = []

    def train() -> None:
        for version in (2, 3, 4):
            fill(model, version)
            snapshots.take(version, 5.0)
            taken.append(version)

    def agree(newest: int) -> int:
        trainer.start()
        deadline = time.monotonic() + 5
        while not taken and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.1)
        assert taken == [2], "version 3 must overwrite neither 1 nor 2 while either may be what the others have"
        return 2

    trainer = threading.Thread(target=train, daemon=True)
    with snapshots.hold(agree, 5.0, nothing) as buffer:
        trainer.join(5)
        assert taken == [2, 3, 4]
        assert (buffer.version, buffer.flat.unique().tolist()) == (2, [2.0])


def test_a_timeout_names_the_missing_version():
    _, snapshots = small_snapshots(2)
    snapshots.take(1)
    late = pytest.raises(TimeoutError, match="snapshot of version 3; its newest is 1")
    with late, snapshots.hold(lambda newest: 3, 0.1, nothing):
        pass
    for version in (2, 3, 4, 5):
        snapshots.take(version)
    assert all(buffer.readers == 0 for buffer in snapshots.buffers)

    def closing() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), snapshots.hold(lambda newest: 9, 5.0, closing):
        pass
    for version in (8, 9, 10, 11):
        snapshots.take(version)
    assert all(buffer.readers == 0 for buffer in snapshots.buffers)


def test_a_failed_agreement_or_reader_leaves_nothing_held():
    _, snapshots = small_snapshots(1)
    snapshots.take(1)
    with pytest.raises(ConnectionError), snapshots.hold(lambda newest: fail(), 1, nothing):
        pass
    with pytest.raises(ConnectionError), snapshots.hold(same, 1, nothing):
        fail()
    snapshots.take(2)


def fail() -> int:
    raise ConnectionError("gloo: connection reset by peer")


def test_one_buffer_waits_for_its_reader_and_says_so():
    model, snapshots = small_snapshots(1)
    fill(model, 1)
    snapshots.take(1)
    with snapshots.hold(same, 1, nothing) as buffer:
        with pytest.raises(TimeoutError, match="buffer for version 2: all of 1 are being sent"):
            snapshots.take(2, 0.1)
        assert (buffer.version, buffer.flat.unique().tolist()) == (1, [1.0])
    fill(model, 2)
    release = threading.Event()

    def read() -> None:
        with snapshots.hold(same, 1, nothing):
            held.set()
            release.wait(5)

    held = threading.Event()
    with running(read):
        held.wait(5)
        started = time.monotonic()
        threading.Timer(0.2, release.set).start()
        snapshots.take(2, 5.0)
        assert time.monotonic() - started > 0.15
    assert snapshots.newest == 2


def test_one_buffer_that_is_being_written_is_waited_for():
    model, snapshots = small_snapshots(1)
    fill(model, 1)
    snapshots.take(1)
    begun = threading.Event()
    slow_copies(snapshots, lambda: begun.set() or 0.2)
    fill(model, 2)
    with running(lambda: snapshots.take(2)):
        assert begun.wait(5)
        with snapshots.hold(same, 5.0, nothing) as buffer:
            assert (buffer.version, buffer.flat.unique().tolist()) == (2, [2.0])


def test_names_are_free_of_wrappers():
    model = nn.Sequential()
    model.add_module("a", checkpoint_wrapper(torch.compile(nn.Linear(2, 2))))
    assert [canonical_name(name) for name, _ in model.named_parameters()] == ["a.weight", "a.bias"]


def test_replicas_are_sent_once_and_gaps_are_refused():
    top, bottom, whole = ((0, 3), (0, 4)), ((3, 2), (0, 4)), ((0, 7),)
    held = [{"w": top, "b": whole}, {"w": bottom, "b": whole}, {"w": top, "b": whole}, {"w": bottom}]
    owned = primary_holdings(held, {"w": (5, 4), "b": (7,)})
    assert [[(h.name, h.slices) for h in rank] for rank in owned] == [
        [("w", top), ("b", whole)],
        [("w", bottom)],
        [],
        [],
    ]
    with pytest.raises(RuntimeError, match="w: the trainer ranks hold 12 of 20"):
        primary_holdings(held[:1], {"w": (5, 4)})


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_overlaps_of_all_tensors_with_all_boxes(seed):
    """Stacked parameters, sent by rows, over ranks that split one or two dimensions evenly or hold replicas."""
    chance = random.Random(seed)
    parameters, tensors, ranks = {}, [], chance.randint(1, 9)
    owned: list[list[Holding]] = [[] for _ in range(ranks)]
    for number in range(6):
        shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3)))
        name = f"p{number}"
        parameters[name] = torch.empty(shape)
        whole = tuple((0, size) for size in shape)
        rows = range(shape[0]) if shape and chance.random() < 0.5 else [None]
        for row in rows:
            box = whole if row is None else ((row, 1), *whole[1:])
            spec = TensorSpec(f"{name}.{row}", torch.float32, tuple(length for _, length in box))
            tensors.append(PublishedTensor(spec, name, box))
        step = -(-shape[0] // ranks) if shape else 1
        parts = [(start, min(step, shape[0] - start)) for start in range(0, shape[0], step)] if shape else []
        boxes = [(part, *whole[1:]) for part in parts] or [()]
        if len(shape) > 1 and shape[1] > 1 and 2 * len(boxes) <= ranks:
            boxes = [(box[0], half, *box[2:]) for box in boxes for half in ((0, 1), (1, shape[1] - 1))]
        for rank, box in zip(chance.sample(range(ranks), len(boxes)), boxes, strict=True):
            owned[rank].append(Holding(name, box))
    published = PublishedWeights(parameters, tuple(tensors))
    buckets = plan_buckets([tensor.spec for tensor in tensors], 300)
    expected, left = [], iter(tensors)
    for bucket in buckets:
        of_bucket = [next(left) for _ in bucket.tensors]
        pairs = [[(t, h) for t in of_bucket for h in of_rank if h.name == t.parameter] for of_rank in owned]
        parts = [[(t, overlap(h.slices, t.box)) for t, h in own] for own in pairs]
        expected.append([[(t, Holding(t.parameter, box)) for t, box in own if box is not None] for own in parts])
    for rank in {0, ranks - 1}:
        packer = SimpleNamespace(_ranks=SimpleNamespace(rank=rank), buckets=buckets)
        found = Packer._pieces(packer, published, owned)
        assert [of_bucket[rank] for of_bucket in found] == [of_bucket[rank] for of_bucket in expected]
        if rank == 0:
            assert found == expected


@pytest.mark.parametrize("limit_bytes", [600, 1 << 20])
@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("build", [lambda: tiny_qwen3(True), lambda: tiny_qwen3(False), tiny_llama3])
def test_buckets_hold_what_the_adapter_gives(build, limit_bytes, num_buffers):
    model, adapter = build()
    randomise(model, 0)
    tied = "lm_head.weight" not in adapter.to_hf(dict(model.named_parameters()))
    published = model_weights(model, adapter, torch.bfloat16, tied)
    packer = Packer(published, Ranks(CPU, 10, 10), limit_bytes, num_buffers)
    for version in (1, 2):
        randomise(model, version)
        expected = adapter.to_hf({name: p.detach().bfloat16() for name, p in model.named_parameters()})
        packer.snapshots.take(version)
        randomise(model, 99)  # the snapshot is what is sent, not what the model has become
        with packer.snapshots.hold(same, 1, nothing) as buffer:
            tensors = received(packer, buffer)
        assert list(tensors) == list(expected)
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name
    assert "pack" in packer.stopwatch.take()
    ok, version, names, sent_bytes, _ = packer.expected_acknowledgement(2)
    assert (ok, version, names) == (1, 2, len(expected))
    assert sent_bytes >= sum(value.numel() * 2 for value in expected.values())


def test_one_rank_sends_its_snapshots_which_newer_versions_leave_alone():
    model, adapter = tiny_qwen3(True)
    asked: list[int] = []

    def memory(size: int, device: torch.device) -> torch.Tensor:
        asked.append(size)
        return torch.zeros(size, dtype=torch.uint8, device=device)

    published = model_weights(model, adapter, torch.bfloat16, True)
    packer = Packer(published, Ranks(CPU, 10, 10), 600, 2, allocate=memory)
    assert asked == [bucket.wire_bytes for bucket in packer.buckets] * 2 and len(packer.buckets) > 2
    randomise(model, 1)
    packer.snapshots.take(1)
    with packer.snapshots.hold(same, 1, nothing) as buffer:
        wires = [packer.pack(bucket, buffer) for bucket in packer.buckets]
        before = torch.cat(wires)
        for version in (2, 3):
            randomise(model, version)
            packer.snapshots.take(version)
        assert torch.equal(torch.cat(wires), before), "they are on the wire until the push has ended"
    with packer.snapshots.hold(same, 1, nothing) as buffer:
        assert buffer.version == 3
        assert not torch.equal(torch.cat([packer.pack(bucket, buffer) for bucket in packer.buckets]), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_a_version_that_is_not_finite_gets_no_acknowledgement(bad):
    model, adapter = tiny_qwen3(True)
    packer = Packer(model_weights(model, adapter, torch.bfloat16, True), Ranks(CPU, 10, 10), 600, 2)
    for version in (1, 2):
        packer.snapshots.take(version)
        with packer.snapshots.hold(same, 1, nothing) as buffer:
            received(packer, buffer)
        if version == 1:
            assert packer.expected_acknowledgement(1)[:2] == [1, 1]
            with torch.no_grad():
                model.norm.weight[-1] = bad  # the last of them is finite only in float32
    with pytest.raises(UserError, match=r"version 2 of the weights is not finite.*model\.norm\.weight"):
        packer.expected_acknowledgement(2)


def test_llama_queries_and_keys_are_rearranged_and_tied_output_is_left_out():
    model, adapter = tiny_llama3()
    rearranged = {t.parameter for t in model_weights(model, adapter, torch.float32, False).tensors if t.rearrange}
    assert rearranged == {f"layers.{i}.attention.{w}.weight" for i in range(2) for w in ("wq", "wk")}
    model, adapter = tiny_qwen3(True)
    tensors = model_weights(model, adapter, torch.float32, True).tensors
    assert "lm_head.weight" not in {tensor.spec.name for tensor in tensors}
    assert not any(tensor.rearrange for tensor in tensors)


def test_one_parameter_to_tensors_that_are_not_its_rows_is_refused():
    adapter = SimpleNamespace(to_hf=lambda state: {f"{k}.{i}": v for k, v in state.items() for i in range(2)})
    with pytest.raises(ValueError, match="2 tensors that are not its rows"):
        model_weights(nn.Linear(2, 2), adapter, torch.float32, False)
