"""Keys of earlier versions: what a user writes today in their place, and what they are in a checkpoint of that time."""

import json
from typing import Any

from torchtitan.grpo.config.keys import TABLES
from torchtitan.grpo.sources.table import SOURCES

_MIN_P = "use [validation] top_p, or one of the set's own; [rollout] min_p is for training too"
GONE = {
    "checkpoint.export_hf": 'for no export write [checkpoint] export_dtype = "none"; else leave it out',
    "data.arithmetic_max": "write [data] source_args = { max = 39 }",
    "data.arithmetic_operators": 'write [data] source_args = { operators = ["+"] }',
    "data.arithmetic_question": 'write [data] source_args = { question = "{left}{operator}{right}=" }',
    "data.overlong_prompts": "longer prompts are left out, and the log names the first; leave it out",
    "data.size": "write [data] source_args = { size = 500 }",
    "data.tasks": 'write [data] source_args = { tasks = ["chain_sum"] }',
    "distill.timeout_seconds": "[rollout] request_timeout_seconds is the limit",
    "grpo.clip_old_tokens": "asynchronous runs always clip them, since all learned better so; leave it out",
    "grpo.replace_limit": "a step asks for four times [grpo] prompts_per_step groups at most; leave it out",
    "lora.dropout": "it had to be 0; leave it out",
    "metrics.validation_samples": "every held-out answer is written; leave it out",
    "metrics.wandb_group": "set the environment variable WANDB_RUN_GROUP",
    "metrics.wandb_name": "set the environment variable WANDB_NAME",
    "ray.start_timeout_seconds": "[rollout] start_timeout_seconds is the limit",
    "ray.step_timeout_seconds": "[debug] hang_seconds is the limit",
    "ray.warmup_tokens": "ranks are warmed up by their longest row; leave it out",
    "rollout.embedded_device": "the server is on a GPU if the trainer is: for another device start one by hand (python "
    "-m torchtitan.grpo.engines.embedded --device cpu), and name its address in [rollout] urls",
    "rollout.embedded_dtype": 'it is a flag of the server, as in [rollout] server_flags = ["--dtype", "float32"]',
    "rollout.embedded_max_sequences": "it is a flag of the server, as in [rollout] server_flags = "
    '["--max-sequences", "1024"]',
    "rollout.episode_lease_seconds": "a quarter of [rollout] group_timeout_seconds is the limit",
    "rollout.server_python": "set the environment variable VLLM_PYTHON or SGLANG_PYTHON",
    "training.share_prompts": "a row has a group's prompt once, which no result shows; leave it out",
    "validation.min_p": _MIN_P,
    "validation.sets.min_p": _MIN_P,
    "weight_sync.bucket_mib_max": "set [weight_sync] buffer_memory_ratio: two buckets share it, of a GiB each at most",
    "weight_sync.cadence": "leave it out: each version is sent, or the newest that is waiting",
    "weight_sync.num_snapshots": "leave it out: there are two with async_weight_update, and one without",
    "weight_sync.num_buffers": "leave it out: two buckets are in flight",
    "weight_sync.verify": "every bucket has a checksum; leave it out",
}
"""Keys of earlier versions, and what to do instead."""
_ARGUMENTS = {
    "size": "size",
    "tasks": "tasks",
    "arithmetic_max": "max",
    "arithmetic_operators": "operators",
    "arithmetic_question": "question",
}
"""Keys of [data] in earlier versions, and their names in `[data] source_args`."""


def as_today(run: dict[str, Any]) -> dict[str, Any]:
    """What an earlier version saved of its configuration, by path, with the values of today's keys."""
    tables = [(path, table) for path in TABLES for table in run.get(path, [])]
    for values, key in [(run, "data.chat_template_kwargs"), *((table, "chat_template_kwargs") for _, table in tables)]:
        if isinstance(words := values.get(key), list):  # as in ["enable_thinking=false"]
            values[key] = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    if "data.size" not in run:
        return run
    data = {name: run.pop(key) for name in _ARGUMENTS if (key := f"data.{name}") in run}
    data["source"] = run["data.source"]
    run["data.source_args"] = _arguments(data)
    of_source: dict[str, dict[str, Any]] = {}  # of the mixture, whose tables come first
    for path, table in tables:
        base = of_source.get(table["name"], data)
        other = table.get("source", base["source"]) != base["source"]
        own = {name: table.pop(name) for name in _ARGUMENTS if name in table}
        rows = base | ({"tasks": []} if other else {}) | own | {"source": table.get("source", base["source"])}
        if own or other:
            table["source_args"] = _arguments(rows)
        if path == "data.mixture":
            of_source[table["name"]] = rows
    return run


def _arguments(data: dict[str, Any]) -> dict[str, Any]:
    """`[data] source_args` for keys of an earlier version, without those that have the source's defaults."""
    known = SOURCES[data["source"]].arguments
    named = {name: data[old] for old, name in _ARGUMENTS.items() if name in known and old in data}
    return {name: value for name, value in named.items() if value != known[name].default}
