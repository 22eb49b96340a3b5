"""The row for any model of transformers: each class on packed rows against itself, document by document."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.any_models import BY_DOCUMENT, KINDS, SHAPE, save
from tests.helpers.microbatches import microbatches
from tests.helpers.ranks import Ranks
from tests.helpers.served_logprobs import worst_logprob_difference
from tests.helpers.servers import supervised
from tests.helpers.weight_senders import SYNC, changed, fleet_of, trainer_of, weights_of
from tests.integration.test_lora import compare_with_peft
from tests.integration.test_packed_model import TEMPERATURE, alone, packed_attention, samples
from tests.integration.test_parallel_parity import WAY
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.model import document_attention
from torchtitan.grpo.model.lora import add_adapters
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.peft_folder import adapter_state, gather_adapter, write_adapter
from torchtitan.grpo.model.source import ModelSource, gather_hf, load_hf_weights, resolve_model, write_hf
from torchtitan.grpo.weight_sync.sync import WeightSync

# Of the slow tests a part runs by default, with what differs most. EVERY_MODEL=1 runs all.
EVERY = "EVERY_MODEL" in os.environ
RANKED = tuple(KINDS) if EVERY else ("exaone4", "gemma3_text", "qwen3_5_text")
RENAMED = ("falcon_h1", "lfm2")  # vLLM has other names or values of some of their weights
SERVED = tuple(kind for kind in KINDS if kind not in RENAMED) if EVERY else ("glm4",)  # fused in its files, too
ROUGH = "gemma4_text"  # its scores are not scaled by the width of a head, so rounding counts more
EPS = 1e-2  # of AdamW: a step of a gradient that is rounding alone would be noise


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_gradients_a_step_and_the_export_equal_transformers(kind, tmp_path):
    reference = save(kind, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))  # as published ones have it
    source, model = packed_model(tmp_path)
    assert source.name == "transformers" and {p.dtype for p in model.parameters()} == {torch.float32}

    batch = samples([(3, 5), (1, 1), (17, 30), (8, 9), (40, 2), (2, 60)])
    for sample in batch:  # of a larger vocabulary
        sample.prompt_ids[:] = [token % 131 for token in sample.prompt_ids]
        sample.answer_ids[:] = [token % 131 for token in sample.answer_ids]
    ids = batch[2].answer_ids  # a group, which shares its prompt and beginnings
    batch += [replace(batch[2], answer_ids=[*ids[:n], 5], sampler_logprobs=None) for n in (0, 9)]
    (row,) = microbatches(batch, 320, 1, 64)[0]
    assert row.keys is not None
    logprobs, entropy = model(row, TEMPERATURE)
    expected = [alone(reference, batch[i]) for i in row.samples.tolist()]
    theirs = torch.cat([lp for lp, _ in expected])
    torch.testing.assert_close(logprobs, theirs, atol=1e-5, rtol=5e-6)
    torch.testing.assert_close(entropy, torch.cat([h for _, h in expected]), atol=1e-5, rtol=0)

    for found, network in ((logprobs, model), (theirs, reference)):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, eps=EPS)
        found.mean().backward()
        network.gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        optimizer.step()
    ours = source.adapter.to_hf(model.gradients)
    assert ours.keys() == reference.gradients.keys()
    part = 1e-3 if kind == ROUGH else 2e-4
    for name, gradient in reference.gradients.items():
        torch.testing.assert_close(ours[name], gradient, atol=part * float(gradient.abs().max()) + 1e-7, rtol=0)
    stepped = reference.state_dict()
    exported = gather_hf(model, source, torch.float32)
    for name, value in exported.items():
        step = 5e-5 if kind == ROUGH else 1e-5
        torch.testing.assert_close(value, stepped[name].detach(), atol=step, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    save_file(exported, tmp_path / "model.safetensors", {"format": "pt"})
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    atol = 1e-3 if kind == ROUGH else 1e-5
    torch.testing.assert_close(alone(again, batch[0])[0], alone(reference, batch[0])[0], atol=atol, rtol=1e-5)


def packed_model(folder: Path, compile: bool = False) -> tuple[ModelSource, torch.nn.Module]:
    source = resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 128)
    with torch.device("meta"):
        model = source.build()
    make_packed(model, compile=compile)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    load_hf_weights(model, source, folder)
    return source, model


SEES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
WITH_VISION: dict[str, dict] = {
    "gemma3": dict(mm_tokens_per_image=4, vision_config=SEES),
    "llava": dict(vision_config=SEES | dict(model_type="clip_vision_model")),
    "mistral3": dict(vision_config=SEES | dict(model_type="pixtral", head_dim=16)),
    "qwen3_5": dict(
        vision_config=dict(
            depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128, patch_size=14
        )
    ),
}
"""model_type of a model with a vision tower: what its config has beside its `text_config`."""


def save_with_vision(kind: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(1)
    text = {"llava": "llama", "mistral3": "mistral"}.get(kind, f"{kind}_text")
    own = SHAPE | KINDS[text] | {"model_type": text, "sliding_window": None if kind == "mistral3" else 8}
    config = CONFIG_MAPPING[kind](text_config=own, **WITH_VISION[kind])
    reference = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize(
    ("kind", "prefix"), [*((kind, "") for kind in WITH_VISION), ("gemma3", "model.language_model.")]
)
def test_a_model_that_sees_trains_as_its_language_model(kind, prefix, tmp_path):
    """It computes what the whole model does of text. What is exported is the language model alone."""
    reference = save_with_vision(kind, tmp_path)
    if prefix:  # as other releases of transformers name them
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = {name.replace("language_model.model.", prefix): value for name, value in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    source, model = packed_model(tmp_path)
    batch = samples([(3, 5), (17, 30), (40, 2)])
    for sample in batch:
        sample.prompt_ids[:] = [token % 131 for token in sample.prompt_ids]
        sample.answer_ids[:] = [token % 131 for token in sample.answer_ids]
    (row,) = microbatches(batch, 320, 1, 64)[0]
    logprobs, _ = model(row, TEMPERATURE)
    theirs = torch.cat([alone(reference, batch[i])[0] for i in row.samples.tolist()])
    torch.testing.assert_close(logprobs, theirs, atol=1e-5, rtol=0)

    write_hf(gather_hf(model, source, torch.float32), source, tmp_path / "exported", load_tokenizer(str(TINY_QWEN3)))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert source.hf_config["architectures"] == [type(again).__name__] and "vision_config" not in source.hf_config
    found = torch.cat([alone(again.eval(), batch[i])[0] for i in row.samples.tolist()])
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=0)


def test_adapters_of_a_model_that_sees_are_those_of_its_language_model_within(tmp_path):
    """As the model card loads them. `peft` says in a warning alone that it has taken none."""
    save_with_vision("gemma3", tmp_path / "base")
    lora = SimpleNamespace(enable=True, rank=4, alpha=8.0, target_modules=["all-linear"])
    source = resolve_model(SimpleNamespace(hf_assets_path=str(tmp_path / "base"), weights="hf"), 128, lora)
    with torch.device("meta"):
        model = source.build()
    add_adapters(model, source.lora, torch.float32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()  # ties output and embedding again
        for adapter in adapter_state(model).values():
            adapter.normal_()
    load_hf_weights(model, source, tmp_path / "base")
    write_adapter(gather_adapter(model), source, tmp_path / "adapter", torch.float32)

    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["target_modules"] == list(source.lora.layers), "SGLang takes no pattern in place of the names"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert not [name for name, _ in loaded.named_parameters() if "lora_" in name and "vision" in name]
    theirs = loaded.merge_and_unload().state_dict()
    for name, value in gather_hf(model, source, torch.float32).items():
        torch.testing.assert_close(value, theirs[f"model.language_{name}"], msg=lambda m, n=name: f"{n}: {m}")


# Blocks are compiled as a whole, but for those with a layer by document, which is not compiled.
@pytest.mark.parametrize(("kind", "graphs"), [("olmo2", 1), ("exaone4", 2), ("lfm2", 1 + 2)])
def test_each_kind_of_block_is_compiled_once(kind, graphs, tmp_path, monkeypatch):
    save(kind, tmp_path, vocab_size=300, **({"sliding_window": 120} if kind == "exaone4" else {}))
    (_, eager), (source, model) = packed_model(tmp_path), packed_model(tmp_path, compile=True)
    batches = [microbatches(samples(lengths), 128, 1, 128)[0][0] for lengths in ([(3, 5), (10, 20)], [(60, 40)], [])]
    with torch.no_grad():
        expected = [eager(row, 1.0)[0] for row in batches]
        attend = lambda q, k, v, documents, *_: packed_attention(q, k, v, documents.cu_seq_q, documents.max_q)  # noqa: E731
        monkeypatch.setattr(document_attention, "_by_length_class", attend)
        torch._dynamo.reset()
        compiler = CompileCounter()
        source.family.apply_compile(model, SimpleNamespace(backend=compiler))
        for row, wanted in zip(batches, expected, strict=True):
            torch.testing.assert_close(model(row, 1.0)[0], wanted, atol=1e-5, rtol=0)
    assert compiler.frame_count == graphs


def test_two_ranks_train_as_one(tmp_path):
    """By FSDP2, with full checkpointing on one half of the classes and selective on the other; most by context, too."""
    ways = []
    for number, kind in enumerate(RANKED):
        save(kind, tmp_path / kind)
        checkpointing = "full" if number % 2 else "selective"
        ways.append(WAY | {"folder": str(tmp_path / kind), "together": 1 + number % 3, "checkpointing": checkpointing})
    split = [way | {"cp": 2} for way, kind in zip(ways, RANKED, strict=True) if kind not in BY_DOCUMENT]
    seen = {}
    for ranks, given in ((1, ways), (2, ways + split)):
        worker, out = ROOT / "tests" / "helpers" / "parallel_worker.py", tmp_path / f"{ranks}.json"
        Ranks(ranks, worker, "", out, json.dumps(given), log=out.with_suffix(".log"), cwd=tmp_path).check()
        seen[ranks] = [torch.tensor(steps) for steps in json.loads(out.read_text())]
    alone = dict(zip(RANKED, seen[1], strict=True))
    by_context = [kind for kind in RANKED if kind not in BY_DOCUMENT]
    for kind, two in zip([*RANKED, *by_context], seen[2], strict=True):
        one = alone[kind]
        assert (one[0] - one[2]).abs().max() > 1e-3, kind
        torch.testing.assert_close(two[0], one[0], atol=1e-5, rtol=1e-6, msg=lambda m, k=kind: f"{k}: {m}")
        rounding = 1e-3 if kind == ROUGH else 3e-5  # AdamW magnifies
        torch.testing.assert_close(two, one, atol=2e-5, rtol=rounding, msg=lambda m, k=kind: f"{k}: {m}")


def test_adapters_equal_peft(tmp_path):
    pytest.importorskip("peft")
    ways = []
    adapted = "exaone4", "gemma3_text", "phi3"
    for kind in adapted:
        save(kind, tmp_path / kind)
        ways.append({"tp": 1, "checkpointing": "full", "folder": str(tmp_path / kind)})
    worker, out = ROOT / "tests" / "helpers" / "lora_worker.py", tmp_path / "out"
    out.mkdir()
    Ranks(2, worker, "", out, json.dumps(ways), log=tmp_path / "log", cwd=tmp_path).check()
    for number, kind in enumerate(adapted):
        compare_with_peft(tmp_path / kind, out / str(number))


@pytest.mark.vllm
@pytest.mark.parametrize("kind", SERVED)
def test_vllm_serves_what_is_published(kind, tmp_path):
    """Weights A, B and A again by the plug-in, which checks their sums; then the sampler computes what A computes."""
    # In bfloat16 alone its recurrent states are computed on a CPU. vLLM imports torchvision for it.
    dtype, most = ("bfloat16", 0.2) if kind == "qwen3_5_text" else ("float32", 1e-4)
    reference = save(kind, tmp_path / "A")
    other = changed(tmp_path / "A", 7, tmp_path / "B")
    source, model = trainer_of(tmp_path / "A")
    assert source.name == "transformers"
    (tmp_path / "server").mkdir()
    with supervised("vllm", tmp_path / "server", tmp_path / "A", "--max-num-seqs", "4", "--dtype", dtype) as running:
        (url,) = running.urls
        control = VllmControl(url, None, 60.0)
        sync = WeightSync(weights_of(source, model), SYNC, fleet_of(control), torch.device("cpu"))
        sync.connect()
        worst = {}
        for version, name in enumerate(("A", "B", "A"), 1):
            load_hf_weights(model, source, tmp_path / name)
            sync.publish(version)
            served = reference if name == "A" else AutoModelForCausalLM.from_pretrained(other).eval()
            worst[version, name] = worst_logprob_difference(url, served)
        sync.close()
    assert max(worst.values()) <= most, worst
