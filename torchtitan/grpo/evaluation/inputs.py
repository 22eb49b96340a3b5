"""By which configuration a model is evaluated, and that it has not trained on what is asked."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.checkpoint.run_config import RUN_CONFIG, read_run_config
from torchtitan.grpo.checkpoint.trainer_state import TRAINER_STATE
from torchtitan.grpo.config.contradictions import check_contradictions
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.hub import fetched
from torchtitan.grpo.config.job_config import NO_ENVIRONMENT
from torchtitan.grpo.config.jobs import job_of
from torchtitan.grpo.config.load import CONFIG_FILE, load_config
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.config.tables import check_lengths, fill_tables, held_out_set, held_out_sets
from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.rows import row_keys
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.hf_config import read_json, served_positions

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)

OF_THE_RUN = (
    "grpo",
    "async_grpo",
    "sft",
    "distill",
    "offload",
    "lora",
    "optimizer",
    "lr_scheduler",
    "parallelism",
    "compile",
    "activation_checkpoint",
    "checkpoint",
    "ray",
    "metrics.enable_wandb",
    "metrics.prometheus_port",
    "training.tokens_per_microbatch",
    "weight_sync.transport",
    "weight_sync.disk_folder",
    "weight_sync.async_weight_update",
    "rollout.min_servers",
    "rollout.urls_file",
    "rollout.colocate",
    "rollout.sleep_while_training",
    "rollout.memory_share",
    "rollout.gpus_per_server",
    "rollout.quantization",
    "rollout.server_flags",
)
"""Sections and keys about a run's steps, processes and servers. Those of its file do not count here, those of the
command line do."""
_OF_THE_ENDPOINT = ("rollout.serve_port", "rollout.serve_host", "rollout.serve_key_env")
_BY_ARGUMENTS = {"model.hf_assets_path": "MODEL", "rollout.engine": "--engine", "rollout.urls": "--url"}
"""Keys that arguments of the command say."""


def checkpoint_of(folder: Path) -> Path | None:
    """The run's checkpoint that this Hugging Face folder is a part of."""
    step = folder.resolve().parent
    return step if (step / RUN_CONFIG).is_file() else None


def _is_supervised(step: Path) -> bool:
    """Whether this checkpoint is of `sft_train.py`."""
    path = step / TRAINER_STATE
    return path.is_file() and job_of(json.loads(path.read_text(encoding="utf-8"))) == "sft"


def evaluation_config(
    flags: list[str],
    folder: Path,
    engine: str,
    urls: list[str],
    server_flags: str = "",
    jsonl: list[Path] | None = None,
) -> JobConfig:
    """A run's configuration with this model and these servers, and without what only a trainer needs.

    Args:
        flags: The trainer's. Without `--job.config_file` a checkpoint's own configuration is the default.
        folder: The model's.
        engine: Of the servers.
        urls: Of servers that run already. Without any, `[rollout] replicas` is 1 unless a flag says otherwise.
        server_flags: `[rollout] server_flags` as a shell would read them.
        jsonl: Files whose rows are asked instead of the configured sets.

    Raises:
        UserError: It is wrong, is too long for the model, or the run trains on the rows that would be evaluated.
    """
    given = {"model.hf_assets_path": str(folder), "rollout.engine": engine, "rollout.urls": ",".join(urls)}
    named = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    of_servers = {"rollout.replicas": "0" if urls else "1"}
    for flag in sorted(named & {"check", "dry_run"}):
        raise UserError(f"torchtitan-grpo evaluate has no --{flag}: for a short evaluation, lower --validation.prompts")
    for key in sorted(named & _BY_ARGUMENTS.keys()):
        raise UserError(f"torchtitan-grpo evaluate has no --{key}: give {_BY_ARGUMENTS[key]}")
    step = checkpoint_of(folder)
    if step is not None and CONFIG_FILE not in named and _is_supervised(step):
        raise UserError(
            f"{step} is of sft_train.py, whose configuration names no prompts, lengths and rewards for answers: give "
            "one by --job.config_file"
        )
    run = read_run_config(step) if step else {}
    beside: dict[str, str] = {}
    if step is not None:  # its results are not for the folder of another run, which the TOML file may name
        among_others = Path(run.get("checkpoint.folder", "checkpoint"))  # in the run's folder, if it is relative
        beside["job.dump_folder"] = str(step.parent).removesuffix(f"/{among_others}")
        if CONFIG_FILE not in named:
            logger.info(f"The configuration is that of {step / RUN_CONFIG}")
    given |= {key: value for key, value in (of_servers | beside).items() if key not in named}
    words = [*(f"--{key}={value}" for key, value in given.items()), *flags]
    defaults = {} if CONFIG_FILE in named else run
    config = load_config(words, world_size=0, defaults=defaults, flags_only=partial(_of_the_run, own_servers=not urls))
    if jsonl:
        config.validation.sets = [
            held_out_set(config, {"name": name, "source": "jsonl", "path": str(path), "prompts": 2**20})
            for name, path in zip(_names(jsonl), jsonl, strict=True)
        ]
    if server_flags:
        try:
            config.rollout.server_flags = shlex.split(server_flags)
        except ValueError as error:
            raise UserError(f"--server-flags {server_flags}: a shell cannot read this ({error})") from error
        if any(word.partition("=")[0] == "--gpu" for word in config.rollout.server_flags):
            raise UserError(
                "--server-flags has --gpu: choose GPUs by CUDA_VISIBLE_DEVICES, and how many a server has by "
                "--rollout.gpus_per_server"
            )
    if problems := check_contradictions(config):
        raise UserError("\n  - ".join(["the configuration does not fit --jsonl or --server-flags:", *problems]))
    trained_on = [
        each
        for each in held_out_sets(config)
        if not (each.own_rows or each.data.validation_path or each.data.validation_split)
    ]
    if trained_on and not config.validation.enable:
        raise UserError(
            "[validation] enable = false: such a run holds no rows of its training data out, so it has trained on "
            "those that would be asked. Name others by --jsonl, [[validation.sets]] or [data] validation_split; add "
            "--validation.enable if this model was not trained on them"
        )
    config.validation.enable = True
    raw = read_json(folder / "config.json")
    check_lengths(config, served_positions(raw, raw.get("max_position_embeddings") or 0))
    return config


def _of_the_run(given: Mapping[str, Any], own_servers: bool) -> Iterator[str]:
    """OF_THE_RUN, its servers' key if others are started, and its endpoint unless an environment may need it."""
    yield from OF_THE_RUN
    if own_servers:
        yield "rollout.api_key_env"
    of_sets = [table.get("environment", NO_ENVIRONMENT) for table in given.get("validation.sets", [])]
    if not given.get("rollout.environment") and set(of_sets) <= {NO_ENVIRONMENT}:
        yield from _OF_THE_ENDPOINT


def _names(paths: list[Path]) -> list[str]:
    """Of sets, by their files. Those that would have the same name get their numbers, and all do where one of those
    names is another file's."""
    names = [re.sub(r"[^\w.-]", "_", path.stem, flags=re.ASCII) for path in paths]
    own = [f"{name}-{i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]
    return own if len({*own}) == len(own) else [f"{name}-{i}" for i, name in enumerate(names, start=1)]


def check_not_trained_on(
    config: JobConfig, sets: list[HeldOut], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Hold what would be asked against what a checkpoint's own run trained on.

    A run holds the last `[validation] prompts` rows out. Another number or size asks rows that it has trained on. Sets
    with rows of their own may be anything.

    Raises:
        UserError: A set of held-out rows asks what the run trained on.
    """
    step = checkpoint_of(folder)
    if step is None:
        return
    own = {path: value for path, value in read_run_config(step).items() if path.startswith(("data.", "validation."))}
    tables = zip(sets, held_out_sets(config), strict=True)
    asks = [(each, table.data.prompt_column) for each, table in tables if not table.own_rows]
    now = resolved(config)
    if not asks or all(now[path] == value for path, value in own.items() if path in now):
        return
    run = changed(config, {path: value for path, value in own.items() if path in now})
    try:
        fill_tables(run)
        run = fetched(run)
        with loaded_environments(run) as environments:
            rows = environments.rows
            held_out = load_held_out(run, tokenizer, rows=rows) if run.validation.enable else []
            known = load_training(run, tokenizer, held_out, rows=rows).keys()
    except UserError as error:
        logger.warning(f"Not checked whether this checkpoint's run trained on what is asked: {error}")
        return
    for each, column in asks:
        repeated = sum(not known.isdisjoint(row_keys(prompt.columns, column)) for prompt in each.prompts)
        if repeated:
            name = f" of set {each.name!r}" if each.name else ""
            raise UserError(
                f"{repeated} of the {len(each.prompts)} held-out prompts{name} are some that this checkpoint's run "
                f"trained on: it held out [validation] prompts = {run.validation.prompts}"
                f"{'' if run.validation.enable else ', and enable = false'}. Restore the [data] and [validation] keys "
                f"of {step / RUN_CONFIG}, or name other rows by --jsonl or [[validation.sets]]"
            )
