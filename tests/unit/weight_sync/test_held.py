"""Which of the trainer's tensors a server holds."""

import hashlib
from unittest.mock import Mock

import pytest
import torch

from torchtitan.grpo.weight_sync import held
from torchtitan.grpo.weight_sync.held import (
    VERIFIED_BYTES,
    Fingerprints,
    HeldBySglang,
    SglangChecksums,
    checksum,
    stacked,
)
from torchtitan.grpo.weight_wire.adapters import fingerprint
from torchtitan.grpo.weight_wire.buckets import TensorSpec, plan_buckets

NAMES = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "vkqo"]
NAMES += [
    f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight" for kind in ("up", "down", "gate") for expert in (1, 0)
]
NAMES += [f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "down", "up")]


class Holds:
    """What an SGLang server says."""

    tells_checksums, started_anew = True, False

    def __init__(self) -> None:
        self.comparable: dict[str, list[str]] = {}
        self.held: dict[str, str] = {}
        self.asked: list[set[str]] = []

    def checksums(self, without: list[str] = [], timeout_s: float | None = None) -> dict[str, str]:  # noqa: B006
        self.asked.append(self.held.keys() - set(without))
        return {name: value for name, value in self.held.items() if name not in without}


def test_what_sglang_stacks():
    experts = "model.layers.0.mlp.experts."
    assert stacked(NAMES) == {
        "model.layers.0.self_attn.qkv_proj.weight": [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"],
        "model.layers.0.self_attn.o_proj.weight": ["model.layers.0.self_attn.o_proj.weight"],
        f"{experts}w13_weight": [f"{experts}{e}.{kind}_proj.weight" for e in (0, 1) for kind in ("gate", "up")],
        f"{experts}w2_weight": [f"{experts}{e}.down_proj.weight" for e in (0, 1)],
        "model.layers.1.mlp.gate_up_proj.weight": [f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up")],
        "model.layers.1.mlp.down_proj.weight": ["model.layers.1.mlp.down_proj.weight"],
    }


def test_an_sglang_server_that_holds_other_bytes_than_before(monkeypatch):
    tensors = {name: torch.randn(4, 4) for name in NAMES}
    buckets = plan_buckets([TensorSpec(name, torch.float32, (4, 4)) for name in NAMES], 1 << 20)
    wire = torch.zeros(buckets[0].wire_bytes, dtype=torch.uint8)
    for name, view in buckets[0].views(wire):
        view.copy_(tensors[name])
    server = Holds()
    server.held = {
        stack: hashlib.sha256(torch.cat([tensors[part] for part in parts]).numpy().tobytes()).hexdigest()[:16]
        for stack, parts in stacked(NAMES).items()
    }
    server.held["model.layers.1.mlp.down_proj.weight"] = "packed"
    verified = SglangChecksums(server, buckets)

    def push() -> int:
        verified.begin()
        verified.add(buckets[0], wire)
        return verified.check()

    assert [push(), push()] == [5, 5] and "model.layers.1.mlp.down_proj.weight" not in server.comparable
    known = server.comparable
    found = HeldBySglang(server, {}, 1.0)
    server.comparable = {}  # the server is connected again meanwhile
    for name, tensor in tensors.items():
        found.take(name, tensor + (name == "model.layers.0.mlp.experts.1.up_proj.weight"))
    assert (found.compared, found.left_out, found.differing) == (5, 1, ["model.layers.0.mlp.experts.w13_weight"])
    server.comparable = known
    whole = server.held["model.layers.0.self_attn.qkv_proj.weight"]
    server.held["model.layers.0.self_attn.qkv_proj.weight"] = "torn"
    with pytest.raises(RuntimeError, match=r"1 of 5 tensors are not those sent, such as .*qkv_proj"):
        push()
    for server.started_anew in (False, False, True):  # the first version of the next connections has all of them
        verified = SglangChecksums(server, buckets)
        with pytest.raises(RuntimeError, match=r"1 of 6 tensors are not those sent, such as .*qkv_proj"):
            push()
    verified = SglangChecksums(server, buckets)
    assert push() == 4, "it may have been started with other flags: what is equal now counts"
    server.held["model.layers.0.self_attn.qkv_proj.weight"] = whole
    monkeypatch.setattr(held, "checksum", Mock(side_effect=torch.OutOfMemoryError))
    assert push() == 0 and push() == 0, "without memory nothing is verified"
    asked = len(server.asked)
    server.tells_checksums = False
    assert push() == 0 and len(server.asked) == asked and held.checksum.call_count == 2


def test_a_large_sglang_server_is_verified_in_turns(monkeypatch):
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(8)]
    buckets = plan_buckets([TensorSpec(name, torch.float32, (4, 4)) for name in names], 1 << 20)
    wire, server = torch.zeros(buckets[0].wire_bytes, dtype=torch.uint8), Holds()
    server.held = dict.fromkeys(names, checksum([torch.zeros(4, 4)]))
    monkeypatch.setattr("torchtitan.grpo.weight_sync.held.VERIFIED_BYTES", 3 * 64)
    verified = SglangChecksums(server, buckets)
    for _ in range(4):
        verified.begin()
        verified.add(buckets[0], wire)
        verified.check()
    assert [len(asked) for asked in server.asked] == [8, 3, 3, 2] and VERIFIED_BYTES > 8 * 64
    assert set().union(*server.asked[1:]) == set(names)


@pytest.mark.parametrize("words_at_once", [8192, 1 << 22])
def test_the_hash_of_sglang_on_a_gpu(monkeypatch, words_at_once):
    """Values of SGLang 0.5.23's own kernels (`gpu_tensor_hash`), which Triton's interpreter has run on a CPU."""
    monkeypatch.setattr(held, "_WORDS_AT_ONCE", words_at_once)
    expected = {5: 0x0AFF2B0FD054DB31, 1000: 0x26564CA5FDD0F61B, 16384: 0x0F888C7C4D7A7394, 20001: 0x89DF2E5B97E37A3E}
    for words, value in expected.items():
        data = torch.arange(words).mul(2654435761).to(torch.int32)
        assert held._hash_of_tiles(data.view(torch.uint8)) == value


def test_fingerprints_of_a_server_that_reads_back_a_part():
    tensors = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(2)}

    class Control:
        def fingerprints(self, timeout_s: float) -> dict[str, str]:
            return {"a": fingerprint(tensors["a"]), "b": "other", "base.x": "1", "base.y": "2"}

    found = Fingerprints(Control(), {"base.x": "1", "base.y": "3", "base.z": "4"}, 1.0)
    for name, tensor in tensors.items():
        found.take(name, tensor)
    assert (found.compared, found.left_out, found.differing) == (4, 1, ["base.y", "b"])
