from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.models import TiedQwen3StateDictAdapter
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.sender import Sender, hugging_face_specs
from torchtitan.grpo.weight_sync.snapshot import Snapshot, canonical_name, primary_holdings
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

CPU = torch.device("cpu")


def tiny_qwen3(tied: bool) -> tuple[nn.Module, TiedQwen3StateDictAdapter]:
    args = Qwen3ModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, head_dim=16, hidden_dim=48, max_seq_len=16,
        enable_weight_tying=tied, attn_type="varlen", attn_mask_type="block_causal",
    )  # fmt: skip
    return Qwen3Model(args), TiedQwen3StateDictAdapter(args, None)


def tiny_llama3() -> tuple[nn.Module, Llama3StateDictAdapter]:
    args = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=16)
    return Transformer(args), Llama3StateDictAdapter(args, None)


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def received(sender: Sender, version: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for bucket in sender.buckets:
        sender.gather(bucket)
        wire = sender.pack(bucket, version).clone()
        assert bucket.trailer(wire).tolist()[:3] == [version, bucket.index, bucket.payload_bytes]
        tensors.update(bucket.views(wire))
    return tensors


def test_take_is_a_copy_of_one_moment():
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    names = [name for name, _ in model.named_parameters()]
    snapshot = Snapshot(model, names[::-1], torch.bfloat16)
    (owned,) = primary_holdings([snapshot.held], snapshot.shapes)
    snapshot.allocate(owned)
    snapshot.take()
    expected = torch.cat([dict(model.named_parameters())[name].flatten() for name in names[::-1]]).bfloat16()
    assert torch.equal(snapshot.flat, expected)
    address = snapshot.flat.data_ptr()
    randomise(model, 3)
    assert torch.equal(snapshot.flat, expected)
    snapshot.take()
    assert snapshot.flat.data_ptr() == address
    assert not torch.equal(snapshot.flat, expected)
    assert snapshot.seconds() > 0


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


@pytest.mark.parametrize("limit_bytes", [600, 1 << 20])
@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("build", [lambda: tiny_qwen3(True), lambda: tiny_qwen3(False), tiny_llama3])
def test_buckets_hold_what_the_adapter_gives(build, limit_bytes, num_buffers):
    model, adapter = build()
    randomise(model, 0)
    sender = Sender(model, adapter, Ranks(CPU, 10, 10), torch.bfloat16, limit_bytes, num_buffers, True)
    for version in (1, 2):
        randomise(model, version)
        expected = adapter.to_hf({name: p.detach().bfloat16() for name, p in model.named_parameters()})
        sender.snapshot.take()
        randomise(model, 99)  # the snapshot is what is sent, not what the model has become
        tensors = received(sender, version)
        assert list(tensors) == list(expected)
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name
    assert "pack" in sender.stopwatch.take()
    ok, version, names, sent_bytes, _ = sender.expected_acknowledgement(2)
    assert (ok, version, names) == (1, 2, len(expected))
    assert sent_bytes >= sum(value.numel() * 2 for value in expected.values())


def test_llama_queries_and_keys_are_rearranged_and_tied_output_is_left_out():
    model, adapter = tiny_llama3()
    _, rearranged = hugging_face_specs(model, adapter, torch.float32)
    assert rearranged == {f"layers.{i}.attention.{w}.weight" for i in range(2) for w in ("wq", "wk")}
    model, adapter = tiny_qwen3(True)
    specs, rearranged = hugging_face_specs(model, adapter, torch.float32)
    assert "lm_head.weight" not in {spec.name for spec in specs.values()}
    assert not rearranged


def test_one_parameter_to_many_tensors_is_refused():
    adapter = SimpleNamespace(to_hf=lambda state: {f"{k}.{i}": v for k, v in state.items() for i in range(2)})
    with pytest.raises(UserError, match="mixture-of-experts"):
        hugging_face_specs(nn.Linear(2, 2), adapter, torch.float32)
