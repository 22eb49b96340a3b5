"""The trained model's log-probabilities on packed rows equal transformers' on each document alone."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.models import load_hf_weights, resolve_model
from torchtitan.grpo.packed_model import Documents, make_packed
from torchtitan.grpo.packing import PackedSample, pack

SHAPE = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
TEMPERATURE = 0.7


def reference_model(family: str, tied: bool):
    torch.manual_seed(1)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=tied))
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied, rope_parameters=rope))


def packed_model(folder):
    source = resolve_model(SimpleNamespace(flavor="", hf_assets_path=str(folder), weights="hf"), 128)
    model = source.build()
    make_packed(model)
    with torch.no_grad():
        model.init_weights()
    load_hf_weights(model, source, folder)
    return model


def samples(lengths: list[tuple[int, int]]) -> list[PackedSample]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randint(0, 300, (n,), generator=generator).tolist()  # noqa: E731
    return [PackedSample(draw(p), draw(a), 1.0, 1.0, [0.0] * a) for p, a in lengths]


def alone(model, sample: PackedSample) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([sample.prompt_ids + sample.answer_ids])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / TEMPERATURE
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, torch.tensor(sample.answer_ids)[:, None])[:, 0], entropy


@pytest.mark.parametrize("family,tied", [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)])
@pytest.mark.parametrize("pad_multiple", [1, 64])
def test_packed_logprobs_entropy_and_gradients_equal_transformers(family, tied, pad_multiple, tmp_path):
    reference = reference_model(family, tied)
    reference.save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    batch = samples([(3, 5), (1, 1), (17, 30), (8, 9), (40, 2), (2, 60)])
    (row,) = pack(batch, 192, 1, pad_multiple)[0]
    logprobs, entropy = model(row, TEMPERATURE)
    loss = logprobs.sum()
    loss.backward()

    expected = [alone(reference, batch[i]) for i in row.sample_index.tolist()]
    expected_logprobs = torch.cat([lp for lp, _ in expected])
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.cat([h for _, h in expected]), atol=1e-5, rtol=0)
    expected_logprobs.sum().backward()
    ours = model.tok_embeddings.weight.grad
    theirs = reference.model.embed_tokens.weight.grad
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_document_does_not_see_its_neighbours(tmp_path):
    reference_model("qwen3", True).save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    batch = samples([(6, 10), (12, 4), (5, 5)])
    together = torch.cat([model(row, 1.0)[0] for row in pack(batch, 64, 1)[0]])
    order = [i for row in pack(batch, 64, 1)[0] for i in row.sample_index.tolist()]
    apart = torch.cat([model(pack([batch[i]], 64, 1)[0][0], 1.0)[0] for i in order])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


def test_a_row_of_padding_alone_gives_no_answer_tokens_and_zero_gradients(tmp_path):
    reference_model("qwen3", True).save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    (row,) = pack([], 64, 1, pad_multiple=8)[0]
    logprobs, _ = model(row, 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_length_classes_cover_each_token_once_and_at_most_double_the_work():
    lengths = torch.tensor([1, 2, 3, 4, 5, 8, 9, 100])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    classes = Documents(bounds, bounds, 100, 100).length_classes
    covered = torch.cat([gather[valid] for gather, valid in classes]).sort().values
    assert covered.tolist() == list(range(int(lengths.sum())))
    assert sum(valid.numel() for _, valid in classes) <= 2 * int(lengths.sum())
