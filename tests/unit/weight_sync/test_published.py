"""What is published need not be a model: adapters, and parameters that become many tensors, through the real wire."""

import json
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import ROOT
from tests.helpers.published_worker import checkpoint, parameters, published
from tests.helpers.ranks import Ranks as Processes
from tests.helpers.weight_senders import AdapterTrainer
from torchtitan.grpo.model.lora import PeftNames
from torchtitan.grpo.model.peft_folder import gather_adapter
from torchtitan.grpo.weight_sync.packer import Packer
from torchtitan.grpo.weight_sync.published import PublishedTensor, PublishedWeights, whole
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.snapshot import Holding, joined
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, fingerprint
from torchtitan.grpo.weight_wire.buckets import TensorSpec, plan_to_json
from torchtitan.grpo.weight_wire.receiver import ACK_FIELDS, PROTOCOL, Receiver
from torchtitan.grpo.weight_wire.rendezvous import host_store
from torchtitan.grpo.weight_wire.transport import Group, in_thread, wait

CPU = torch.device("cpu")


def assert_same_bytes(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(got[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit_bytes", [300, 1 << 20])
def test_adapters_and_experts_reach_a_receiver_byte_for_byte(dtype, limit_bytes):
    values = parameters(0)
    packer = Packer(published(values, dtype), Ranks(CPU, 10, 10), limit_bytes, num_buffers=2)
    assert (len(packer.buckets) == 1) is (limit_bytes > 300)
    store, port = host_store("127.0.0.1", 10)
    info = {
        "protocol": PROTOCOL, "run": "r", "backend": "gloo", "master_address": "127.0.0.1", "master_port": port,
        "rank_offset": 1, "world_size": 2, "num_buffers": 2, "timeout_seconds": 10.0,
        "plan": plan_to_json(packer.buckets),
    }  # fmt: skip
    joining = in_thread(lambda: Receiver(info, CPU), "receiver")
    group = Group("gloo", store, 0, 2, CPU, 10.0, "127.0.0.1")
    receiver = joining.result(10)
    try:
        for version in (1, 2):
            for name, value in parameters(version).items():
                values[name].copy_(value)
            packer.snapshots.take(version)
            for value in values.values():
                value.fill_(-1)  # the snapshot is what is sent
            got: dict[str, torch.Tensor] = {}
            receiving = in_thread(lambda v=version, g=got: receiver.receive({"version": v}, g.update), "receive")
            with packer.snapshots.hold(lambda newest: newest, 1, lambda: None) as snapshot:
                for bucket in packer.buckets:
                    packer.gather(bucket, snapshot)
                    wire = packer.pack(bucket, snapshot)
                    wait(group.broadcast(wire), time.monotonic() + 10, "a bucket")
            table = torch.zeros(2, ACK_FIELDS, dtype=torch.int64)
            table[0] = torch.tensor(packer.expected_acknowledgement(version))
            wait(group.all_reduce(table), time.monotonic() + 10, "the acknowledgement")
            receiving.result(10)
            assert table[1].tolist() == packer.expected_acknowledgement(version)
            assert_same_bytes(got, checkpoint(parameters(version), dtype))
            assert_same_bytes(dict(published(parameters(version), dtype).whole_tensors()), got)
    finally:
        receiver.close()
        group.abort()


@pytest.mark.parametrize(("ranks", "shards"), [(2, "experts"), (3, "rows"), (4, "both")])
def test_shards_of_experts_become_whole_tensors(tmp_path, ranks, shards):
    """FSDP2 splits five experts, or their rows, over ranks: unevenly. So does expert parallelism before it.

    A receiver reads what rank 0 packed.
    """
    job = {"folder": str(tmp_path), "shards": shards}
    Processes(ranks, ROOT / "tests/helpers/published_worker.py", json.dumps(job), log=tmp_path / "log").check(60)
    info = json.loads((tmp_path / "info.json").read_text())
    assert len(info["plan"]) > 3
    got: dict[str, torch.Tensor] = {}
    expected = json.loads((tmp_path / "expected.json").read_text())
    Receiver(info, CPU).receive({"version": 1, "folder": str(tmp_path), "expected": expected}, got.update)
    assert_same_bytes(got, checkpoint(parameters(1), torch.bfloat16))


def test_neighbours_are_copied_as_one_piece():
    """A snapshot of many experts is one copy, as long as they are sent in their order."""
    rows = ((0, 4), (0, 8))
    experts = [Holding("w", ((e, 1), *rows)) for e in range(3)]
    assert joined(experts) == [Holding("w", ((0, 3), *rows))]
    assert joined([experts[1], experts[0]]) == [experts[1], experts[0]]
    assert joined([experts[0], Holding("v", ((1, 1), *rows))]) == [experts[0], Holding("v", ((1, 1), *rows))]
    halves = [Holding("w", ((e, 1), (start, 2), (0, 8))) for e in range(2) for start in (0, 2)]
    assert joined(halves) == halves
    assert joined([Holding("scale", ()), Holding("scale", ())]) == [Holding("scale", ())] * 2


def test_adapters_of_a_model_have_pefts_names_and_rows(tmp_path):
    """Llama's queries and keys lie in another order of rows in torchtitan."""
    torch.manual_seed(0)
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=64)).save_pretrained(tmp_path)
    trainer = AdapterTrainer(tmp_path)
    trainer.learn(1)
    names = PeftNames(trainer.source.adapter, {n: v.shape for n, v in gather_adapter(trainer.model).items()})
    own = trainer.published()
    sent = {t.spec.name: (t.rearrange or (lambda x: x))(own.parameters[t.parameter].detach()) for t in own.tensors}
    assert any(t.rearrange for t in own.tensors)
    assert_same_bytes(sent, names.convert(gather_adapter(trainer.model)))
    info = AdapterInfo(**own.announced["adapter"])
    base = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    info.check_base("same", lambda: {name: fingerprint(weight) for name, weight in base.state_dict().items()})
    base.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1
    with pytest.raises(ValueError, match=r"in 1 of 21 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        info.check_base("other", lambda: {name: fingerprint(weight) for name, weight in base.state_dict().items()})


def tensor(box, shape=(2, 3), name="w", dtype=torch.float32) -> PublishedTensor:
    return PublishedTensor(TensorSpec(name, dtype, shape), "p", box)


ALL = whole((2, 3))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([], "0 tensors to publish have 0 names"),
        ([tensor(ALL), tensor(ALL)], "2 tensors to publish have 1 names"),
        ([tensor(((1, 2), (0, 3)))], r"w \(2, 3\) cannot be the part"),
        ([tensor(((0, 2), (0, 2)), shape=(6,))], r"w \(6,\) cannot be the part"),
        ([tensor(((0, 6),))], "cannot be the part"),
        ([tensor(ALL), tensor(ALL, name="v", dtype=torch.bfloat16)], "several dtypes"),
    ],
)
def test_contradictions_are_refused(tensors, why):
    with pytest.raises(ValueError, match=why):
        PublishedWeights({"p": torch.zeros(2, 3)}, tuple(tensors))
