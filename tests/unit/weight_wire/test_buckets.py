import json
import math

import pytest
import torch

from torchtitan.grpo.weight_wire.buckets import (
    ALIGNMENT_BYTES,
    Checksum,
    TensorSpec,
    bucket_bytes,
    checksum_of,
    combine_checksums,
    plan_buckets,
    plan_from_json,
    plan_to_json,
)


def specs_of(*shapes, dtype=torch.bfloat16):
    return [TensorSpec(f"layer.{i}.weight", dtype, shape) for i, shape in enumerate(shapes)]


def test_plan_keeps_order_and_limit():
    specs = specs_of((7, 3), (100,), (1,), (64, 2), (5, 5, 5), (33,))
    buckets = plan_buckets(specs, 256)
    assert [spec for bucket in buckets for spec in bucket.tensors] == specs
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert len(buckets) > 2
    for bucket in buckets:
        assert bucket.payload_bytes <= 256
        end = 0
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset % ALIGNMENT_BYTES == 0
            assert offset >= end
            assert offset - end < ALIGNMENT_BYTES
            end = offset + spec.bytes
        assert 0 <= bucket.payload_bytes - end < ALIGNMENT_BYTES


def test_tensor_over_the_limit_travels_alone():
    buckets = plan_buckets(specs_of((8,), (1000,), (8,)), 64)
    assert [len(bucket.tensors) for bucket in buckets] == [1, 1, 1]
    assert buckets[1].payload_bytes == 2000
    exactly = plan_buckets(specs_of((8,), (8,), (8,)), 32)
    assert [len(bucket.tensors) for bucket in exactly] == [2, 1]
    assert plan_buckets([], 64) == []


def test_views_write_into_the_wire_and_do_not_overlap():
    (bucket,) = plan_buckets(specs_of((3, 5), (), (2, 2), dtype=torch.float32), 1 << 20)
    wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
    for i, (_, view) in enumerate(bucket.views(wire)):
        view.fill_(i + 1)
    for i, (name, view) in enumerate(bucket.views(wire)):
        assert name == f"layer.{i}.weight"
        assert (view == i + 1).all()
    assert [view.shape for _, view in bucket.views(wire)] == [(3, 5), (), (2, 2)]
    bucket.trailer(wire).copy_(torch.tensor([1, 2, 3, -4]))
    assert bucket.trailer(wire.clone()).tolist() == [1, 2, 3, -4]


def test_plan_survives_json_and_refuses_nonsense():
    buckets = plan_buckets(specs_of((7, 3), (100,), (), (64, 2)), 200)
    text = json.dumps(plan_to_json(buckets))
    assert plan_from_json(json.loads(text)) == buckets
    with pytest.raises(ValueError, match="expected byte 16"):
        plan_from_json([[["a", "float32", [4], 0], ["b", "float32", [4], 8]]])
    with pytest.raises(ValueError, match="dtype int8"):
        plan_from_json([[["a", "int8", [4], 0]]])
    with pytest.raises(ValueError, match="appears twice"):
        plan_from_json([[["a", "float32", [4], 0]], [["a", "float32", [4], 0]]])


@pytest.mark.parametrize(
    ("memory_gib", "ratio", "mib"), [(140, 0.05, 1024), (24, 0.05, 614.4), (24, 0.025, 307.2), (1, 0.0001, 1)]
)
def test_bucket_bytes(memory_gib, ratio, mib):
    assert bucket_bytes(memory_gib << 30, ratio) == pytest.approx(mib * 2**20, abs=16)
    assert bucket_bytes(memory_gib << 30, ratio) % ALIGNMENT_BYTES == 0


def reference_checksum(payload: bytes, chunk_words: int) -> int:
    """The definition, in Python integers."""
    word_mix, chunk_mix = 0x9E3779B97F4A7C15, (1 << 64) - 0x3D4D51C2D82B14B1
    total = 0
    for start in range(0, len(payload), 8 * chunk_words):
        chunk = payload[start : start + 8 * chunk_words]
        total = total * chunk_mix + sum(
            int.from_bytes(chunk[8 * i : 8 * i + 8], "little", signed=True) * (((i + 1) * word_mix) | 1)
            for i in range(math.ceil(len(chunk) / 8))
        )
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


def test_checksum_is_its_definition_over_chunks_and_devices():
    payload = torch.randint(0, 256, (8 * 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for largest in (8 * 100, 8 * 7, 8 * 1000):  # one chunk; several with a short last one; a mix longer than needed
        checksum = Checksum(torch.device("cpu"), largest)
        assert checksum(payload).item() == reference_checksum(payload.numpy().tobytes(), min(largest // 8, 1 << 22))


def test_a_part_of_a_tensor_has_its_own_checksum_wherever_it_begins():
    """Of the heads' biases, a rank of a server has a few."""
    whole = torch.arange(1, 25, dtype=torch.bfloat16)
    for start, end in ((0, 6), (6, 12), (4, 8), (3, 7)):
        part = whole[start:end]
        assert checksum_of(part) == checksum_of(part.clone())


def test_checksum_sees_every_bit_and_every_swap():
    checksum = Checksum(torch.device("cpu"), 8 * 16)
    payload = torch.randint(0, 256, (8 * 40,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    right = checksum(payload).item()
    for byte in range(payload.numel()):
        torn = payload.clone()
        torn[byte] ^= 1 << (byte % 8)
        assert checksum(torn).item() != right
    words = payload.view(torch.int64)
    for i, j in ((0, 1), (3, 15), (0, 16), (5, 39)):  # within a chunk and across chunks
        swapped = words.clone()
        swapped[[i, j]] = words[[j, i]]
        assert checksum(swapped.view(torch.uint8)).item() != right


def test_combined_checksum_depends_on_order():
    values = [2**63 - 1, -(2**63), 12345, 0]
    assert combine_checksums(values) != combine_checksums(values[::-1])
    assert -(2**63) <= combine_checksums(values) < 2**63
    assert combine_checksums([]) == 0
