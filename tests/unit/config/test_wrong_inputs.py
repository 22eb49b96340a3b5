"""Wrong and unusual inputs, as users make them: each ends with a clear error and exit status 2, before a step is made.

A row has what is wrong: flags on top of a small run, and perhaps a function that spoils its folder. It also has words
that the message must hold: the key, file or server, and what to change. `grpo_train.main` runs in this process. Most
rows end before there is a process group. Those in SERVERS end while the servers are looked at.

test_config.py has every type, range and contradiction of keys.
"""

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import grpo_train
from tests.helpers import TINY_QWEN3
from tests.helpers.forked_rollouts import ForkedBesides
from tests.helpers.ranks import begin_imports, free_port
from tests.helpers.weight_senders import changed
from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.marker import Marker
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.process import folder_lock
from torchtitan.grpo.run import rollout_process, run, running, script
from torchtitan.grpo.weight_sync.link import WeightSyncError

ROWS = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
MODEL = {"--model.hf_assets_path": "model"}
JSONL = {"--data.source": "jsonl", "--data.source_args": "{}", "--data.path": "rows.jsonl"}
RANDOM = {"--model.weights": "random"}
SMALL = (
    MODEL
    | RANDOM
    | {
        "--job.dump_folder": "run",
        "--training.steps": "1",
        "--training.seq_len": "64",
        "--training.mixed_precision_param": "float32",
        "--data.max_prompt_tokens": "16",
        "--data.source_args": '{"max": 9}',
        "--rollout.max_answer_tokens": "8",
        "--grpo.prompts_per_step": "2",
        "--grpo.group_size": "2",
        "--activation_checkpoint.mode": "none",
        "--metrics.no-enable_tensorboard": None,
    }
)


@dataclass(frozen=True)
class Wrong:
    """One row of the table.

    Attributes:
        flags: On top of SMALL. None as a value: the flag alone. None in place of all: only `argv` counts.
        words: The message holds each of them.
        spoil: Called in the run's folder before the start.
        argv: More words of the command line.
    """

    flags: dict[str, str | None]
    words: tuple[str, ...]
    spoil: Callable[[Path], object] = lambda folder: None
    argv: tuple[str, ...] = ()


def wrong(flags: dict[str, str | None], *words: str, spoil: Callable = lambda folder: None) -> Wrong:
    return Wrong(flags, words, spoil)


def flag(name: str, value: str | None, *words: str) -> Wrong:
    return Wrong({name: value}, words)


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding)

    return spoil


def edit(name: str, **entries: object) -> Callable[[Path], None]:
    """Set entries of a JSON file; None removes one."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | entries
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return spoil


def rows(*more: object, keep: int = 12, **columns: object) -> Callable[[Path], None]:
    """Write rows.jsonl: `keep` good rows with these columns besides, then `more`; text is written as it is."""
    lines = [json.dumps(row | columns) for row in ROWS[:keep]]
    lines += [row if isinstance(row, str) else json.dumps(row) for row in more]
    return write("rows.jsonl", "\n".join(lines) + "\n")


def cut_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def adapters_alone(folder: Path) -> None:
    unlink(CONFIG)(folder)
    write("model/adapter_config.json", '{"base_model_name_or_path": "a/b"}')(folder)


def instead_of_weights(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model" / "model.safetensors").rename(folder / "model" / name)

    return spoil


def no_end_token(folder: Path) -> None:
    edit("model/tokenizer_config.json", eos_token=None)(folder)
    for name in (CONFIG, "model/generation_config.json"):
        edit(name, eos_token_id=None)(folder)


def other_shape(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.zeros(3)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path)


def with_norm(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"model.norm.weight": change(tensors["model.norm.weight"])}, path)

    return spoil


def index_without_files(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    names = {f"tensor{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def checkpoint_of_another_run(folder: Path) -> None:
    step = folder / "run" / "checkpoint" / "step-7"
    step.mkdir(parents=True)
    Marker(7, 1, 1.0, ["model"], {}, 1, {}).write(step)


HF = {"--model.weights": "hf"}
CONFIG = "model/config.json"
OWN = {"--reward.functions": "mine:score"}

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n"
FREQ = "[validation]\nfreq = 0\n"


def toml(text: str, *words: str, encoding: str = "utf-8") -> Wrong:
    return Wrong({"--job.config_file": "run.toml"}, words, write("run.toml", text, encoding))


def reward(code: str, *words: str) -> Wrong:
    return Wrong(OWN, ("[reward] functions", "mine:score", *words), write("mine.py", code))


def play(code: str, *words: str, **arguments: object) -> Wrong:
    given = {"--rollout.environment_args": json.dumps(arguments)} if arguments else {}
    return Wrong({"--rollout.environment": "play:play"} | given, words, write("play.py", code))


CONFIGURATION = {
    "nothing at all": Wrong(
        {"--model.hf_assets_path": ""}, ("[model] hf_assets_path is missing", "Hugging Face folder")
    ),
    "no such file": flag("--job.config_file", "no.toml", "--job.config_file no.toml", "No such file"),
    "a folder as file": flag("--job.config_file", "model", "--job.config_file model", "Is a directory"),
    "broken TOML": wrong(
        {"--job.config_file": "run.toml"}, "run.toml: is not valid TOML", spoil=write("run.toml", "[a")
    ),
    "YAML": wrong(
        {"--job.config_file": "run.toml"},
        "run.toml: is YAML: write it as TOML",
        spoil=write("run.toml", "grpo:\n  a: 1"),
    ),
    "a YAML list": wrong({"--job.config_file": "run.yml"}, "run.yml: is YAML", spoil=write("run.yml", "- grpo")),
    "JSON": wrong(
        {"--job.config_file": "run.toml"},
        "run.toml: is JSON: write it as TOML",
        spoil=write("run.toml", '{\n "grpo": {}}'),
    ),
    "UTF-16": toml(FREQ, "run.toml: is not valid TOML", "Save it as UTF-8", encoding="utf-16"),
    "a byte-order mark is read": toml(FREQ, "[validation] freq = 0 must be", encoding="utf-8-sig"),
    "Windows' ends of lines are read": toml(FREQ.replace("\n", "\r\n"), "[validation] freq = 0 must be"),
    "a key twice": toml("[grpo]\nkl_coef = 0\nkl_coef = 1\n", "Cannot overwrite a value (at line 3,"),
    "a section twice": toml("[grpo]\n[grpo]", "Cannot declare ('grpo',) twice (at line 2,"),
    "a Cyrillic letter": toml('[grpo]\n"group_s\u0456ze" = 2', "group_s\u0456ze: did you mean [grpo] group_size?"),
    "a line that never ends": toml("[grpo]\n" + "x" * 99_999 + " = 1", "(99,999 characters): no key is like it"),
    "another file's flag": flag("--config", "run.toml", "did you mean --job.config_file?"),
    "prime-rl's @": Wrong({}, ("unexpected argument '@'", "--job.config_file run.toml?"), argv=("@", "run.toml")),
    "a flag twice": Wrong({}, ("--grpo.group_size is given twice: keep one",), argv=("--grpo.group_size", "2")),
    "one hyphen": Wrong({}, ("'-grpo.kl_coef': flags are --section.key value",), argv=("-grpo.kl_coef",)),
    "not a number": flag("--optimizer.lr", "nan", "[optimizer] lr", "nan is not a finite number"),
    "a float for an int": flag("--training.steps", "1e3", "[training] steps", '"1e3" is text, not int'),
    "half precision": flag("--training.dtype", "fp16", '"fp16" is not allowed', '"bfloat16" or "float32"'),
    "a variable of the shell": flag("--rollout.urls_file", "$HOME/urls", '"$HOME/urls" does not exist'),
    "TRL: top_k": flag("--grpo.top_k", "20", "did you mean --rollout.top_k"),
    "TRL: SAPO": flag("--grpo.policy_loss", "sapo", '"ppo" or "gspo" or "cispo" or "module:function"'),
    "TRL: report_to": flag("--grpo.report_to", "wandb", "no key is like it", "[metrics] has switches"),
    "verl's sections": toml(
        "[actor_rollout_ref.rollout]\nn = 8\n[actor_rollout_ref.model.lora]\nrank = 8",
        "[actor_rollout_ref]: it is another trainer's",
        "rollout.n is [grpo] group_size",
        "model.lora.rank is [lora] rank",
    ),
    "the file without its flag": Wrong({}, ("--job.config_file run.toml?",), argv=("run.toml",)),
    "key without section": flag("--group_size", "4", "did you mean --grpo.group_size?"),
    "misspelt key": flag("--grpo.group_sise", "4", "did you mean --grpo.group_size?"),
    "misspelt section": wrong(
        {"--job.config_file": "run.toml"},
        "[rolout]",
        "did you mean [rollout]?",
        spoil=write("run.toml", "[rolout]\na = 1"),
    ),
    "no value": flag("--grpo.group_size", None, "--grpo.group_size needs a value: int"),
    "text for a number": flag("--grpo.group_size", "eight", "[grpo] group_size", '"eight" is text, not int'),
    "out of range": flag("--grpo.group_size", "1", "[grpo] group_size = 1 must be at least 2"),
    "two at once": wrong(
        {"--grpo.group_size": "1", "--rollout.temperature": "0"}, "2 problems", "group_size = 1", "temperature = 0"
    ),
    "a choice": flag("--rollout.engine", "vlm", 'did you mean "vllm"?'),
    "learning rate in the wrong section": flag("--grpo.lr", "1e-6", "did you mean --optimizer.lr?"),
    "TRL: learning_rate": flag("--grpo.learning_rate", "1e-6", "did you mean --optimizer.lr?"),
    "TRL: num_generations": flag("--grpo.num_generations", "8", "did you mean --grpo.group_size?"),
    "TRL: max_completion_length": flag("--grpo.max_completion_length", "8", "--rollout.max_answer_tokens?"),
    "TRL: beta": flag("--grpo.beta", "0.1", "did you mean --grpo.kl_coef?"),
    "TRL: reward_funcs": flag("--grpo.reward_funcs", "x", "did you mean --reward.functions?"),
    "TRL: mask_truncated_completions": flag("--grpo.mask_truncated_completions", None, "--grpo.overlong_filter?"),
    "verl: clip_ratio_high": flag("--grpo.clip_ratio_high", "0.3", "did you mean --grpo.ratio_clip_max?"),
    "verl: train_batch_size": flag("--data.train_batch_size", "32", "did you mean --grpo.prompts_per_step?"),
    "verl: tensor_model_parallel_size": flag(
        "--rollout.tensor_model_parallel_size", "2", "did you mean --rollout.gpus_per_server"
    ),
    "verl: total_training_steps": flag("--training.total_training_steps", "9", "did you mean --training.steps?"),
    "torchtitan: dataset": flag("--training.dataset", "c4", "[training] dataset", "prompts come from [data]"),
    "torchtitan: pipeline": flag("--parallelism.pipeline_parallel_degree", "2", "use FSDP and tensor parallelism"),
    "answers longer than a row": flag(
        "--rollout.max_answer_tokens", "100", "[training] seq_len = 64", "16 + 100 = 116"
    ),
    "minibatches": flag("--grpo.minibatches", "3", "[grpo] minibatches = 3 does not divide", "set minibatches = 2"),
    "placement without KL": flag("--grpo.kl_placement", "reward", "[grpo] kl_placement", "kl_coef over 0"),
    "a tab at a path's end": wrong(
        JSONL | {"--data.path": "rows.jsonl\t"}, r'[data] path = "rows.jsonl\t" has a tab', "remove it", spoil=rows()
    ),
    "a backslash of a path": wrong(
        {"--job.config_file": "run.toml"},
        r'[rollout] urls_file = "C:\t',
        'write "/"',
        spoil=write("run.toml", '[rollout]\nurls_file = "C:\\temp"'),
    ),
    "a space at the end of a table's path": wrong(
        {"--job.config_file": "run.toml"},
        '[[data.mixture]] "sums" path = "rows.jsonl " has',
        spoil=write("run.toml", '[[data.mixture]]\nname = "sums"\npath = "rows.jsonl "'),
    ),
    "the best of no metric": wrong(
        {"--validation.enable": None, "--checkpoint.keep_best": "validation/gredy_reward"},
        '[checkpoint] keep_best = "validation/gredy_reward" is no metric of this validation',
        'did you mean "validation/greedy_reward"?',
    ),
    "estimator without KL": flag("--grpo.kl_estimator", "k2", "[grpo] kl_estimator", "kl_coef over 0"),
    "age without async": flag("--async_grpo.max_trajectory_age_steps", "4", "[async_grpo] enabled = true"),
    "recomputation without async": flag(
        "--async_grpo.recompute_kv_cache_after_weight_updates", None, "[async_grpo] enabled = true"
    ),
    "cadence": flag(
        "--weight_sync.cadence", "auto", "--weight_sync.cadence is a flag of an earlier version: leave it out"
    ),
    "negated key of an earlier version": flag(
        "--grpo.no-clip_old_tokens", None, "--grpo.no-clip_old_tokens is a flag of an earlier version"
    ),
    "TOML as a flag": flag(
        "--data.source_args", "{ max = 39 }", "is text, not table: write", '{"name": value} as a flag'
    ),
    "correction twice": flag("--grpo.proximal_logprobs", "sampler", 'set importance_correction = "none"'),
    "load_step without resume": flag("--checkpoint.load_step", "3", "[checkpoint] load_step = 3", "resume = true"),
    "optimizer": flag("--optimizer.name", "Muon", 'write "AdamW" or "Adam"'),
    "negative seed": flag("--debug.seed", "-1", "[debug] seed = -1 must be at least 0"),
    "seed as text": flag("--debug.seed", "abc", "[debug] seed", '"abc" is text, not int'),
    "seed too large": flag("--debug.seed", "4294967296", "[debug] seed", "NumPy takes no other"),
    "compile on a CPU": flag("--compile.enable", None, "[compile] enable", "this machine has none"),
    "colocated and apart": wrong(
        {"--rollout.colocate": None, "--rollout.replicas": "2"}, "[rollout] colocate = true", "replicas = 2"
    ),
    "colocated and running elsewhere": wrong(
        {"--rollout.colocate": None, "--rollout.urls": "http://a:1"}, "[rollout] colocate = true and [rollout] urls"
    ),
    "colocated SGLang": wrong({"--rollout.colocate": None, "--rollout.engine": "sglang"}, 'engine = "vllm"'),
    "NCCL on one GPU": wrong(
        {"--rollout.colocate": None, "--weight_sync.transport": "nccl"}, "cannot join two processes on one GPU"
    ),
    "colocated under Ray": wrong(
        {"--rollout.colocate": None, "--ray.enable": None}, "[ray] enable = true", "[rollout] colocate = true"
    ),
    "a share of two kinds": wrong(
        {"--rollout.colocate": None, "--rollout.server_flags=--gpu-memory-utilization=0.5": None},
        "set [rollout] memory_share",
    ),
    "a sleeper apart": flag("--rollout.sleep_while_training", None, "[rollout] colocate = true"),
    "a sleeper that samples": wrong(
        {"--rollout.colocate": None, "--rollout.sleep_while_training": None, "--async_grpo.enabled": None},
        "[async_grpo] enabled = true samples while the trainer trains",
    ),
    "a sleeper without its base": wrong(
        {
            "--rollout.colocate": None,
            "--rollout.sleep_while_training": None,
            "--lora.enable": None,
            "--optimizer.lr": "1e-4",
        },
        "[lora] enable = true sends adapters only",
    ),
    "a share of nothing": flag("--rollout.memory_share", "0.5", "[rollout] colocate = true only"),
    "SGLang maps no memory": wrong(
        {"--rollout.engine": "sglang", "--rollout.urls": "http://a:1", "--weight_sync.transport": "ipc"},
        '[weight_sync] transport = "ipc"',
        '[rollout] engine = "sglang"',
    ),
    "NCCL on a CPU": flag("--weight_sync.transport", "nccl", "[weight_sync] transport", 'use "auto" or "gloo"'),
    "more ranks than processes": flag("--parallelism.tensor_parallel_degree", "2", "1 process;", "--nproc-per-node"),
    "key variable not set": flag("--rollout.api_key_env", "NO_SUCH_KEY", "the variable is not set: export it"),
    "the key itself": flag("--rollout.api_key_env", "sk-1234", "is not a variable's name"),
    "secret not set": flag("--reward.secrets", "NO_SUCH_SECRET", "[reward] secrets", "export it"),
    "target of a dry run": flag("--dry_run", "h1000", '--dry_run "h1000"', 'did you mean "h100"?'),
}

MODELS = {
    "a hub's name": flag("--model.hf_assets_path", "Qwen/Qwen3-0.6B", "no such folder", "hf download"),
    "a file": wrong({"--model.hf_assets_path": CONFIG}, "is a file: give the folder"),
    "an empty folder": wrong({"--model.hf_assets_path": "e"}, "has no config.json", spoil=lambda f: (f / "e").mkdir()),
    "no experts": flag("--grpo.routing_replay", None, "[grpo] routing_replay = true is for mixtures of experts"),
    "no config.json": wrong({}, "has no config.json: download", spoil=unlink(CONFIG)),
    "torn config.json": wrong({}, "config.json is not valid JSON", spoil=write(CONFIG, '{"model_type": ')),
    "config.json is a list": wrong({}, "must hold a JSON object, not a list", spoil=write(CONFIG, "[]")),
    "another family": wrong(
        {}, "GemmaForCausalLM", "Qwen3ForCausalLM", spoil=edit(CONFIG, architectures=["GemmaForCausalLM"])
    ),
    "experts": wrong(
        {}, "mixtures of experts", spoil=edit(CONFIG, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe")
    ),
    "a RoPE of the whole batch": wrong(
        {},
        "rope_type = 'dynamic'",
        spoil=edit(CONFIG, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ),
    "longer than the model": wrong({"--training.seq_len": "1024"}, "[training] seq_len = 1024", "maximum of 512"),
    "no tokenizer.json": wrong({}, "has no tokenizer.json", spoil=unlink("model/tokenizer.json")),
    "torn tokenizer.json": wrong({}, "tokenizer cannot be loaded", "again", spoil=write("model/tokenizer.json", '{"a')),
    "end token without an embedding": wrong(
        {}, "end token has id 2 ('<eos>')", "for 2 (", "resize_token_embeddings(64)", spoil=edit(CONFIG, vocab_size=2)
    ),
    "a row's token without an embedding": wrong(
        JSONL | {"--data.prompt_template": "Q:{prompt}"},
        "rows.jsonl:1 has id 60 ('Q')",
        "ids up to 63",
        "embeddings for 60",
        "resize_token_embeddings(64)",
        spoil=lambda folder: (rows()(folder), edit(CONFIG, vocab_size=60)(folder)),
    ),
    "torn generation_config.json": wrong(
        {}, "generation_config.json is no generation config", spoil=write("model/generation_config.json", "{")
    ),
    "a held-out set longer than the model": wrong(
        {"--job.config_file": "run.toml"},
        '[[validation.sets]] "far" max_prompt_tokens + max_answer_tokens = 16 + 497 is over',
        "maximum of 512",
        spoil=write(
            "run.toml", "[validation]\nenable = true\n[[validation.sets]]\nname = 'far'\nmax_answer_tokens = 497"
        ),
    ),
    "a hub's name as family": flag("--model.name", "a/b", '[model] name = "a/b" is not', "hf_assets_path, by"),
    "no weights": wrong(HF, "neither model.safetensors", 'weights = "random"', spoil=unlink("model/model.safetensors")),
    "torn weights": wrong(HF, "model.safetensors is truncated", "Download them again", spoil=cut_weights),
    "weights of another shape": wrong(
        HF, "1 missing: model.layers.0.mlp.up_proj", "norm.weight [3]", spoil=other_shape
    ),
    "Git LFS: weights": wrong(HF, "truncated or not a safetensors", spoil=write("model/model.safetensors", LFS)),
    "Git LFS: tokenizer": wrong({}, "download the tokenizer files again", spoil=write("model/tokenizer.json", LFS)),
    "weights that are not numbers": wrong(
        HF, "hold NaN or infinity", "model.norm.weight", spoil=with_norm(lambda weight: weight / 0)
    ),
    "weights in int8": wrong(
        HF, "are quantised", "model.norm.weight I8", spoil=with_norm(lambda weight: weight.to(torch.int8))
    ),
    "quantised": wrong(
        HF, "quantization_config", "float weights", spoil=edit(CONFIG, quantization_config={"quant_method": "fp8"})
    ),
    "adapters alone": wrong(HF, "LoRA adapters without their base; merge them", spoil=adapters_alone),
    "GGUF": wrong(HF, "download the safetensors weights", spoil=instead_of_weights("model.gguf")),
    "pickled weights": wrong(HF, "other formats are not read", spoil=instead_of_weights("pytorch_model.bin")),
    "a hub cache's root": wrong(
        {"--model.hf_assets_path": "cache"},
        "has no config.json: download the whole model folder",
        spoil=lambda folder: shutil.copytree(folder / "model", folder / "cache" / "snapshots" / "abc"),
    ),
    "no end token": wrong({}, "names no end token: set eos_token", spoil=no_end_token),
    "an index without files": wrong(
        HF, "missing: model-00001-of-00002", "00002-of-00002", "index.json", spoil=index_without_files
    ),
}

DATA = {
    "warm start: no target": wrong(
        {"--sft.steps": "2", "--sft.target_column": "no"}, "no column 'no'", "target_column"
    ),
    "warm start: a target that is too long": wrong(
        JSONL | {"--sft.steps": "20", "--sft.batch_size": "2", "--validation.no-enable": None},
        "of the warm start have",
        "[training] seq_len",
        spoil=rows({"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3" * 600}),
    ),
    "latin-1": wrong(
        JSONL,
        "rows.jsonl:1 is not JSON ('utf-8'",
        "in UTF-8",
        spoil=write("rows.jsonl", '{"question": "\xe9"}', "latin-1"),
    ),
    "Git LFS": wrong(JSONL, "rows.jsonl:1 is not JSON", spoil=write("rows.jsonl", LFS)),
    "CSV": wrong(
        JSONL | {"--data.path": "rows.csv"},
        "rows.csv:1 is not JSON",
        "it is CSV",
        'source = "hf"',
        spoil=write("rows.csv", "question,answer\n1,1"),
    ),
    "a pattern of files": wrong(JSONL | {"--data.path": "*.jsonl"}, "'*.jsonl' is not a file", spoil=rows()),
    "no answer": wrong(JSONL, "rows.jsonl:13 has no column 'answer'", 'or to ""', spoil=rows({"question": "1"})),
    "no regular expression": flag("--data.answer_pattern", "((", "[data] answer_pattern", "is no regular expression"),
    "ShareGPT": wrong(
        JSONL, 'must hold {"role": text', spoil=rows({"question": [{"from": "human", "value": "1"}], "answer": "1"})
    ),
    "an image": wrong(
        JSONL,
        "rows.jsonl:13",
        "messages, not {'role': 'user', 'content': [{'type': 'image'}]}",
        spoil=rows({"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}),
    ),
    "an empty folder": wrong(
        {"--data.source": "hf", "--data.source_args": "{}", "--data.path": "rows"},
        "cannot be read as a dataset",
        spoil=lambda folder: (folder / "rows").mkdir(),
    ),
    "a coroutine as curriculum": wrong(
        {"--data.curriculum": "mine:score"},
        "[data] curriculum",
        "write it as `def`",
        spoil=write("mine.py", "async def score(prompt, pass_rate): return True"),
    ),
    "no file": wrong(JSONL | {"--data.path": "no.jsonl"}, "[data] path = 'no.jsonl' is not a file"),
    "a folder as file": wrong(JSONL | {"--data.path": "model"}, "[data] path = 'model' is not a file", 'source = "hf"'),
    "empty": wrong(JSONL, "rows.jsonl has no rows", spoil=write("rows.jsonl", "\n\n")),
    "a deep column": wrong(
        JSONL,
        "rows.jsonl:13: column 'steps' cannot be written as JSON (ValueError: over 100 lists or dicts in each other",
        spoil=rows(f'{{"question": "1+1=", "answer": "2", "steps": {"[" * 600 + "]" * 600}}}'),
    ),
    "torn line": wrong(JSONL, "rows.jsonl:13 is not JSON", spoil=rows('{"question": "1+')),
    "line is no object": wrong(JSONL, "rows.jsonl:13 is a list", spoil=rows([1])),
    "no such column": wrong(
        JSONL | {"--data.prompt_column": "prompt"}, "no column 'prompt'", "['question', 'answer']", spoil=rows()
    ),
    "question: null": wrong(
        JSONL,
        "rows.jsonl:13: column 'question' is null",
        "leave the row out",
        spoil=rows({"question": None, "answer": "1"}),
    ),
    "question: null, without a template": wrong(
        JSONL | {"--data.no-chat_template": None},
        "rows.jsonl:13: column 'question' is null",
        spoil=rows({"question": None, "answer": "1"}),
    ),
    "question is a number": wrong(JSONL, "rows.jsonl:13", "text or a list", spoil=rows({"question": 3, "answer": "1"})),
    "question is a number, without a template": wrong(
        JSONL | {"--data.no-chat_template": None},
        "rows.jsonl:13: column 'question' must be text",
        "not 3",
        spoil=rows({"question": 3, "answer": "1"}),
    ),
    "empty question": wrong(JSONL, "rows.jsonl:13", "what a user asks", spoil=rows({"question": " ", "answer": "1"})),
    "messages without roles": wrong(
        JSONL, "rows.jsonl:13", '"role": text', spoil=rows({"question": [{"content": "1"}], "answer": "1"})
    ),
    "answer is a list": wrong(
        JSONL, "rows.jsonl:13", "column 'answer' must be text", spoil=rows({"question": "1", "answer": [1]})
    ),
    "no answer column": wrong(JSONL | {"--data.answer_column": "solution"}, "no column 'solution'", spoil=rows()),
    "answer pattern": wrong(
        JSONL | {"--data.answer_pattern": "#### (.+)"}, "rows.jsonl:1: [data] answer_pattern", spoil=rows()
    ),
    "pattern without group": wrong(JSONL | {"--data.answer_pattern": "#+"}, "put ( ) around", spoil=rows()),
    "all too long": wrong(JSONL | {"--data.max_prompt_tokens": "1"}, "max_prompt_tokens = 1: raise", spoil=rows()),
    "nothing left to train on": wrong(
        JSONL | {"--validation.enable": None, "--validation.prompts": "12"},
        "12 rows",
        "lower [validation] prompts",
        spoil=rows(),
    ),
    "held-out rows are the training rows": wrong(
        JSONL | {"--data.validation_path": "rows.jsonl"}, "name the same rows", spoil=rows()
    ),
    "a hub's name": wrong(
        {"--data.source": "hf", "--data.source_args": "{}", "--data.path": "openai/gsm8k"},
        '[data] path = "openai/gsm8k": no such folder',
        "`hf download openai/gsm8k --repo-type dataset`",
    ),
    "unknown task": wrong(
        {"--data.source": "reasoning_gym", "--data.source_args": '{"tasks": ["basic_arithmetc"]}'},
        '"basic_arithmetic"?',
    ),
    "template without {prompt}": flag("--data.prompt_template", "Q:", "[data] prompt_template", "lacks {prompt}"),
    "system prompt without chat template": wrong(
        {"--data.no-chat_template": None, "--data.system_prompt": "Be brief."},
        "[data] system_prompt",
        "prompt_template",
    ),
    "tokenizer without chat template": wrong(
        {},
        "has no chat template",
        "[data] chat_template_file",
        spoil=edit("model/tokenizer_config.json", chat_template=None),
    ),
    "chat template file": flag("--data.chat_template_file", "no.jinja", "[data] chat_template_file", "is no file"),
    "torn chat template": wrong(
        {"--data.chat_template_file": "t.jinja"}, "t.jinja refuses", spoil=write("t.jinja", "{% for m in messages %}")
    ),
    "chat template that refuses": wrong(
        {"--data.chat_template_file": "t.jinja"},
        "t.jinja refuses",
        "no",
        spoil=write("t.jinja", "{{ raise_exception('no') }}"),
    ),
    "chat template file without chat template": wrong(
        {"--data.chat_template_file": "t.jinja", "--data.no-chat_template": None},
        "read with [data] chat_template = true only",
        spoil=write("t.jinja", ""),
    ),
    "curriculum": flag("--data.curriculum", "no_such:ask", "[data] curriculum", "no module 'no_such' in this folder"),
}

FUNCTIONS = {
    "misspelt reward": flag("--reward.functions", "exact_mach", 'did you mean "exact_match"?'),
    "reward of no module": wrong(OWN, "[reward] functions", "no module 'mine' in this folder"),
    "reward of no function": wrong(
        OWN, 'has no function "score"', '"scored"?', spoil=write("mine.py", "def scored(): 1")
    ),
    "reward is no function": wrong(OWN, 'has no function "score"', spoil=write("mine.py", "score = 3")),
    "reward with one argument": wrong(
        OWN, "must take 2 arguments (answer, prompt)", spoil=write("mine.py", "def score(answer): return 0.0")
    ),
    "reward with a syntax error": wrong(
        OWN, "cannot import 'mine'", "SyntaxError", spoil=write("mine.py", "def score(")
    ),
    "reward that fails on import": wrong(
        OWN, "cannot import 'mine': ZeroDivisionError", spoil=write("mine.py", "1 / 0")
    ),
    "reward that needs a package": wrong(
        OWN, "'mine' imports 'no_such_package', which is not", spoil=write("mine.py", "import no_such_package")
    ),
    "reward that fails on every answer": wrong(
        OWN,
        "[reward] functions",
        "mine:score",
        "KeyError",
        spoil=write("mine.py", "def score(a, p): return p.columns['x']"),
    ),
    "reward that returns nothing": wrong(OWN, "mine:score", "None", spoil=write("mine.py", "def score(a, p): pass")),
    "reward that returns no number": reward("def score(a, p): return float('nan')", "nan: return one finite number"),
    "reward that returns a tuple": reward("def score(a, p): return 1, 'why'", "(1, 'why'): return one finite number"),
    "reward that is a class": reward("class score:\n    def __init__(self, a, p): pass", "return one finite number"),
    "reward that exits": reward("import sys\ndef score(a, p): sys.exit('no key')", "raised SystemExit: no key"),
    "reward that exits on import": reward("raise SystemExit('no MY_DATA')", "sys.exit('no MY_DATA')", "__main__"),
    "reward that parses arguments": reward(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--my_data', required=True)\np.parse_args()",
        "sys.exit(2)",
        "reads the command line",
    ),
    "TRL's reward": reward("def score(completions, **kwargs): return []", "signature of TRL", "def for_grpo(answers"),
    "reward with the prompt first": reward(
        "def score(prompt, answer): return float(answer == '4')", "(answer, prompt)"
    ),
    "verl's reward": reward(
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 1.0",
        "signature of verl",
        "data_source=prompt.source, solution_str=answer, ground_truth=prompt.answer, extra_info=prompt.columns",
    ),
    "verl's reward with two arguments": reward(
        "def score(solution_str, ground_truth, method='strict'): return float(solution_str == ground_truth)",
        "signature of verl",
        "def for_grpo(answer, prompt):\n        return verl_function(solution_str=answer, ground_truth=prompt.answer)",
    ),
    "reward with the reference second": reward(
        "def score(answer, solution): return float(answer == solution)", "has 'solution' second", "prompt.answer"
    ),
    "reward of groups with the reference second": reward(
        "def score(answers, gold): return [1.0]", "has 'gold' second: write (answers, prompt)"
    ),
    "reward in Python's own module": flag(
        "--reward.functions", "json:score", 'json/__init__.py has no function "score"'
    ),
    "reward as a path": flag("--reward.functions", "./mine.py:score", 'must be "module:function"'),
    "no rewards": flag("--reward.functions", "", "[reward] functions is empty"),
    "weights": flag("--reward.weights", "1,2", "[reward] weights has 2 entries for 1"),
    "references without a column": wrong(
        JSONL | {"--data.answer_column": ""}, "[data] answer_column is empty", "exact_match", spoil=rows()
    ),
    "environment of no module": flag("--rollout.environment", "no_such:play", "[rollout] environment", "'no_such'"),
    "environment as a path": flag("--rollout.environment", "play.py", 'must be "module:function"'),
    "environment with an unknown argument": play(
        "async def play(client, prompt, turns=1): return []", 'has "turn"', 'did you mean "turns"?', turn=3
    ),
    "tasks of verifiers, and other rows": flag("--rollout.environment", "verifiers:a", 'set source = "environment"'),
    "environment with one argument": wrong(
        {"--rollout.environment": "play:play"},
        "must take 2 arguments (client, prompt)",
        spoil=write("play.py", "async def play(client): return []"),
    ),
}

VLLM = {"--rollout.engine": "vllm", "--rollout.start_timeout_seconds": "0.3"}

ADDRESSES = {
    "no address": wrong(VLLM, "[rollout] urls is empty", "http://host:8000"),
    "no scheme": wrong(VLLM | {"--rollout.urls": "localhost:8000"}, "urls, entry 0", "write http://host:port"),
    "port": wrong(VLLM | {"--rollout.urls": "http://a:99999"}, "urls, entry 0", "range"),
    "a password": wrong(VLLM | {"--rollout.urls": "http://u:pw@a:1"}, "urls, entry 0", "api_key_env instead"),
    "twice": wrong(VLLM | {"--rollout.urls": "http://a:1,http://a:1/"}, "2 times"),
    "too few": wrong(
        VLLM | {"--rollout.urls": "http://a:1", "--rollout.min_servers": "2"}, "[rollout] min_servers = 2"
    ),
    "list and file": wrong(
        VLLM | {"--rollout.urls": "http://a:1", "--rollout.urls_file": "urls"},
        "both set",
        spoil=write("urls", "http://a:1"),
    ),
    "files for another node": wrong(
        VLLM | {"--rollout.urls": "http://192.0.2.7:1", "--weight_sync.transport": "disk"},
        "192.0.2.7",
        "set disk_folder",
    ),
    "one port for two": wrong({"--rollout.serve_port": "8123", "--metrics.prometheus_port": "8123"}, "are both 8123"),
    "a server's port": flag("--rollout.serve_port", "20005", "serve_port = 20005 is among the ports of the servers"),
    "no list": wrong(VLLM | {"--rollout.urls_file": "urls"}, '[rollout] urls_file = "urls" does not exist'),
}

FOLDERS = {
    "a file in the run's place": wrong({}, "run cannot be written", "[job] dump_folder", spoil=write("run", "")),
    "the model's folder": flag("--job.dump_folder", "run/../model", "[job] dump_folder", "is the model's folder"),
    "a folder that cannot be made": flag(
        "--job.dump_folder", "/proc/run", "/proc/run cannot be written", "dump_folder"
    ),
    "a file in the checkpoints' place": wrong(
        {"--checkpoint.enable": None}, "checkpoints cannot be written", "folder", spoil=write("run/checkpoint", "")
    ),
    "another run's checkpoints": wrong(
        {"--checkpoint.enable": None}, "[checkpoint] resume", "[job] dump_folder", spoil=checkpoint_of_another_run
    ),
    "no such checkpoint": wrong(
        {"--checkpoint.enable": None, "--checkpoint.resume": None, "--checkpoint.load_step": "3"},
        "[checkpoint] load_step = 3",
        "[7]",
        spoil=checkpoint_of_another_run,
    ),
    "a file in place of the folder for weights": wrong(
        {"--weight_sync.transport": "disk", "--weight_sync.disk_folder": "weights"},
        '[weight_sync] disk_folder = "weights"',
        spoil=write("weights", ""),
    ),
}

TABLE = CONFIGURATION | {
    f"{kind}: {name}": row
    for kind, table in (
        ("model", MODELS),
        ("data", DATA),
        ("function", FUNCTIONS),
        ("address", ADDRESSES),
        ("folder", FOLDERS),
    )
    for name, row in table.items()
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder: config, tokenizer, weights."""
    begin_imports()  # not in the environment and folder of a test
    folder = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(TINY_QWEN3, folder)
    return changed(TINY_QWEN3, 0, folder)


STARTED = {"data: no file", "function: reward of no module"}
"""Rows whose rollout process is started as a user's is. Others fork theirs: its imports take two seconds."""


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The user's working directory, with a model; one process, no GPU."""
    if not any(f"[{row}]" in request.node.name for row in STARTED):
        monkeypatch.setattr(rollout_process, "start", ForkedBesides)
    shutil.copytree(model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("mine", "play"):  # another row's
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # These are for a process of its own.
    monkeypatch.setattr(script, "init_log_lines", lambda: None)
    monkeypatch.setattr(running, "stop_in_time", lambda grace_s: None)
    monkeypatch.setattr(run, "end_within", lambda seconds: None)
    ours = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in ours.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def refused(flags: dict[str, str | None], words: tuple[str, ...], capsys: pytest.CaptureFixture, *argv: str) -> None:
    """The run ends with status 2 and one error, which holds the words."""
    given = [part for each in (SMALL | flags).items() for part in each if part is not None]
    status = grpo_train.main([*given, *argv])
    said = capsys.readouterr().err
    errors = said[said.rfind("error: ") :]
    assert status == 2 and errors.startswith("error: "), said
    assert not [word for word in words if word not in errors], errors
    assert "Traceback" not in errors and len(errors) < 3000


@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused_with_a_clear_error(name: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    row = TABLE[name]
    row.spoil(folder)
    refused(row.flags, row.words, capsys, *row.argv)


LAUNCHED = {
    "no torchrun": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is in the environment, but no RANK or MASTER_ADDR", "--dry_run"),
    "a rank's name": ({"RANK": "abc"}, "RANK=abc in the environment is no whole number", "torchrun"),
    "a number in words": ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two in the environment is no whole number"),
    "no process": ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is no whole number of 1 or more"),
    "left over": (
        {"RANK": "1", "WORLD_SIZE": "1"},
        "RANK=1 in the environment must be under WORLD_SIZE=1",
        "unset RANK",
    ),
    "half left over": ({"RANK": "0", "WORLD_SIZE": "1"}, "but no MASTER_ADDR or MASTER_PORT"),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_variables_of_no_launcher_are_refused_at_once(
    name: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, *words = LAUNCHED[name]
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(script, "init_log_lines", lambda: pytest.fail("it reads RANK"))
    refused({}, tuple(words), capsys)


@pytest.mark.parametrize(
    "variables",
    [
        {"MASTER_PORT": "tcp://10.0.0.1:80"},  # Kubernetes', beside a Service named "master"
        {"LOCAL_RANK": "x"},
        {"LOCAL_WORLD_SIZE": "auto"},
        {"LOCAL_WORLD_SIZE": "8"},
        {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "gone"},
    ],
)
def test_without_rank_and_world_size_what_is_left_of_a_launcher_does_not_matter(
    variables: dict[str, str], folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable)
    alone = [part for each in SMALL.items() for part in each if part is not None]

    def planned() -> str:
        assert grpo_train.main([*alone, "--dry_run"]) == 0
        return re.sub("free on this machine.*", "", capsys.readouterr().out)

    expected = planned()
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    ranks = []

    def make(config: JobConfig) -> grpo_train.Trainer:
        _, rank, world_size = next(dist.rendezvous("env://"))
        ranks.append((rank, world_size, os.environ["LOCAL_RANK"], os.environ.get("LOCAL_WORLD_SIZE")))
        raise EngineError("far enough")

    assert planned() == expected
    assert grpo_train.main(alone, make) == 1 and ranks == [(0, 1, "0", None)]


@pytest.mark.parametrize(
    "error",
    [EngineError("http://a: gone"), FleetError("0 of 1 left"), WeightSyncError("http://a", "push", 1, 0, "gone")],
)
def test_servers_that_fail_end_the_run_in_one_line(
    error: Exception, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    def make(config: JobConfig) -> grpo_train.Trainer:
        raise error

    given = [part for each in SMALL.items() for part in each if part is not None]
    assert grpo_train.main(given, make) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) + len(SERVERS) + len(LAUNCHED) >= 200


def test_a_folder_that_another_run_uses(folder: Path, capsys: pytest.CaptureFixture) -> None:
    with folder_lock.only_run_in(folder / "run"):
        refused({}, ("another run uses run", "[job] dump_folder"), capsys)


# ------------------------------------------------------------------------------------------------- servers


class NotAnEngine(http.server.BaseHTTPRequestHandler):
    """Healthy, and knows no other route; with a `key`, it asks for that first."""

    key = ""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = f"Bearer {self.key}" if self.key else self.headers.get("Authorization")
        open_route = self.path == "/health"
        status = 200 if open_route else 404 if self.headers.get("Authorization") == wanted else 401
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


class Another(NotAnEngine):
    """A vLLM server of another model, as far as it is asked: the checks end with its answer."""

    replies: ClassVar = {
        "/get_world_size": {"world_size": 1},
        "/v1/models": {
            "data": [{"id": "m", "root": "/models/big", "max_model_len": 64, "hf_config": {"hidden_size": 2048}}]
        },
    }

    def do_GET(self) -> None:
        body = json.dumps(self.replies.get(self.path.partition("?")[0], {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class SmallWindow(Another):
    replies: ClassVar = Another.replies | {"/v1/models": {"data": [{"id": "m", "root": "model", "max_model_len": 32}]}}


class Sees(Another):
    """A vLLM that serves the whole of a folder with a vision tower."""

    replies: ClassVar = Another.replies | {
        "/v1/models": {
            "data": [
                {"id": "m", "max_model_len": 64, "hf_config": {"architectures": ["Gemma3ForConditionalGeneration"]}}
            ]
        },
    }


class OtherLayers(Another):
    """An older plug-in's: it does not tell the shape, but its folder is on this machine."""

    replies: ClassVar = Another.replies | {"/v1/models": {"data": [{"id": "m", "root": "served", "max_model_len": 64}]}}


def http_server(handler: type[NotAnEngine]) -> Callable[[], contextlib.AbstractContextManager[str]]:
    @contextlib.contextmanager
    def serve() -> Iterator[str]:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()

    return serve


@contextlib.contextmanager
def nothing() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def not_http() -> Iterator[str]:
    """Greets as an SSH server does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=greet, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class Guarded(NotAnEngine):
    key = "right"


def other_folder(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "served")
    edit("served/config.json", num_hidden_layers=3)(folder)


KEY = {"--rollout.api_key_env": "SERVER_KEY"}
SERVERS = {
    "nobody listens": (
        nothing,
        wrong({}, "not healthy after 0.3 s", "correct [rollout] urls", "start_timeout_seconds"),
    ),
    "not HTTP": (not_http, wrong({}, "not healthy after 0.3 s", "ProtocolError", "correct [rollout] urls")),
    "no vLLM": (http_server(NotAnEngine), wrong({}, "HTTP 404 on /get_world_size", "VLLM_SERVER_DEV_MODE=1")),
    "no SGLang": (
        http_server(NotAnEngine),
        wrong({"--rollout.engine": "sglang"}, "not healthy", "HTTP 404", "[rollout] engine"),
    ),
    "a key is missing": (http_server(Guarded), wrong({}, "HTTP 401", "asks for an API key", "[rollout] api_key_env")),
    "a key is wrong": (http_server(Guarded), wrong(KEY, "HTTP 401", "refuses the API key", "[rollout] api_key_env")),
    "SGLang: a key is wrong": (
        http_server(Guarded),
        wrong(KEY | {"--rollout.engine": "sglang"}, "HTTP 401", "refuses the API key"),
    ),
    "another model": (
        http_server(Another),
        wrong({}, "serves another model: /models/big (hidden_size 2048)", "model (hidden_size 128)", "[rollout] urls"),
    ),
    "a model with a vision tower": (
        http_server(Sees),
        wrong({}, "serves another model: m (architectures", "start the server with a folder of that", "served_model"),
    ),
    "another model, by its folder": (
        http_server(OtherLayers),
        wrong({}, "served (num_hidden_layers 3)", "model (num_hidden_layers 4)", spoil=other_folder),
    ),
    "too short": (http_server(SmallWindow), wrong({}, "at most 32 tokens (--max-model-len)", "[training] seq_len")),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_wrong_server_is_named_before_it_gets_anything(
    name: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "wrong")
    serve, row = SERVERS[name]
    row.spoil(folder)
    flags = {"--reward.workers": "1"} | row.flags
    if not any("not healthy" in words for words in row.words):  # it has time to say that it is
        flags["--rollout.start_timeout_seconds"] = "10"
    with serve() as url:
        refused(VLLM | {"--rollout.urls": url} | flags, (url, *row.words), capsys)
