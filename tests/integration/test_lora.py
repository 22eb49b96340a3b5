"""Adapters compute, learn and are exported as by the `peft` package, on one rank, two FSDP2 ranks and two TP ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.lora_worker import EPS, LORA, LR, documents
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_models import with_biases
from tests.helpers.trainer_runs import environment, steps, without_times

peft = pytest.importorskip("peft")

SHAPE = dict(
    vocab_size=131,  # odd, so that shards are uneven
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.1,
)
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),  # rows of q and k are rearranged
    "qwen2": lambda: with_biases(Qwen2ForCausalLM(Qwen2Config(**SHAPE))),
}
ALONE = [
    {},
    {"checkpointing": "selective", "lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]}},
]


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Of the documents, in the order in which one packed row has them: the longest first."""
    of_each = []
    for tokens in documents():
        predicted = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        of_each.append(predicted.gather(1, tokens[1:, None])[:, 0])
    return torch.cat(of_each)


@pytest.mark.parametrize(("name", "ranks"), [("llama", 1), ("qwen3", 2), ("qwen2", 2)])
def test_forward_gradients_and_a_step_equal_peft(name, ranks, tmp_path):
    torch.manual_seed(0)
    folder, out = tmp_path / "model", tmp_path / "out"
    MODELS[name]().save_pretrained(folder)
    out.mkdir()
    ways = ALONE if ranks == 1 else [{"tp": 1, "checkpointing": "full"}, {"tp": 2}, {"cp": 2}]
    worker = ROOT / "tests" / "helpers" / "lora_worker.py"
    Ranks(ranks, worker, folder, out, json.dumps(ways), log=tmp_path / "log", cwd=tmp_path).check()
    for number in range(len(ways)):
        compare_with_peft(folder, out / str(number))


def compare_with_peft(folder: Path, of_way: Path) -> None:
    seen = load_file(of_way / "seen.safetensors")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, of_way / "before", is_trainable=True)
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}

    def same(own: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5, msg=lambda m: f"{of_way.name}, {what}: {m}")

    predicted = logprobs(model)
    same(seen["before"].sort().values, predicted.detach().sort().values, "log-probabilities")
    assert (seen["before"] - seen["base"]).abs().max() > 1e-2, "the adapters do something"
    with model.disable_adapter(), torch.no_grad():
        same(seen["base"].sort().values, logprobs(model).sort().values, "the reference")
    (-predicted.sum()).backward()
    assert {f"grad.{name}" for name in trained} == {name for name in seen if name.startswith("grad.")}
    largest = max(p.grad.abs().max() for p in trained.values())
    for name, parameter in trained.items():
        same(seen[f"grad.{name}"] / largest, parameter.grad / largest, name)
    torch.optim.AdamW(trained.values(), lr=LR, eps=EPS, weight_decay=0.1).step()
    after = load_file(of_way / "after" / "adapter_model.safetensors")
    for name, parameter in trained.items():
        same(after[name], parameter.detach(), f"{name} after a step")

    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(again, of_way / "after")
    with torch.no_grad():
        same(seen["after"].sort().values, logprobs(loaded).sort().values, "the export")
    theirs, own = loaded.merge_and_unload().state_dict(), load_file(of_way / "merged.safetensors")
    for name, value in own.items():
        same(value, theirs[name], f"{name} merged")
    config = json.loads((of_way / "after" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == LORA["alpha"] and config["base_model_name_or_path"] == str(folder)


SFT = {
    "--job.config_file": "train_configs/sft_quickstart.toml",
    "--training.steps": 8,
    "--data.source_args": '{"max": 39, "size": 200}',
    "--sft.batch_size": 16,
    "--validation.prompts": 8,
    "--validation.freq": 4,
    "--checkpoint.interval": 4,
    "--checkpoint.resume": "auto",
    "--metrics.no-enable_tensorboard": None,
    "--lr_scheduler.warmup_steps": 0,
    "--lr_scheduler.decay_ratio": 0,  # a schedule of its own would be that of another run
    "--lora.enable": None,
    "--lora.rank": 4,
}


def sft(folder: Path, ranks: int = 1, **flags: object) -> Ranks:
    given = SFT | {"--job.dump_folder": folder} | {f"--{name}": value for name, value in flags.items()}
    words = [word for flag in given.items() for word in flag if word is not None]
    log = folder.parent / f"{folder.name}.log"
    return Ranks(ranks, ROOT / "sft_train.py", *words, log=log, environment=environment())


def test_sft_learns_resumes_to_the_bit_and_refuses_another_base(tmp_path):
    merged = {"lora.merge": None, "optimizer.lr": 2e-3}
    sft(tmp_path / "whole", **merged).check()
    sft(tmp_path / "cut", **merged, **{"training.steps": 4}).check()
    sft(tmp_path / "cut", **merged).check()
    lines = [without_times(steps(tmp_path / name)) for name in ("whole", "cut")]
    for line, other in zip(*lines, strict=True):
        own, others = ({k: v for k, v in each.items() if not k.startswith("checkpoint/")} for each in (line, other))
        assert own == others
    last = [tmp_path / name / "checkpoint" / "step-8" for name in ("whole", "cut")]
    for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        assert len({(folder / file).read_bytes() for folder in last}) == 1, file
    for kind, library in (("adapter", "peft"), ("hf", "transformers")):
        card = ModelCard.load(last[0] / kind / "README.md")
        assert card.data.library_name == library and "after 8 steps of supervised fine-tuning" in card.text
    assert lines[0][-1]["train/loss"] < lines[0][0]["train/loss"]
    saved = FileSystemReader(last[0] / "dcp").read_metadata().state_dict_metadata
    weights = [name for name in saved if name.startswith(("model.", "optimizer.state."))]
    assert weights and all(".lora_" in name for name in weights)
    for flags, word in (
        ({"debug.seed": 1}, "belong to weights with the checksum"),
        ({"lora.target_modules": "q_proj"}, "other layers than q_proj: restore [lora] target_modules"),
        ({"lora.enable": "false", "lora.merge": "false", "lora.rank": 16}, "set [lora] enable = true"),
    ):
        refused = sft(tmp_path / "cut", **merged | {"training.steps": 9} | flags)
        assert refused.wait(120) != 0 and word in refused.log, refused.log[-2000:]


def test_two_replicas_write_in_the_background_what_one_rank_writes_at_once(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY_QWEN3, folder)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder))
    model.save_pretrained(folder)
    given = {"model.weights": "hf", "model.hf_assets_path": folder, "training.steps": 2, "checkpoint.interval": 1}
    sft(tmp_path / "1", **given, **{"offload.optimizer_states": "host"}).check()
    replicas = {"parallelism.data_parallel_replicate_degree": 2, "checkpoint.async_mode": "async"}
    sft(tmp_path / "2", 2, **given, **replicas).check()
    files = [tmp_path / n / "checkpoint" / "step-1" / "adapter" / "adapter_model.safetensors" for n in "12"]
    one, two = map(load_file, files)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    peft.PeftModel.from_pretrained(model, files[1].parent)
