"""A block of transformers, run without values, saves what the formula of torchtitan's block says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3_5TextConfig, Qwen3Config

from tests.helpers.any_models import save
from torchtitan.grpo.dry_run import measured as dry_run
from torchtitan.grpo.dry_run.activations import block_activations
from torchtitan.grpo.dry_run.measured import measured_activations
from torchtitan.grpo.model import qwen3
from torchtitan.grpo.model.documents import documents_of
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.model.transformers import FAMILY
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample

SHAPE = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8, head_dim=128)
TOKENS = 4096


def measured(config, chunk=TOKENS):
    args = FAMILY.args_from_hf(config)
    with torch.device("meta"):
        model = FAMILY.model_cls(args)
    return measured_activations(model, TOKENS, torch.bfloat16, args, chunk)


@pytest.mark.parametrize("bias", [False, True])
def test_what_checkpointing_keeps_is_that_of_the_formula(bias):
    config = Qwen3Config(**SHAPE, num_key_value_heads=4, vocab_size=64, attention_bias=bias)
    found, shared = measured(config)
    args = replace(qwen3.args_from_hf(config), attn_type="varlen", attn_mask_type="block_causal")
    with torch.device("meta"):
        block = next(qwen3.FAMILY.model_cls(args).layers.children())
    formula = block_activations(args, block, TOKENS, 2, 1, False, "none")
    assert (found.input, found.matmuls, found.gradients) == (formula.input, formula.matmuls, formula.gradients)
    if not bias:  # the order of products with and without one
        assert found.selected == formula.selected
    assert formula.saved < found.saved < 1.6 * formula.saved, "norms of transformers keep float32 copies"
    assert shared == 2 * TOKENS * 128 * 2, "sines and cosines"


def test_feed_forward_layers_in_chunks_save_as_the_formula_says():
    config = Qwen3Config(**SHAPE, num_key_value_heads=4, vocab_size=64)
    args = replace(qwen3.args_from_hf(config), attn_type="varlen", attn_mask_type="block_causal")
    with torch.device("meta"):
        block = next(qwen3.FAMILY.model_cls(args).layers.children())
    whole, chunked = (
        block_activations(args, block, TOKENS, 2, 1, False, "full", mlp_share=share) for share in (1.0, 0.25)
    )
    (found_whole, _), (found, _) = measured(config), measured(config, TOKENS // 4)
    assert found_whole.saved - found.saved == whole.saved - chunked.saved == TOKENS * 2 * 4 * 1536 * 3 // 4
    assert found.gradients == chunked.gradients, "at attention, whose heads are twice as wide as a token"
    assert found.saved + found.gradients < found_whole.saved + found_whole.gradients


def test_a_window_saves_no_more():
    sizes = dict(SHAPE, num_key_value_heads=4, vocab_size=64)
    slides = measured(Gemma3TextConfig(**sizes, sliding_window=64, layer_types=["sliding_attention", "full_attention"]))
    whole = measured(Gemma3TextConfig(**sizes, sliding_window=64, layer_types=["full_attention"] * 2))
    assert slides[0] == whole[0] and slides[0].matmuls > slides[0].selected > slides[0].input


def test_a_long_row_of_a_recurrent_model_is_so_many_short_ones(monkeypatch):
    config = Qwen3_5TextConfig(
        **dict(SHAPE, num_key_value_heads=4, vocab_size=64),
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
    )
    in_parts = measured(config)
    monkeypatch.setattr(dry_run, "CHUNK_TOKENS", TOKENS)
    whole = measured(config)
    assert in_parts[1] == whole[1]
    for name, size in vars(whole[0]).items():
        assert getattr(in_parts[0], name) == pytest.approx(size, rel=0.01), name


def test_a_layer_along_documents_saves_a_shared_prompt_for_each_answer(tmp_path):
    save("qwen3_5_text", tmp_path, max_position_embeddings=512)
    source = resolve_model(SimpleNamespace(hf_assets_path=str(tmp_path), weights="hf"), 512)
    answers = [PackedSample([7] * 281, [number] * 40, 0.0, 1.0, None) for number in range(6)]
    ((packed,),) = pack(answers, 1024, 1)  # documents of 320 tokens: whole steps of the recurrent rule
    row = Microbatch.of(packed, "cpu")
    tokens, documents = len(row.tokens), documents_of(row).with_padded()
    copies = len(documents.padded.slots) / tokens
    assert copies > 3
    model = source.build()
    block, given = model.layers[0], {}
    block.register_forward_pre_hook(lambda block, *inputs: given.update({block: inputs}), with_kwargs=True)
    with torch.no_grad():
        model.final_states(row.tokens, row.positions, documents)
    saved = dry_run._of_block(block, *given[block], 0).saved
    with torch.device("meta"):
        found, _ = measured_activations(source.build(), tokens, torch.float32, source.model_args, tokens, copies)
    assert found.saved == pytest.approx(saved, rel=0.01)
