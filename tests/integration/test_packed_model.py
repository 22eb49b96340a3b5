"""The trained model's log-probabilities on packed rows equal transformers' on each document alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.helpers.microbatches import microbatches
from tests.helpers.tiny_models import as_in_files, with_biases
from torchtitan.grpo.model.document_attention import _by_length_class
from torchtitan.grpo.model.documents import Documents, documents_of, shared_prefixes
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.source import ModelSource, load_hf_weights, resolve_model
from torchtitan.grpo.policy.rows import PackedSample

PAD = 7
SHAPE = dict(
    pad_token_id=PAD,
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
TEMPERATURE = 0.7
FAMILIES = ["qwen3", "qwen3_moe", "llama", "qwen2", "mistral"]
EXPERTS = dict(head_dim=32, moe_intermediate_size=40, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)


def reference_model(family: str, tied: bool):
    torch.manual_seed(1)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=tied))
    if family == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, initializer_range=0.1, tie_word_embeddings=tied))
    if family == "qwen2":
        return with_biases(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)))
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, tie_word_embeddings=tied, sliding_window=None))
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied, rope_parameters=rope))


def source_of(folder) -> ModelSource:
    return resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 128)


def packed_model(folder, compile: bool = False):
    source = source_of(folder)
    model = source.build()
    make_packed(model, compile=compile)
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad_multiple", [1, 64])
def test_packed_logprobs_entropy_and_gradients_equal_transformers(family, tied, pad_multiple, tmp_path):
    reference = reference_model(family, tied)
    reference.save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    batch = samples([(3, 5), (1, 1), (17, 30), (8, 9), (40, 2), (2, 60)])
    for sample in batch:  # transformers trains the pad token as an output, but not where it is looked up
        sample.prompt_ids[len(sample.prompt_ids) // 2] = sample.answer_ids[len(sample.answer_ids) // 2] = PAD
    ids = batch[2].answer_ids
    answers = [ids[:n] + [5] * more for n, more in ((0, 1), (9, 4), (30, 0), (20, 0))]  # a group with shared prefixes
    batch += [replace(batch[2], answer_ids=answer, sampler_logprobs=None) for answer in answers]
    (row,) = microbatches(batch, 320, 1, pad_multiple)[0]
    assert row.keys is not None and len(row.keys.positions) == len(row.tokens) + 4 * 16
    _, kept, _ = shared_prefixes(row.tokens, documents_of(row))
    assert len(kept) < len(row.tokens) - 40
    logprobs, entropy = model(row, TEMPERATURE)
    loss = logprobs.sum()
    loss.backward()

    expected = [alone(reference, batch[i]) for i in row.samples.tolist()]
    expected_logprobs = torch.cat([lp for lp, _ in expected])
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.cat([h for _, h in expected]), atol=1e-5, rtol=0)
    expected_logprobs.sum().backward()
    theirs = as_in_files({name: parameter.grad for name, parameter in reference.named_parameters()})
    ours = source_of(tmp_path).adapter.to_hf({name: parameter.grad for name, parameter in model.named_parameters()})
    assert bool(theirs["model.embed_tokens.weight"][PAD].any()) == tied
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_document_does_not_see_its_neighbours(tmp_path):
    reference_model("qwen3", True).save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    batch = samples([(6, 10), (12, 4), (5, 5)])
    together = torch.cat([model(row, 1.0)[0] for row in microbatches(batch, 64, 1)[0]])
    order = [i for row in microbatches(batch, 64, 1)[0] for i in row.samples.tolist()]
    apart = torch.cat([model(microbatches([batch[i]], 64, 1)[0][0], 1.0)[0] for i in order])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


def test_a_row_of_padding_alone_gives_no_answer_tokens_and_zero_gradients(tmp_path):
    reference_model("qwen3", True).save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    (row,) = microbatches([], 64, 1, pad_multiple=8)[0]
    logprobs, _ = model(row, 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def gradients(model, rows) -> tuple[dict[str, torch.Tensor], float]:
    """Of a loss like the trainer's: weighted log-probabilities and entropy, summed over rows; and the loss."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for row in rows:
        logprobs, entropy = model(row, TEMPERATURE)
        loss = -(row.weights * (row.advantages * logprobs + 0.1 * entropy)).sum()
        loss.backward()
        total += float(loss.detach())
    return {name: p.grad for name, p in model.named_parameters()}, total


@pytest.mark.parametrize("family,tied", [("qwen3", True), ("llama", False)])
def test_any_split_into_rows_gives_the_same_gradients(family, tied, tmp_path):
    """Alone, packed, padded, over ranks and by cost: float32 gradients agree to 1e-5 of the largest."""
    reference_model(family, tied).save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    batch = samples([(3, 5), (1, 1), (17, 30), (8, 9), (40, 2), (2, 60), (1, 20), (5, 1)])
    for i, sample in enumerate(batch):
        sample.advantage, sample.weight = (-1.0) ** i * (1 + i / 4), 0.02 + i / 200
    splits = {
        "alone": [row for sample in batch for row in microbatches([sample], 64, 1)[0]],
        "one row": microbatches(batch, 256, 1)[0],
        "padded": microbatches(batch, 128, 1, 128)[0],
        "two ranks": [row for rows in microbatches(batch, 64, 2) for row in rows],
        "four ranks, most of them padding": [row for rows in microbatches(batch, 256, 4, 256, 10.0) for row in rows],
    }
    assert len({len(rows) for rows in splits.values()}) >= 4
    expected, expected_loss = gradients(model, splits.pop("alone"))
    for name, rows in splits.items():
        found, loss = gradients(model, rows)
        assert loss == pytest.approx(expected_loss, rel=1e-5), name
        for parameter, grad in found.items():
            worst = (grad - expected[parameter]).abs().max() / expected[parameter].abs().max()
            assert worst < 1e-5, f"{name}: {parameter} differs by {worst:.1e}"


def test_documents_of_one_token(tmp_path):
    """Prompts and answers of one token: each attends to itself alone, at position 0, padding or not."""
    reference = reference_model("qwen3", True)
    reference.save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    batch = samples([(1, 1)] * 5)
    for pad_multiple in (1, 16):
        (row,) = microbatches(batch, 16, 1, pad_multiple)[0]
        logprobs, entropy = model(row, TEMPERATURE)
        expected = [alone(reference, batch[i]) for i in row.samples.tolist()]
        torch.testing.assert_close(logprobs, torch.cat([lp for lp, _ in expected]), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, torch.cat([h for _, h in expected]), atol=1e-5, rtol=0)


@torch.library.custom_op("torchtitan_grpo_test::packed_attention", mutates_args={})
def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int
) -> torch.Tensor:
    """Opaque to the compiler and with FlashAttention's arguments, which has no kernel for the CPU."""
    return _by_length_class(q, k, v, Documents(bounds, bounds, longest, longest), None)


@packed_attention.register_fake
def _(q, k, v, bounds, longest):
    return torch.empty_like(q)


class OpaqueAttention(torch.nn.Module):
    def forward(self, q, k, v, documents, scale=None):
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        return packed_attention(q, k, v, documents.cu_seq_q, documents.max_q).unsqueeze(0)


def test_blocks_are_compiled_once_for_all_rows_of_one_length(tmp_path):
    """Rows differ in documents, longest document and answer tokens; lengths are the budget's."""
    reference_model("qwen3", True).save_pretrained(tmp_path)
    eager, model = packed_model(tmp_path), packed_model(tmp_path, compile=True)
    torch._dynamo.reset()
    compiler = CompileCounter()
    for name, block in list(model.layers.named_children()):
        block.attention.inner_attention = OpaqueAttention()
        model.layers.register_module(name, torch.compile(block, backend=compiler, fullgraph=True))
    for lengths in ([(3, 5), (10, 20)], [(3, 5)] * 5, [(60, 40)], [(1, 1)] * 3, []):
        (row,) = microbatches(samples(lengths), 128, 1, 128)[0]
        with torch.no_grad():
            torch.testing.assert_close(model(row, 1.0)[0], eager(row, 1.0)[0], atol=1e-5, rtol=0)
    assert compiler.frame_count == 1


@pytest.mark.parametrize("family,tied", [("qwen3", True), ("qwen3", False), ("llama", False), ("qwen2", True)])
def test_attention_tokens_count_what_a_token_is_multiplied_by(family, tied, tmp_path):
    reference_model(family, tied).save_pretrained(tmp_path)
    model = packed_model(tmp_path)
    head_dim = 32 if family == "qwen3" else 16
    matrices = sum(p.numel() for p in model.layers.parameters() if p.dim() > 1) + 300 * 64  # and the output's
    assert TrainingFlops.of(model).attention_tokens == 6 * matrices / (12 * 3 * 4 * head_dim)


def test_length_classes_cover_each_token_once_and_at_most_double_the_work():
    lengths = torch.tensor([1, 2, 3, 4, 5, 8, 9, 100])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    padded = Documents(bounds, bounds, 100, 100).padded
    assert padded.slots[padded.taken].tolist() == list(range(int(lengths.sum())))
    assert len(padded.slots) == sum(docs * length for docs, length in padded.shapes) <= 2 * int(lengths.sum())
