"""load_config: what it reads, and that each error names the key and what to change."""

import os
import pickle
import resource
import runpy
import socket
import tomllib
from dataclasses import FrozenInstanceError, fields
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ROOT
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.grpo.config import data_contradictions, job_config
from torchtitan.grpo.config.frozen import changed, freeze
from torchtitan.grpo.config.job_config import Grpo
from torchtitan.grpo.config.keys import check_ranges, keys
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.machine import check_machine, default_to_one_process, one_cpu_thread, raise_file_limit
from torchtitan.grpo.config.resolved import toml_lines
from torchtitan.grpo.config.torchtitan_keys import TORCHTITAN_TEXTS
from torchtitan.grpo.config.unsupported import UNSUPPORTED, honoured_keys, unsupported_by
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards import functions

TINY = str(ROOT / "train_configs" / "tiny_qwen3")
MODEL = ["--model.hf_assets_path", TINY]


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch):
    """One process and no GPU, whatever machine the tests run on."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def load_toml(tmp_path: Path, text: str, *flags: str):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(["--job.config_file", str(path), *MODEL, *flags])


# Each row: a TOML text, then parts of the message: the key's name and the hint.
LORA = "[optimizer]\nlr = 1e-4\n[lora]\nenable = true\n"
FP8 = "[rollout]\nengine = 'vllm'\nreplicas = 1\nquantization = 'fp8'\n"
BAD_TOML = {
    # unknown names
    "key": ("[grpo]\ngroup_sise = 4", "[grpo] group_sise", "did you mean [grpo] group_size?"),
    "penalty": ("[rollout]\nrepetition_penalty = 1.1", "[rollout] repetition_penalty", "change the reward"),
    "section": ("[rolout]\nengine = 'vllm'", "[rolout]", "did you mean [rollout]?"),
    "key of another section": (
        "[training]\nmax_answer_tokens = 9",
        "[training] max_answer_tokens",
        "[rollout] max_answer",
    ),
    "another trainer's name": (
        "[grpo]\nnum_generations = 4",
        "[grpo] num_generations",
        "did you mean [grpo] group_size?",
    ),
    "no section": ("group_size = 4", "group_size", "did you mean [grpo] group_size?"),
    "nothing near": ("[grpo]\nzzz = 4", "[grpo] zzz", "docs/configuration.md"),
    "section as value": ("grpo = 4", "[grpo]", "is a section"),
    "nested": ("[training.dataloader]\nworkers = 4", "[training.dataloader] workers", "did you mean [reward] workers?"),
    # types
    "int as text": ("[grpo]\ngroup_size = '8'", "[grpo] group_size", "write 8, without quotes"),
    "int as word": ("[grpo]\ngroup_size = 'eight'", "[grpo] group_size", '"eight" is text, not int'),
    "int as boolean": ("[grpo]\ngroup_size = true", "[grpo] group_size", "true is a boolean, not int"),
    "int as fraction": ("[grpo]\ngroup_size = 8.0", "[grpo] group_size", "write 8"),
    "boolean as int": ("[grpo]\nadvantage_std = 1", "[grpo] advantage_std", "write true or false"),
    "boolean as text": ("[grpo]\nadvantage_std = 'true'", "[grpo] advantage_std", "without quotes"),
    "float as text": ("[rollout]\ntemperature = '1.0'", "[rollout] temperature", "write 1.0, without quotes"),
    "float not finite": ("[rollout]\ntemperature = inf", "[rollout] temperature", "finite"),
    "text as int": ("[data]\nprompt_column = 3", "[data] prompt_column", 'write it in quotes, "3"'),
    "text as table": ("[data]\nprompt_column = {a = 1}", "[data] prompt_column", "a table, not str"),
    "text as date": ("[data]\nprompt_column = 2026-01-01", "[data] prompt_column", "a date, not str"),
    "list as text": ("[rollout]\nurls = 'http://a:1'", "[rollout] urls", 'write it in brackets, ["http://a:1"]'),
    "list entry": (
        "[rollout]\nstop_token_ids = [1, '2']",
        "[rollout] stop_token_ids",
        "entry 1",
        "write 2, without quotes",
    ),
    "list entry boolean": ("[reward]\nweights = [true]", "[reward] weights", "entry 0"),
    "choice": (
        "[rollout]\nengine = 'VLLM'",
        "[rollout] engine",
        '"embedded" or "vllm" or "sglang"',
        'did you mean "vllm"?',
    ),
    "choice as int": ("[grpo]\npolicy_loss = 1", "[grpo] policy_loss", '"ppo" or "gspo" or "cispo"'),
    "loss of no name": ("[grpo]\npolicy_loss = 'pp0'", 'or "cispo" or "module:function"', 'did you mean "ppo"?'),
    "loss of no module": ("[grpo]\npolicy_loss = 'my-losses:f'", "[grpo] policy_loss", "is not allowed"),
    "none as text": (
        "[lr_scheduler]\ntotal_steps = 'none'",
        "[lr_scheduler] total_steps",
        "leave the key out for none",
    ),
    "torchtitan's int": ("[training]\nsteps = '10'", "[training] steps", "write 10, without quotes"),
    "torchtitan's choice": ("[activation_checkpoint]\nmode = 'on'", "[activation_checkpoint] mode", '"selective"'),
    "boolean or choice": ("[checkpoint]\nresume = 'yes'", "[checkpoint] resume", 'write true, false or "auto"'),
    "torchtitan's boolean": ("[checkpoint]\nenable = 1", "[checkpoint] enable", "write true or false"),
    # ranges
    "group of one": ("[grpo]\ngroup_size = 1", "[grpo] group_size = 1", "at least 2"),
    "no prompts": ("[grpo]\nprompts_per_step = 0", "[grpo] prompts_per_step = 0", "at least 1"),
    "clip over one": ("[grpo]\nratio_clip_min = 1.5", "[grpo] ratio_clip_min = 1.5", "over 0 and at most 1"),
    "no upper clip": ("[grpo]\nratio_clip_max = 0", "[grpo] ratio_clip_max = 0", "over 0"),
    "kl": ("[grpo]\nkl_coef = -0.1", "[grpo] kl_coef = -0.1", "at least 0"),
    "greedy": ("[rollout]\ntemperature = 0", "[rollout] temperature = 0", "at least 0.01"),
    "buffers of an earlier version": (
        "[weight_sync]\nnum_buffers = 2",
        "[weight_sync] num_buffers is a key",
        "leave it out",
    ),
    "buffer share": ("[weight_sync]\nbuffer_memory_ratio = 1.5", "[weight_sync] buffer_memory_ratio", "at most 1"),
    "bucket of an earlier version": (
        "[weight_sync]\nbucket_mib_max = 9",
        "bucket_mib_max is a key of",
        "set [weight_sync] buffer_memory_ratio",
    ),
    "timeout": ("[weight_sync]\ntimeout_seconds = 0", "[weight_sync] timeout_seconds", "over 0"),
    "request timeout": ("[rollout]\nrequest_timeout_seconds = -1", "[rollout] request_timeout_seconds", "over 0"),
    "interval": ("[checkpoint]\ninterval = 0", "[checkpoint] interval = 0", "at least 1"),
    "lr": ("[optimizer]\nlr = 0", "[optimizer] lr", "over 0"),
    "seed": ("[debug]\nseed = -1", "[debug] seed = -1", "at least 0"),
    "seed too large": ("[debug]\nseed = 4294967296", "[debug] seed = 4294967296", "under 4294967296 (NumPy"),
    "torchtitan's range": ("[optimizer]\nbeta1 = 1.0", "[optimizer] beta1 = 1.0", "at least 0 and under 1"),
    "optional number": ("[lr_scheduler]\ntotal_steps = 0", "[lr_scheduler] total_steps = 0", "at least 1"),
    "workers": ("[reward]\nworkers = 0", "[reward] workers = 0", "at least 1"),
    "score timeout": ("[reward]\ntimeout_seconds = 0", "[reward] timeout_seconds = 0", "over 0"),
    "prompt length": ("[data]\nmax_prompt_tokens = 0", "[data] max_prompt_tokens = 0", "at least 1"),
    "operand": ("[data]\nsource_args = { max = 0 }", "[data] source_args max = 0", "at least 1"),
    "held-out prompts": ("[validation]\nprompts = 0", "[validation] prompts = 0", "at least 1"),
    "warm-up without end": ("[lr_scheduler]\nwarmup_steps = 500000000000", "[lr_scheduler] warmup_steps", "1000000000"),
    "giant groups": ("[grpo]\ngroup_size = 1000000000000", "[grpo] group_size = 1000000000000", "at most 65536"),
    "giant lr": ("[optimizer]\nlr = 1e300", "[optimizer] lr = 1e+300", "over 0 and at most 1"),
    "giant whole lr": (f"[optimizer]\nlr = 1{'0' * 400}", "[optimizer] lr = 1000", "characters) is a whole number"),
    "giant warm lr": ("[sft]\nlr = 2", "[sft] lr = 2.0", "over 0 and at most 1"),
    "frozen": ("[validation]\ntemperature = 1e-45", "[validation] temperature = 1e-45", "at least 0.01"),
    "endless wait": ("[weight_sync]\ntimeout_seconds = 1e10", "[weight_sync] timeout_seconds", "at most 1000000.0"),
    "number without an end of its own": (
        "[training]\nmax_norm = 1e10",
        "[training] max_norm",
        "at most 1000000000, as",
    ),
    "NUL": ('[job]\ndump_folder = "~\\u0000"', "[job] dump_folder", "NUL"),
    "load step": ("[checkpoint]\nload_step = -2", "[checkpoint] load_step = -2", "at least -1 (-1 is the newest)"),
    # contradictions
    "experts that SGLang forgets": (
        "[grpo]\nrouting_replay = true\n[async_grpo]\nenabled = true\n"
        "recompute_kv_cache_after_weight_updates = true\n[rollout]\nengine = 'sglang'\nreplicas = 1",
        '[grpo] routing_replay = true with [rollout] engine = "sglang": SGLang forgets',
        "recompute_kv_cache_after_weight_updates = false",
    ),
    "FP8 in the embedded server": (
        "[rollout]\nquantization = 'fp8'",
        '[rollout] quantization = "fp8"',
        'engine = "vllm"',
    ),
    "FP8 uncorrected": (
        FP8 + "[grpo]\nimportance_correction = 'none'",
        '[rollout] quantization = "fp8" samples with other probabilities',
        'set "truncate" or "mask"',
    ),
    "FP8 and adapters": (FP8 + LORA, '[rollout] quantization = "fp8" is for weights', "leave one of them out"),
    "half of SGLang's attention": (
        LORA + "target_modules = ['k_proj', 'q_proj', 'up_proj', 'gate_proj']\n[rollout]\nengine = 'sglang'",
        '[lora] target_modules has q_proj, k_proj, which [rollout] engine = "sglang" adapts with "v_proj" only: add it',
    ),
    "half of SGLang's MLP": (
        LORA + "target_modules = ['up_proj']\n[rollout]\nengine = 'sglang'",
        '[lora] target_modules has up_proj, which [rollout] engine = "sglang" adapts with "gate_proj" only',
    ),
    "adapters for SGLang on a wire": (
        LORA + "[rollout]\nengine = 'sglang'\n[weight_sync]\ntransport = 'gloo'",
        '[weight_sync] transport = "gloo" with [lora]',
        'use "auto" or "disk"',
    ),
    "adapters of random weights": (
        LORA + "[model]\nweights = 'random'",
        '[model] weights = "random"',
        "load the frozen weights from [model] hf_assets_path",
    ),
    "adapters have no reference's weights": (
        LORA + "[grpo]\nkl_coef = 0.1\n[offload]\nreference_weights = 'host'",
        '[offload] reference_weights = "host" with [lora]',
    ),
    "adapters after a warm start": (
        LORA + "[grpo]\nkl_coef = 0.1\n[sft]\nsteps = 3",
        "[sft] steps = 3 with [lora] and [grpo] kl_coef",
    ),
    "rate of adapters": ("[lora]\nenable = true", "[optimizer] lr is missing", "for [lora] 1e-5 to 1e-4"),
    "rank of no adapter": ("[lora]\nrank = 8", "[lora] rank = 8 is read with [lora] enable = true only"),
    "no layer": (LORA + "target_modules = []", "[lora] target_modules = []", "each once"),
    "all layers and one": (
        LORA + "target_modules = ['all-linear', 'q_proj']",
        "[lora] target_modules",
        "stands alone",
    ),
    "merge without export": (
        LORA + "merge = true\n[checkpoint]\nexport_dtype = 'none'",
        "[lora] merge = true is read with [checkpoint] export_dtype",
    ),
    "merge in the background": (
        LORA + "merge = true\n[checkpoint]\nasync_mode = 'async'",
        "[lora] merge = true with [checkpoint] async_mode",
        '"disabled"',
    ),
    "adapters of weights that nobody has": (
        LORA + "[model]\nweights = 'random'",
        '[model] weights = "random" with [lora]',
        "merge = true",
    ),
    "minibatches": (
        "[grpo]\nminibatches = 5",
        "[grpo] minibatches = 5",
        "does not divide",
        "prompts_per_step = 32",
        "minibatches = 4",
    ),
    "rows of ranks": (
        "[training]\nseq_len = 2047\n[parallelism]\ntensor_parallel_degree = 2",
        "[training] seq_len = 2047",
        "set 2048",
    ),
    "rows of parts": (
        "[training]\nseq_len = 2046\n[parallelism]\ncontext_parallel_degree = 4",
        "[parallelism] context_parallel_degree = 4",
        "set 2048",
    ),
    "heads are split twice": (
        "[parallelism]\ncontext_parallel_degree = 2\ntensor_parallel_degree = 2",
        "context_parallel_degree = 2 with tensor_parallel_degree = 2",
        "Set one of them to 1",
    ),
    "row under seq_len": (
        "[training]\ntokens_per_microbatch = 100",
        "[training] tokens_per_microbatch",
        "seq_len = 2048",
    ),
    "too long": ("[rollout]\nmax_answer_tokens = 1600", "[training] seq_len = 2048", "512 + 1600 = 2112", "raise it"),
    "overlong buffer": (
        "[grpo]\noverlong_buffer_tokens = 512",
        "[grpo] overlong_buffer_tokens",
        "max_answer_tokens = 512",
    ),
    "dual clip": ("[grpo]\nratio_clip_c = 0.5", "[grpo] ratio_clip_c = 0.5", "over 1, usually 3"),
    "dual clip inside": ("[grpo]\nratio_clip_c = 1.1", "[grpo] ratio_clip_c = 1.1", "ratio_clip_max = 1.2"),
    "dual clip of gspo": (
        "[grpo]\nratio_clip_c = 3.0\npolicy_loss = 'gspo'",
        "[grpo] ratio_clip_c",
        'only, not "gspo"',
    ),
    "importance without 1": ("[grpo]\nimportance_max = 0.5", "[grpo] importance_max = 0.5", "must have 1 between"),
    "k1 in the loss": ("[grpo]\nkl_coef = 0.1\nkl_estimator = 'k1'", "[grpo] kl_estimator", 'kl_placement = "reward"'),
    "FA4 in float32": (
        "[training]\nflash_attention = 'FA4'\nmixed_precision_param = 'float32'",
        '[training] flash_attention = "FA4"',
        'mixed_precision_param = "bfloat16"',
    ),
    "sglang without urls": ("[rollout]\nengine = 'sglang'", "[rollout] urls is empty", 'engine = "sglang"'),
    "vllm without urls": ("[rollout]\nengine = 'vllm'", "[rollout] urls is empty", "http://"),
    "url of no host": (
        "[rollout]\nurls = ['http://[::1']\n[weight_sync]\ntransport = 'disk'",
        "[rollout] urls, entry 0: Invalid IPv6 URL",
    ),
    "url scheme": ("[rollout]\nurls = ['a:8000']", "[rollout] urls, entry 0", "write http://host:port"),
    "url port": ("[rollout]\nurls = ['http://b', 'http://a:99999']", "[rollout] urls, entry 1", "range"),
    "url query": ("[rollout]\nurls = ['http://a:1/?k=v']", "[rollout] urls, entry 0", "write http://host:port"),
    "url of a client": ("[rollout]\nurls = ['http://a:1/v1/']", "[rollout] urls, entry 0", "leave out /v1"),
    "url fragment": ("[rollout]\nurls = ['http://a:1/#v']", "[rollout] urls, entry 0", "write http://host:port"),
    "servers": ("[rollout]\nurls = ['http://a:1']\nmin_servers = 2", "[rollout] min_servers = 2", "servers, 1"),
    "list of servers": ("[rollout]\nurls_file = '/no/such'", '[rollout] urls_file = "/no/such"', "does not exist"),
    "replicas and urls": ("[rollout]\nreplicas = 1\nurls = ['http://a:1']", "replicas = 1 and [rollout] urls are both"),
    "replicas and file": (
        "[rollout]\nreplicas = 2\nurls_file = '/no/such'",
        "replicas = 2 and [rollout] urls_file are",
    ),
    "flags of no server": (
        "[rollout]\nurls = ['http://a:1']\nserver_flags = ['-x']",
        '[rollout] server_flags = ["-x"]',
        "replicas over 0",
    ),
    "gpus of no server": (
        "[rollout]\nurls = ['http://a:1']\ngpus_per_server = 2",
        "[rollout] gpus_per_server = 2",
        "replicas over 0",
    ),
    "tensor-parallel embedded": ("[rollout]\nreplicas = 1\ngpus_per_server = 2", "gpus_per_server = 2", "one device"),
    "min_servers of replicas": ("[rollout]\nreplicas = 1\nmin_servers = 2", "servers, 1", "raise [rollout] replicas"),
    "key among flags": ("[rollout]\nreplicas = 1\nengine = 'vllm'\nserver_flags = ['--api-key=k']", "api_key_env"),
    "flag and value as one": (
        "[rollout]\nreplicas = 1\nengine = 'vllm'\nserver_flags = ['--max-num-seqs 64']",
        '[rollout] server_flags has "--max-num-seqs" and its value as one word: write "--max-num-seqs", "..."',
    ),
    "tp among flags": (
        "[rollout]\nreplicas = 1\nengine = 'sglang'\nserver_flags = ['--tp-size', '2']",
        '[rollout] server_flags has "--tp-size": set [rollout] gpus_per_server',
    ),
    "url twice": ("[rollout]\nurls = ['http://a:1', 'http://a:1/']", "[rollout] urls", "2 times"),
    "stop string": ("[rollout]\nstop = ['a', '']", '[rollout] stop has ""', "in every answer"),
    "stop string twice": ("[rollout]\nstop = ['a', 'a']", '[rollout] stop has "a" 2 times'),
    "stop strings": (f"[rollout]\nstop = {list(map(str, range(33)))}", "[rollout] stop has 33 texts", "32 at most"),
    "stop token": ("[rollout]\nstop_token_ids = [-1]", "[rollout] stop_token_ids has -1", "0 or more"),
    "jsonl without path": ("[data]\nsource = 'jsonl'", "[data] path is missing", "needs a file"),
    "hf without path": ("[data]\nsource = 'hf'", "[data] path is missing", "needs a folder"),
    "generated and held out": ("[data]\nvalidation_path = 'x'", "[data] validation_path", 'only, not "arithmetic"'),
    "split of a file": (
        "[data]\nsource = 'jsonl'\npath = 'x'\nvalidation_split = 'test'",
        "[data] validation_split",
        'source = "hf"',
    ),
    "held-out file is the training file": (
        "[data]\nsource = 'jsonl'\npath = 'x'\nvalidation_path = 'x'",
        "[data] validation_path and validation_split name the same rows",
        'path = "x"',
    ),
    "held-out split is the training split": (
        "[data]\nsource = 'hf'\npath = 'x'\nvalidation_split = 'train'",
        "[data] validation_path and validation_split name the same rows",
        'split = "train"',
    ),
    "path not read": ("[data]\npath = 'x.jsonl'", "[data] path", 'source = "jsonl" or "hf"'),
    "split not read": ("[data]\nvalidation_split = 'test'", "[data] validation_split", 'source = "hf"'),
    "no tasks": ("[data]\nsource = 'reasoning_gym'", "[data] source_args tasks is empty", "basic_arithmetic"),
    "operator": ("[data]\nsource_args = { operators = ['/'] }", "[data] source_args operators", '"+", "-", "*"'),
    "question without operand": (
        "[data]\nsource_args = { question = '{left}+1=' }",
        "[data] source_args question",
        "{right}",
    ),
    "question without operator": (
        "[data]\nsource_args = { operators = ['+', '-'], question = '{left}+{right}=' }",
        "[data] source_args question",
        "{operator}",
    ),
    "argument of no source": (
        "[data]\nsource_args = { maxx = 9 }",
        '[data] source_args has "maxx", which source = "arithmetic" does not take',
        'did you mean "max"?',
        "size, max, operators, question",
    ),
    "argument of the wrong type": (
        "[data]\nsource_args = { max = '9' }",
        '[data] source_args max = "9" is text, not int',
        "without quotes",
    ),
    "arguments not read": (
        "[data]\nsource = 'jsonl'\npath = 'x'\nsource_args = { max = 9 }",
        "[data] source_args = ",
        'source = "arithmetic" or "reasoning_gym" only',
    ),
    "tasks of the wrong type": (
        "[data]\nsource = 'reasoning_gym'\nsource_args = { tasks = 5 }",
        "[data] source_args tasks = 5",
    ),
    "a task twice": (
        "[data]\nsource = 'reasoning_gym'\nsource_args = { tasks = ['a', 'a'] }",
        '[data] source_args tasks has "a" 2 times',
    ),
    "no such source": ("[data]\nsource = 'arithmetics'", '"arithmetic" or "jsonl"', 'did you mean "arithmetic"?'),
    "key of an earlier version": (
        "[data]\narithmetic_max = 9",
        "[data] arithmetic_max is a key of an earlier version: write [data] source_args = { max = 39 }",
    ),
    "template values of an earlier version": (
        "[data]\nchat_template_kwargs = ['enable_thinking=false']",
        "[data] chat_template_kwargs =",
        "write { name = value }",
    ),
    "template value that the trainer sets": (
        "[data]\nchat_template_kwargs = { add_generation_prompt = false }",
        '[data] chat_template_kwargs has "add_generation_prompt"',
        "name variables that the run does not set",
    ),
    "template value without template": (
        "[data]\nchat_template = false\nchat_template_kwargs = { enable_thinking = false }",
        "[data] chat_template_kwargs",
        "chat_template = true only",
    ),
    "template": ("[data]\nprompt_template = 'Q:'", "[data] prompt_template", "lacks {prompt}"),
    "system prompt": ("[data]\nchat_template = false\nsystem_prompt = 'x'", "[data] system_prompt", "prompt_template"),
    "answer column": (
        "[data]\nsource = 'jsonl'\npath = 'x'\nanswer_column = ''",
        "[data] answer_column",
        "exact_match",
    ),
    "pattern": ("[data]\nanswer_pattern = '(('", "[data] answer_pattern", "no regular expression"),
    "pattern too deep": (f"[data]\nanswer_pattern = '{'(' * 5000}'", "[data] answer_pattern", "no regular expression"),
    "pattern too long": ("[data]\nanswer_pattern = '(a{99999999999})'", "[data] answer_pattern", "too large"),
    "pattern without group": (
        "[reward]\nanswer_pattern = '#+'",
        "[reward] answer_pattern",
        "put ( ) around the answer",
    ),
    "pattern with two": ("[reward]\nanswer_pattern = '(a)(b)'", "[reward] answer_pattern", "has 2 groups"),
    "data pattern with two": ("[data]\nanswer_pattern = '(a)(b)'", "[data] answer_pattern", "has 2 groups"),
    "pattern for own functions": (
        "[reward]\nfunctions = ['a:b']\nanswer_pattern = '(.)'",
        "[reward] answer_pattern",
        "built-in functions only",
    ),
    "weight not finite": ("[reward]\nweights = [nan]", "[reward] weights", "entry 0: nan is not a finite number"),
    "weights": ("[reward]\nweights = [1.0, 2.0]", "[reward] weights has 2 entries for 1", "one for each"),
    "zero weights": ("[reward]\nweights = [0.0]", "[reward] weights", "every reward would be 0"),
    "a teacher's key without one": ("[distill]\ncoef = 2.0", "[distill] coef = 2.0", "[distill] teacher_urls only"),
    "a teacher's address": ("[distill]\nteacher_urls = ['host:1']", "[distill] teacher_urls", "no base address"),
    "a teacher twice": ("[distill]\nteacher_urls = ['http://a:1', 'http://a:1/']", "has http://a:1 twice"),
    "a teacher that is trained": (
        "[distill]\nteacher_urls = ['http://a:1']\n[rollout]\nurls = ['http://a:1/']",
        "[distill] teacher_urls has http://a:1",
        "it gets the trained weights",
    ),
    "a teacher of no source": (
        "[distill]\nteacher_urls = ['http://a:1', 'smal=http://b:1']\n[[data.mixture]]\nname = 'small'",
        '[distill] teacher_urls names "smal"',
        'did you mean "small"?',
    ),
    "a source without a teacher": (
        "[distill]\nteacher_urls = ['a=http://b:1']\n[[data.mixture]]\nname = 'a'\n[[data.mixture]]\nname = 'b'",
        'no teacher for the prompts of "b"',
    ),
    "a teacher's temperature": (
        "[distill]\nteacher_urls = ['http://a:1']\nengine = 'sglang'\n[rollout]\ntemperature = 0.7",
        '[rollout] temperature = 0.7 with [distill] engine = "sglang"',
        "set temperature = 1",
    ),
    "a teacher and top-k": (
        "[distill]\nteacher_urls = ['http://a:1']\n[rollout]\ntop_k = 20",
        "[rollout] top_k = 20 with [distill]",
        "leave one of them out",
    ),
    "top-p alone": ("[rollout]\ntop_p = 0.9", "[rollout] top_p = 0.9", "[rollout] top_k over 0", "bounds how many"),
    "min-p alone": ("[rollout]\nmin_p = 0.1", "[rollout] min_p = 0.1", "[rollout] top_k over 0", "bounds how many"),
    "one token": ("[rollout]\ntop_k = 1", "[rollout] top_k = 1", "set 2 or more"),
    "a teacher and gspo": (
        "[distill]\nteacher_urls = ['http://a:1']\n[grpo]\npolicy_loss = 'gspo'",
        '[grpo] policy_loss = "gspo" with [distill]',
        'use "ppo" or "cispo", or set top_k',
    ),
    "a teacher and KL in the reward": (
        "[distill]\nteacher_urls = ['http://a:1']\n[grpo]\nkl_coef = 0.1\nkl_placement = 'reward'",
        '[grpo] kl_placement = "reward" with [distill]',
        'use kl_placement = "loss", or mode = "add" with top_k',
    ),
    "a teacher's tokens alone and KL in the reward": (
        "[distill]\nteacher_urls = ['http://a:1']\ntop_k = 5\n[grpo]\nkl_coef = 0.1\nkl_placement = 'reward'",
        '[grpo] kl_placement = "reward" with [distill]',
    ),
    "centering and gspo": (
        "[grpo]\nscore_centering = 20\npolicy_loss = 'gspo'",
        '[grpo] score_centering = 20 with policy_loss = "gspo"',
    ),
    "centering and a loss of the user's": (
        "[grpo]\nscore_centering = 20\npolicy_loss = 'a:b'",
        '[grpo] score_centering = 20 with policy_loss = "a:b"',
    ),
    "centering and weights of answers": (
        "[grpo]\nscore_centering = 20\nimportance_level = 'sequence'",
        '[grpo] score_centering = 20 with importance_level = "sequence"',
    ),
    "centering and minibatches": (
        "[grpo]\nscore_centering = 20\nminibatches = 2",
        "[grpo] score_centering = 20 with minibatches = 2",
        "set minibatches = 1",
    ),
    "centering and whole ratios": (
        "[grpo]\nscore_centering = 20\nproximal_logprobs = 'sampler'\nimportance_correction = 'none'",
        '[grpo] score_centering = 20 with proximal_logprobs = "sampler"',
        'policy_loss = "cispo"',
    ),
    "centering and kept tokens": (
        "[rollout]\ntop_k = 20\n[grpo]\nscore_centering = 20",
        "[grpo] score_centering = 20 with [rollout] top_k = 20",
    ),
    "centering and a teacher": (
        "[distill]\nteacher_urls = ['http://a:1']\n[grpo]\nscore_centering = 20",
        "[grpo] score_centering = 20 with [distill] teacher_urls",
    ),
    "a validation without rewards": (
        "[distill]\nteacher_urls = ['http://a:1']\n[reward]\nfunctions = []\n[validation]\nenable = true",
        "[validation] enable = true needs [reward] functions",
    ),
    "no function beside a teacher": (
        "[distill]\nteacher_urls = ['http://a:1']\nmode = 'add'\n[reward]\nfunctions = []",
        "[reward] functions is empty",
    ),
    "no function": ("[reward]\nfunctions = []", "[reward] functions is empty", "exact_match", "environment"),
    "function without name": ("[reward]\nfunctions = ['']", "[reward] functions", 'no built-in ""', "module:function"),
    "function misspelt": ("[reward]\nfunctions = ['exact_mach']", "[reward] functions", 'did you mean "exact_match"?'),
    "function as address": (
        "[reward]\nfunctions = ['ftp://a']",
        '[reward] functions: "ftp://a" must be "module:function"',
    ),
    "environment": ("[rollout]\nenvironment = '%s{0}'", '[rollout] environment: "%s{0}" must be "module:function"'),
    "environment without a name": (
        "[rollout]\nenvironment = 'verifiers:'",
        "put the name of a taskset behind the colon",
    ),
    "environment with other rows": (
        "[rollout]\nenvironment = 'verifiers:gsm8k-v1'",
        '[data] source = "arithmetic" has no tasks of verifiers',
        'set source = "environment"',
    ),
    "rows of no environment": ("[data]\nsource = 'environment'", '[data] source = "environment"', "there is none"),
    "arguments of no environment": (
        "[rollout.environment_args]\ndepth = 3",
        '[rollout] environment_args = { "depth" = 3 } is read with [rollout] environment only',
    ),
    "arguments without names": ("[rollout]\nenvironment_args = ['a']", "[rollout] environment_args", "not table"),
    "arguments that are no JSON": (
        "[rollout]\nenvironment = 'a:b'\nenvironment_args = { day = 2026-01-01 }",
        "[rollout] environment_args",
        "holds what JSON has no value for",
    ),
    "episodes without an endpoint": (
        "[rollout]\nenvironment = 'endpoint'",
        '[rollout] environment = "endpoint"',
        "8100",
    ),
    "endpoint for all": (
        "[rollout]\nserve_port = 8100\nserve_host = '0.0.0.0'",
        '[rollout] serve_host = "0.0.0.0" is open to other machines',
        "serve_key_env",
    ),
    "host of another machine": (
        "[rollout]\nserve_port = 8100\nserve_host = '192.0.2.1'\nserve_key_env = 'HOME'",
        '[rollout] serve_host = "192.0.2.1" is no address of this machine (Cannot assign requested address)',
    ),
    "host that is no name": (
        "[rollout]\nserve_port = 8100\nserve_host = 'a..b'\nserve_key_env = 'HOME'",
        '[rollout] serve_host = "a..b" is no address of this machine',
    ),
    "host of no endpoint": ("[rollout]\nserve_host = '::1'", "[rollout] serve_host", "serve_port over 0 only"),
    "key of no endpoint": ("[rollout]\nserve_key_env = 'sk-1'", "[rollout] serve_key_env = ...", "serve_port"),
    "key that is not set": (
        "[rollout]\nserve_port = 8100\nserve_key_env = 'NO_SUCH_KEY'",
        '[rollout] serve_key_env = "NO_SUCH_KEY": the variable is not set',
    ),
    "curriculum": ("[data]\ncurriculum = 'a.b:'", '[data] curriculum: "a.b:" must be "module:function"'),
    "giant weight": ("[reward]\nweights = [1e300]", "[reward] weights = [1e+300]", "at most 1000000000"),
    "superscript": (
        "[activation_checkpoint]\nselective_ac_option = '²'",
        "[activation_checkpoint] selective_ac_option",
    ),
    "secret that is not set": ("[reward]\nsecrets = ['NO_SUCH_KEY']", "[reward] secrets", '"NO_SUCH_KEY"', "export it"),
    "function twice": ("[reward]\nfunctions = ['a:b', 'a:b']", "[reward] functions", "give it a weight"),
    "scorer of another source": ("[reward]\nfunctions = ['reasoning_gym']", "[reward] functions", 'not "arithmetic"'),
    "keep less than none": ("[checkpoint]\nkeep_latest_k = -1", "[checkpoint] keep_latest_k = -1", "at least 0"),
    "load what": ("[checkpoint]\nload_step = 5", "[checkpoint] load_step = 5", "resume = true"),
    "load again": ("[checkpoint]\nload_step = 5\nresume = 'auto'", "[checkpoint] load_step = 5", "every start"),
    "resume what": ("[checkpoint]\nenable = false\nresume = true", "[checkpoint] resume = true", "enable = true"),
    "best of what": ("[checkpoint]\nkeep_best = 'reward/mean'", "[checkpoint] keep_best", "[validation] enable = true"),
    "best unvalidated": (
        "[checkpoint]\nkeep_best = 'validation/greedy_reward'\ninterval = 15\n[validation]\nenable = true",
        "[checkpoint] interval = 15",
        "multiple of [validation] freq = 10",
    ),
    "optimizer": ("[optimizer]\nname = 'Muon'", '[optimizer] name = "Muon"', 'write "AdamW" or "Adam"'),
    "flavor": ("[model]\nflavor = '0.6B'", '[model] flavor = "0.6B" is not supported', "leave it out"),
    "torchtitan's example": (
        "[model]\nname = 'llama3'\nflavor = 'debugmodel'\n[training]\ndataset = 'c4_test'\nlocal_batch_size = 8",
        '[model] name = "llama3" is not supported',
        '[model] flavor = "debugmodel" is not supported',
        '[training] dataset = "c4_test" is not supported',
        "[training] local_batch_size = 8 is not supported",
    ),
    "shards": (
        "[parallelism]\ndata_parallel_shard_degree = 0",
        "[parallelism] data_parallel_shard_degree = 0",
        "or -1",
    ),
    # torchtitan's keys without effect
    "pipeline": ("[parallelism]\npipeline_parallel_degree = 2", "[parallelism] pipeline_parallel_degree = 2", "FSDP"),
    "ring": ("[parallelism]\ncontext_parallel_rotate_method = 'alltoall'", "rotate_method", "split by heads"),
    "expert": ("[parallelism]\nexpert_tensor_parallel_degree = 2", "expert_tensor_parallel_degree", "not supported"),
    "dataset": ("[training]\ndataset = 'c4'", "[training] dataset", "prompts come from [data]"),
    "batch": ("[training]\nlocal_batch_size = 2", "[training] local_batch_size", "tokens_per_microbatch"),
    "converters": ("[model]\nconverters = ['float8']", "[model] converters", "not supported"),
    "quantize": ("[quantize.linear.float8]\nemulate = true", "[quantize.linear.float8] emulate", "not supported"),
    "initial load": ("[checkpoint]\ninitial_load_path = 'x'", "[checkpoint] initial_load_path", "checkpoint.resume"),
    "validation steps": ("[validation]\nsteps = 0", "[validation] steps = 0", "validation.prompts"),
    "fault tolerance": ("[fault_tolerance]\nenable = true", "[fault_tolerance] enable", "not supported"),
    "own module": (
        "[job]\ncustom_config_module = 'my.config'",
        "[job] custom_config_module",
        "torchtitan.grpo.config.job_config",
    ),
    "file names file": ("[job]\nconfig_file = 'other.toml'", "[job] config_file", "on the command line"),
}


@pytest.mark.parametrize(("text", "expected"), [(t, e) for t, *e in BAD_TOML.values()], ids=list(BAD_TOML))
def test_bad_toml_is_named(tmp_path, text, expected):
    with pytest.raises(UserError) as caught:
        load_toml(tmp_path, text)
    for part in expected:
        assert part in str(caught.value)


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--reward.functions", LONG], "no built-in"),
        (["--rollout.engine", LONG], "is not allowed"),
        (["--rollout.urls", LONG], "is no base address"),
        (["--grpo.group_size", LONG], "is text, not int"),
        (["--grpo.group_size", "9" * 4000], "and at most 65536"),
        (["--data.source_args", '{"a":' * 10**5], "source_args.*is text, not table"),
        (["--rollout.stop_token_ids", ",".join(["7"] * 5000)], "has 7 5000 times"),
        (["--" + LONG, LONG], "unknown flag"),
        ([LONG], "unexpected argument"),
        ([LONG + ".toml"], "unexpected argument"),
        (["--job.config_file", LONG], "cannot be read"),
        (["--data.answer_pattern", LONG], "needs one"),
        (["--optimizer.name", LONG], 'write "AdamW" or "Adam"'),
    ],
)
def test_a_long_value_is_not_repeated_in_whole(flags, says):
    with pytest.raises(UserError, match=says) as caught:
        load_config([*MODEL, *flags])
    assert len(str(caught.value)) < 1500


def test_a_long_key_is_not_repeated_in_whole(tmp_path):
    with pytest.raises(UserError) as caught:
        load_toml(tmp_path, f"{LONG} = 1\n[grpo]\n{LONG} = 1\n[data.{LONG}]\na = 1")
    assert "3 problems" in str(caught.value) and len(str(caught.value)) < 1500


BAD_FLAGS = {
    "unknown": (["--grpo.gruop_size", "4"], "--grpo.gruop_size", "did you mean --grpo.group_size?"),
    "unknown section": (["--grop.group_size=4"], "--grop.group_size", "did you mean --grpo.group_size?"),
    "no section": (["--group_size", "4"], "--group_size", "did you mean --grpo.group_size?"),
    "misspelt switch": (["--dry-runn"], "--dry-runn", "did you mean --dry_run?"),
    "not a flag": (["quickstart.toml"], "'quickstart.toml'", "did you mean --job.config_file quickstart.toml?"),
    "type": (["--grpo.group_size", "eight"], "[grpo] group_size", '"eight" is text, not int'),
    "fraction": (["--grpo.group_size", "8.5"], "[grpo] group_size", '"8.5" is text, not int'),
    "choice": (["--rollout.engine", "vlm"], "[rollout] engine", 'did you mean "vllm"?'),
    "no value": (["--grpo.group_size", "--grpo.minibatches", "1"], "--grpo.group_size", "needs a value: int"),
    "twice": (["--grpo.group_size", "4", "--grpo.group-size=8"], "--grpo.group_size", "given twice"),
    "negation with value": (["--checkpoint.no-enable=true"], "--checkpoint.no-enable", "takes no value"),
    "negated number": (["--grpo.no-group_size"], "--grpo.no-group_size", "did you mean --grpo.group_size?"),
    "null": (["--data.chat_template_kwargs", '{"a": [null]}'], "[data] chat_template_kwargs", "holds null"),
    "list entry": (["--rollout.stop_token_ids", "1,x"], "[rollout] stop_token_ids", "entry 1"),
    "range": (["--grpo.group_size", "1"], "[grpo] group_size = 1", "at least 2"),
    "torchtitan's default": (["--model.name", "llama3"], '[model] name = "llama3"', "leave it out"),
    "unsupported": (["--training.dataset", "c4"], "[training] dataset", "prompts come from [data]"),
    "no such file": (["--job.config_file", "/no/such.toml"], "/no/such.toml", "cannot be read"),
}


@pytest.mark.parametrize(("flags", "expected"), [(f, e) for f, *e in BAD_FLAGS.values()], ids=list(BAD_FLAGS))
def test_bad_flag_is_named(flags, expected):
    with pytest.raises(UserError) as caught:
        load_config([*MODEL, *flags])
    for part in expected:
        assert part in str(caught.value)


BROKEN_TOML = ["[grpo\n", "[grpo]\ngroup_size = 8\ngroup_size = 9\n", "a = 'ü'", "a = " + "[" * 5000]


@pytest.mark.parametrize("text", BROKEN_TOML, ids=range(len(BROKEN_TOML)))
def test_broken_toml_names_file_and_place(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"run\.toml: is not valid TOML"):
        load_config(["--job.config_file", str(path)])


def test_a_byte_order_mark_is_not_read(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[grpo]\r\ngroup_size = 4\r\n")
    assert load_config(["--job.config_file", str(path), *MODEL]).grpo.group_size == 4


def test_missing_model_folder_is_named():
    with pytest.raises(UserError, match=r"\[model\] hf_assets_path is missing"):
        load_config([])


def test_all_problems_are_told_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        load_toml(tmp_path, "[grpo]\ngroup_size = '8'\nnope = 1\n[training]\ndataset = 'c4'", "--grpo.minibatches", "x")
    for part in ("4 problems", "run.toml", "group_size", "nope", "dataset", "minibatches"):
        assert part in str(caught.value)


def test_toml_under_flags_over_defaults(tmp_path):
    config = load_toml(
        tmp_path,
        "[grpo]\ngroup_size = 4\nminibatches = 2\n[optimizer]\nlr = 1\n[rollout]\nurls = ['http://a:1/', 'http://b:2']",
        "--grpo.minibatches=4",
        "--grpo.ratio-clip-max",
        "0.28",
    )
    assert (config.grpo.group_size, config.grpo.minibatches, config.grpo.ratio_clip_max) == (4, 4, 0.28)
    assert config.grpo.prompts_per_step == job_config.Grpo().prompts_per_step
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.rollout.urls == ["http://a:1", "http://b:2"]
    assert config.job.config_file.endswith("run.toml")
    assert config.job.custom_config_module == "torchtitan.grpo.config.job_config"


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--metrics.no-enable_tensorboard"], "metrics.enable_tensorboard", False),
        (["--metrics.no-enable-tensorboard"], "metrics.enable_tensorboard", False),
        (["--metrics.enable_tensorboard", "false"], "metrics.enable_tensorboard", False),
        (["--checkpoint.enable=true"], "checkpoint.enable", True),
        (["--checkpoint.resume"], "checkpoint.resume", True),
        (["--checkpoint.resume", "true"], "checkpoint.resume", True),
        (["--checkpoint.resume", "auto"], "checkpoint.resume", "auto"),
        (["--checkpoint.resume=auto", "--checkpoint.enable"], "checkpoint.resume", "auto"),
        (["--checkpoint.no-resume"], "checkpoint.resume", False),
        (["--checkpoint.enable", "--grpo.group_size", "4"], "grpo.group_size", 4),
        (["--rollout.urls", "http://a:1,http://b:2"], "rollout.urls", ["http://a:1", "http://b:2"]),
        (["--rollout.urls", "http://a:1", "http://b:2"], "rollout.urls", ["http://a:1", "http://b:2"]),
        (["--rollout.stop_token_ids=1,2"], "rollout.stop_token_ids", [1, 2]),
        (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism.data_parallel_shard_degree", -1),
        (["--lr_scheduler.total_steps", "None"], "lr_scheduler.total_steps", None),
        (["--lr_scheduler.total_steps", "7"], "lr_scheduler.total_steps", 7),
        (["--training.max_norm", "2"], "training.max_norm", 2.0),
        (["--optimizer.lr", "3e-6"], "optimizer.lr", 3e-6),
        (["--data.system_prompt=--be brief"], "data.system_prompt", "--be brief"),
        (["--job.dump_folder", "~/x"], "job.dump_folder", str(Path.home() / "x")),
        (
            ["--weight_sync.transport", "disk", "--weight_sync.disk_folder", "~/x"],
            "weight_sync.disk_folder",
            str(Path.home() / "x"),
        ),
        (["--job.custom_config_module", "torchtitan.grpo.config.job_config"], "grpo.group_size", 8),
        (["--parallelism.pipeline_parallel_degree", "1"], "parallelism.pipeline_parallel_degree", 1),
    ],
)
def test_good_flags(flags, path, value):
    config = load_config([*MODEL, *flags])
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value


def test_an_empty_list_of_urls_can_be_given_over_a_file(tmp_path):
    assert load_toml(tmp_path, "[rollout]\nurls = ['http://a:1']", "--rollout.urls=").rollout.urls == []


def test_defaults_suit_reinforcement_learning():
    config = load_config(MODEL)
    assert config.optimizer.lr == 1e-6
    assert (config.training.steps, config.lr_scheduler.warmup_steps) == (100, 0)
    assert config.metrics.enable_tensorboard
    assert config.training.max_norm == 1.0  # torchtitan's own


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ([], False),  # no answer runs while weights change
        (["enabled"], True),
        (["enabled", "no-in_flight_weight_updates"], False),
        (["enabled", "recompute_kv_cache_after_weight_updates"], False),
    ],
)
def test_old_keys_and_values_are_kept_in_flight_alone(flags, kept):
    assert load_config([*MODEL, *(f"--async_grpo.{flag}" for flag in flags)]).async_grpo.keeps_kv is kept


def test_help_lists_keys_and_ends(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "--grpo.group_size (int, default 8)" in printed and "pipeline_parallel" not in printed


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"torchtitan-grpo {version('torchtitan-grpo')}\n"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "train_configs").glob("*.toml")))
@pytest.mark.parametrize("world_size", ["1", "2"])
def test_example_configurations_load(name, world_size, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = tomllib.loads((ROOT / "train_configs" / name).read_text())
    monkeypatch.setenv("WORLD_SIZE", str(given.get("parallelism", {}).get("ranks", world_size)))
    rollout = given.get("rollout", {})
    starts_servers = rollout.get("replicas", 0) or rollout.get("colocate")  # only a dry run does without their Python
    config = load_config(
        ["--job.config_file", f"train_configs/{name}"],
        dry_run="" if starts_servers else None,
        job="sft" if name.startswith("sft") else "grpo",
    )
    assert config.training.steps == given["training"]["steps"]


# ------------------------------------------------------------------------------------------------- this machine


VLLM = ["--rollout.engine", "vllm", "--rollout.urls", "http://a:1"]


@pytest.mark.parametrize(
    ("flags", "world_size", "gpus", "expected"),
    [
        (["--weight_sync.transport", "nccl"], 1, 0, ("[weight_sync] transport", "needs CUDA")),
        (["--weight_sync.transport", "nccl"], 2, 2, ("[weight_sync] transport", "2 trainer processes take all 2")),
        (
            ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.tensor_parallel_degree", "2"],
            6,
            0,
            ("data_parallel_replicate_degree = 2 x tensor_parallel_degree = 2", "6 processes"),
        ),
        (["--parallelism.data_parallel_replicate_degree", "2"], 2, 0, ()),
        (["--parallelism.data_parallel_replicate_degree", "2"], 4, 0, ()),
        (["--compile.enable"], 1, 0, ("[compile] enable", "needs CUDA")),
        (["--compile.enable"], 1, 2, ()),
        (["--weight_sync.transport", "gloo"], 1, 2, ()),
        ([], 2, 2, ()),
        (["--parallelism.tensor_parallel_degree", "2"], 3, 0, ("tensor_parallel_degree = 2", "3 processes")),
        (["--parallelism.context_parallel_degree", "2"], 3, 0, ("context_parallel_degree = 2", "3 processes")),
        (["--parallelism.context_parallel_degree", "2"], 4, 5, ()),
        (["--parallelism.expert_parallel_degree", "2"], 3, 0, ("expert_parallel_degree = 2", "3 processes")),
        (["--parallelism.data_parallel_shard_degree", "4"], 2, 0, ("data_parallel_shard_degree = 4", "2 processes")),
        (["--grpo.prompts_per_step", "1", "--grpo.group_size", "2"], 4, 0, ("prompts_per_step", "2 answers for 4")),
        (["--comm.init_timeout_seconds", "300"], 2, 0, ("[comm] init_timeout_seconds", "must be over [rollout]")),
        (["--comm.init_timeout_seconds", "300"], 1, 0, ()),
        (["--weight_sync.transport", "nccl", *VLLM], 2, 2, ()),
        (["--weight_sync.transport", "ipc"], 1, 2, ()),
        (["--rollout.colocate"], 1, 1, ()),
        (["--rollout.colocate", "--weight_sync.transport", "ipc"], 1, 1, ()),
        (["--rollout.colocate"], 2, 2, ()),
        (["--rollout.colocate", "--rollout.replicas", "1"], 2, 2, ("this run has 2", "leave replicas out")),
        (["--rollout.colocate"], 4, 2, ("this machine has 2 for 4: start 2",)),
        (["--rollout.colocate", "--rollout.sleep_while_training"], 2, 2, ()),
        (["--weight_sync.transport", "ipc", "--rollout.replicas", "1"], 1, 2, ()),
        (["--weight_sync.transport", "ipc", "--rollout.replicas", "2"], 1, 3, ("ipc", "replicas = 2 puts them")),
        (["--parallelism.tensor_parallel_degree", "2"], 4, 5, ()),
    ],
)
def test_machine(flags, world_size, gpus, expected, monkeypatch):
    # load_config must accept it on a machine with these processes and GPUs
    monkeypatch.setattr("torchtitan.grpo.config.load.check_machine", lambda *_, **__: [])
    messages = check_machine(load_config([*MODEL, *flags], world_size=world_size), world_size, gpus)
    assert len(messages) == bool(expected), messages
    for part in expected:
        assert part in messages[0]


@pytest.mark.parametrize(
    ("flags", "hard", "said"),
    [
        ([], 1024, None),
        ([], 700, "max_concurrent_requests = 256 on 1 server may need 768 open files, and this machine allows 700"),
        ([*VLLM[:-1], "http://a:1,http://b:1"], 1024, None),
        ([*VLLM[:-1], "http://a:1,http://b:1"], 1023, "on 2 servers may need 1024 .*ulimit -Hn"),
        (["--rollout.max_concurrent_requests", "1000000"], resource.RLIM_INFINITY, None),
    ],
)
def test_open_files(flags, hard, said, monkeypatch):
    monkeypatch.setattr("torchtitan.grpo.config.machine.resource.getrlimit", lambda _: (256, hard))
    if said is None:
        load_config([*MODEL, *flags])
        return
    with pytest.raises(UserError, match=said):
        load_config([*MODEL, *flags])


def test_servers_of_a_file_are_counted(tmp_path, monkeypatch):
    (tmp_path / "urls").write_text("# two\nhttp://a:1\nhttp://b:1\n")
    monkeypatch.setattr("torchtitan.grpo.config.machine.resource.getrlimit", lambda _: (256, 1000))
    with pytest.raises(UserError, match="on 2 servers"):
        load_config([*MODEL, "--rollout.engine", "vllm", "--rollout.urls_file", str(tmp_path / "urls")])


def test_the_limit_of_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("gpu", "variable", "threads"), [(True, None, 1), (True, "3", 3), (False, None, 3)])
def test_with_a_gpu_the_cpu_computes_in_one_thread(gpu, variable, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        one_cpu_thread()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_without_a_launcher_the_run_is_one_process(monkeypatch):
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in launched})
        default_to_one_process()
        _, rank, ranks = next(dist.rendezvous("env://"))
        assert (rank, ranks) == (0, 1)
        patch.setattr(os, "environ", {"WORLD_SIZE": "4"})  # a launcher's: nothing is added
        default_to_one_process()
        assert os.environ == {"WORLD_SIZE": "4"}


def test_world_size_is_torchruns(monkeypatch):
    flags = [*MODEL, "--parallelism.tensor_parallel_degree", "2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config(flags).parallelism.tensor_parallel_degree == 2
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="this run has 1 process;"):
        load_config(flags)


def test_api_key_variable(monkeypatch):
    flags = [*MODEL, "--rollout.api_key_env", "TEST_CONFIG_KEY"]
    monkeypatch.delenv("TEST_CONFIG_KEY", raising=False)
    with pytest.raises(UserError, match=r'\[rollout\] api_key_env = "TEST_CONFIG_KEY".*is not set'):
        load_config(flags)
    monkeypatch.setenv("TEST_CONFIG_KEY", "secret")
    assert load_config(flags).rollout.api_key_env == "TEST_CONFIG_KEY"
    for key in ("secret\n", "schlüssel"):
        monkeypatch.setenv("TEST_CONFIG_KEY", key)
        with pytest.raises(UserError, match=r'api_key_env = "TEST_CONFIG_KEY".* what no HTTP header can') as refused:
            load_config(flags)
        assert key.strip() not in str(refused.value)


OWN_VLLM = ["--rollout.replicas", "1", "--rollout.engine", "vllm"]
ARGS = "--rollout.environment_args"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rollout.api_key_env", "sk-1f2e"], "api_key_env"),
        (["--distill.teacher_urls", "http://a:1", "--distill.api_key_env", "sk-1f2e"], "api_key_env"),
        (["--distill.teacher_urls", "http://u:sk-1f2e@host:1"], r"\[distill\] api_key_env"),
        (["--rollout.urls", "http://u:sk-1f2e@host:1"], "api_key_env"),
        (["--rollout.urls", "http://u:sk-1f2e@host:99999"], "Port out of range"),
        ([*OWN_VLLM, "--rollout.server_flags=--api_key=sk-1f2e"], r'"--api_key": .* \[rollout\] api_key_env'),
        ([*OWN_VLLM, "--rollout.server_flags=--hf-token,hf_1f2e"], r'"--hf-token", which ps .* HF_TOKEN'),
        ([*OWN_VLLM, "--rollout.server_flags=--ssl-keyfile-password=1f2e"], '"--ssl-keyfile-password"'),
        (["--rollout.environment", "a:b", ARGS, '{"password": "1f2e"}'], r'\[rollout\] .* "password", which files'),
        (["--rollout.environment", "a:b", ARGS, '{"judges": [{"openai_api_key": "sk-1f2e"}]}'], '"openai_api_key"'),
    ],
)
def test_a_key_in_the_wrong_place_is_not_shown(flags, says):
    with pytest.raises(UserError, match=says) as caught:
        load_config([*MODEL, *flags])
    assert "1f2e" not in str(caught.value)


def test_what_only_looks_like_a_key_is_none():
    flags = "--rollout.server_flags=--max-num-batched-tokens,8192,--hf-token,--ssl-keyfile,key.pem"
    args = '{"api_key_env": "JUDGE", "api_key": "EMPTY", "answer_key": "gold", "end_token": "</s>", "max_tokens": 9,'
    args += (
        ' "secret": "banana", "judges": [{"api_key": "none"}, {"api_key": "JUDGE_2_KEY"}, {"api_key": "${S3_KEY}"}]}'
    )
    config = load_config([*MODEL, *OWN_VLLM, flags, "--rollout.environment", "a:b", ARGS, args])
    assert len(config.rollout.environment_args) == 7


# ------------------------------------------------------------------------------------------------- tables and texts


def test_tables_name_real_keys():
    assert set(data_contradictions.BUILT_IN) == set(functions.BUILT_IN)
    assert set(UNSUPPORTED.values()) <= {unsupported_by(path) for path in keys()}
    assert (
        unsupported_by("compile.backend") and not unsupported_by("compile.enable") and not unsupported_by("compile.x")
    )


def test_every_number_has_a_range_and_every_key_a_text():
    numbers = [key for key in honoured_keys() if key.type in (int, float)]
    assert len(numbers) > 50
    without = [key.path for key in numbers if key.range is None]
    assert without == ["parallelism.data_parallel_shard_degree"]  # -1, or 1 and more: not an interval
    assert [key.path for key in honoured_keys() if not key.doc] == []
    own = {f"{s.name}.{key.name}" for s in fields(job_config.JobConfig) for key in fields(s.type)}
    assert {key.path for key in honoured_keys()} == own | TORCHTITAN_TEXTS.keys()
    assert not own & TORCHTITAN_TEXTS.keys()


def test_torchtitans_own_parser_reads_annotated_keys():
    flags = ["--job.custom_config_module", job_config.__name__, "--grpo.group_size", "4", "--optimizer.beta1", "0.8"]
    config = ConfigManager().parse_args([*MODEL, *flags])
    assert (config.grpo.group_size, config.optimizer.beta1, config.lr_scheduler.total_steps) == (4, 0.8, None)


def test_defaults_pass_their_own_checks():
    assert check_ranges(load_config(MODEL)) == []


def test_generated_pages_are_current():
    script = ROOT / "scripts" / "make_config_docs.py"
    assert runpy.run_path(str(script))["main"](["--check"]) == 0


def test_dry_run_is_a_file_of_the_same_run(tmp_path):
    flags = [
        "--grpo.group_size",
        "4",
        "--reward.answer_pattern",
        'a"\x7f\\s(\\d+)',
        "--training.seq_len",
        "512",
        "--data.max_prompt_tokens",
        "128",
        "--rollout.max_answer_tokens",
        "128",
        "--rollout.urls",
        "http://a:1,http://b:2",
    ]
    config = load_config([*MODEL, *flags])
    for full in (False, True):
        text = describe(config, world_size=2, full=full)
        again = load_toml(tmp_path, text)
        config.job.config_file = again.job.config_file
        config.parallelism.data_parallel_replicate_degree = int(full)  # what 0 is here
        assert again.to_dict() == config.to_dict()
        assert "group_size = 4  # default 8" in text
        assert ("prompts_per_step" in text) == ("[sft]" in text) == full, "keys with their defaults"
    assert "# \n" not in text
    assert "32 prompts x 4 = 128" in text
    assert "128 x (128 + 128) = 32,768" in text
    # 128 answers of 256 tokens on 2 ranks, 2 in a row of 512
    assert "32 for each rank and optimizer step" in text


def test_the_file_of_a_flag_in_latin_1_is_toml():
    text = "\n".join(toml_lines(load_config([*MODEL, "--job.description", os.fsdecode(b"caf\xe9")])))
    assert tomllib.loads(text)["job"]["description"] == r"caf\udce9"


def test_a_file_says_how_many_ranks_it_is_for(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    six = [*MODEL, "--parallelism.ranks", "6", "--training.seq_len", "512"]
    six += ["--data.max_prompt_tokens", "64", "--rollout.max_answer_tokens", "64"]
    assert "on 6 data-parallel ranks" in describe(load_config(six, dry_run=""))
    assert load_config(six, world_size=6) and load_config(six, world_size=0), "servers alone"
    for world_size, said in (("8", "8 processes"), (None, "1 process")):
        if world_size:
            monkeypatch.setenv("WORLD_SIZE", world_size)
        else:
            monkeypatch.delenv("WORLD_SIZE")
        with pytest.raises(UserError, match=rf"ranks = 6, but this run has {said}: start 6 \(by torchrun's") as refused:
            load_config(six, dry_run="" if world_size else None)
        assert str(refused.value).endswith(f"by --parallelism.ranks {world_size or 1}")


def test_a_port_in_use_is_refused_and_no_key_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"\[rollout\] serve_port = {port}: 127.0.0.1:{port} cannot be opened"):
            load_toml(tmp_path, f"[rollout]\nserve_port = {port}")
    load_toml(tmp_path, f"[rollout]\nserve_port = {port}\nserve_host = '0.0.0.0'\nserve_key_env = 'A_KEY'")
    with pytest.raises(UserError, match="serve_key_env is not a variable's name") as caught:
        load_toml(tmp_path, f"[rollout]\nserve_port = {port}\nserve_key_env = 'sk-secret'")
    assert "sk-secret" not in str(caught.value)


def test_a_configuration_is_frozen_and_a_copy_has_other_values():
    config = load_config(["--model.hf_assets_path", "x"])
    open_copy = changed(config, {"grpo.group_size": 4})
    open_copy.grpo.minibatches = 2
    assert (config.grpo.group_size, config.grpo.minibatches) == (8, 1)
    freeze(config)
    for section, name in ((config.grpo, "group_size"), (config.training, "steps"), (config.job, "dump_folder")):
        with pytest.raises(FrozenInstanceError, match=f"the run has started: {name} of"):
            setattr(section, name, getattr(section, name))
    with pytest.raises(FrozenInstanceError):
        config.grpo = Grpo()
    copy = changed(config, {"grpo": Grpo(group_size=4), "training.steps": 7})
    assert (copy.grpo.group_size, copy.training.steps, copy.training.seq_len) == (4, 7, config.training.seq_len)
    assert (config.grpo.group_size, config.training.steps) == (8, 100)
    with pytest.raises(FrozenInstanceError):
        copy.training.steps = 8
    assert pickle.loads(pickle.dumps(config.rollout)) == config.rollout
    JobConfig().training.steps = 8  # others of its classes are as before


def test_a_colocated_run_of_more_ranks_is_read_by_fewer(tmp_path):
    config = load_config([*MODEL, "--rollout.colocate"], world_size=2)
    (tmp_path / "config.toml").write_text("\n".join(toml_lines(config)))
    alone = load_config(["--job.config_file", str(tmp_path / "config.toml")], world_size=1)
    assert (config.rollout.replicas, alone.rollout.replicas) == (2, 1)


def test_a_list_as_the_file_writes_it_is_no_text():
    def stop(text: str) -> list[str]:
        return load_config([*MODEL, "--rollout.stop", text]).rollout.stop

    for written in ('["</a>", "x, y"]', """[ '</a>', "x, y" ]"""):
        assert stop(written) == ["</a>", "x, y"]
    assert stop(r'["\ud83d\ude00", "x, y"]') == ["\U0001f600", "x, y"], "TOML has no pairs of escapes"
    assert stop("[a],</b>") == ["[a]", "</b>"] and stop("[" * 5000) == ["[" * 5000]
    assert load_config([*MODEL, "--rollout.stop_token_ids", "[1, 2]"]).rollout.stop_token_ids == [1, 2]
