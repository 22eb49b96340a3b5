"""The two jobs, and which keys each reads. One TOML file may serve both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.job_config import Data, Reward
from torchtitan.grpo.config.keys import TABLES, keys, label, show
from torchtitan.grpo.errors import UserError

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

Job = Literal["grpo", "sft"]
"""`grpo_train.py`, or supervised fine-tuning by `sft_train.py`."""

UNREAD: dict[Job, tuple[str, ...]] = {
    "grpo": ("data.messages_column", "data.tools_column", "sft.train_on"),
    "sft": (
        "grpo",
        "async_grpo",
        "rollout",
        "weight_sync",
        "reward",
        "distill",
        "offload.offload_optimizer_states_for_logprob",
        "offload.reference_weights",
        "data.answer_pattern",
        "data.curriculum",
        "data.max_prompt_tokens",
        "data.reward_column",
        "metrics.samples_per_step",
        "ray.expose_servers",
        "validation.samples_per_prompt",
        "validation.temperature",
        "validation.top_p",
    ),
}
"""Sections and keys without effect. They may be set, since the other job reads them."""

_OF_TABLES: dict[Job, tuple[str, ...]] = {
    "grpo": (),
    "sft": (
        "functions",
        "samples_per_prompt",
        "temperature",
        "top_p",
        "max_answer_tokens",
        "environment",
        "environment_args",
    ),
}
"""The same for keys that only tables have."""


def without_unread(given: dict[str, Any], job: Job) -> tuple[dict[str, Any], list[str]]:
    """What the job reads of the checked keys by path, and the other sections and keys, unless they have defaults."""
    names = {*_OF_TABLES[job], *(path.removeprefix("data.") for path in UNREAD[job] if path.startswith("data."))}
    left_out = {covering(path, UNREAD[job]) for path, value in given.items() if value != keys()[path].default}
    kept = {path: value for path, value in given.items() if not covering(path, UNREAD[job])}
    for path in TABLES:
        if path in kept:
            kept[path] = [{k: v for k, v in table.items() if k not in names} for table in kept[path]]
    return kept, [f"[{each}]" if each not in keys() else label(each) for each in UNREAD[job] if each in left_out]


def check_job(given: dict[str, Any], job: Job) -> list[str]:
    """Keys of the warm start that a user may take for those of the SFT job, and a default made for other runs."""
    if job == "grpo":
        if given.get("lora.enable") and "optimizer.lr" not in given:
            return [
                f"[optimizer] lr is missing: its default of {keys()['optimizer.lr'].default:g} is made for GRPO of a "
                "whole model; for [lora] 1e-5 to 1e-4 is usual"
            ]
        return []
    messages = []
    if given.get("sft.steps"):
        messages.append(
            f"[sft] steps = {show(given['sft.steps'])} is the length of GRPO's warm start: set [training] steps for "
            "this job, and leave it out (or --sft.steps 0)"
        )
    if given.get("sft.lr", keys()["sft.lr"].default) != keys()["sft.lr"].default:
        messages.append(
            f"[sft] lr = {show(given['sft.lr'])} is the learning rate of GRPO's warm start: set [optimizer] lr for "
            f"this job, and leave it out (or --sft.lr {keys()['sft.lr'].default:g})"
        )
    if "optimizer.lr" not in given:
        usual = "[lora] 2e-4" if given.get("lora.enable") else "SFT of a whole model 1e-5"
        messages.append(
            f"[optimizer] lr is missing: its default of {keys()['optimizer.lr'].default:g} is made for GRPO; for "
            f"{usual} is usual"
        )
    return messages


def of_replay(config: JobConfig, run: Path, out: Path | None, after: int) -> JobConfig:
    """What `torchtitan-grpo replay` makes of a run's configuration: what it does not need is not loaded.

    The record may be on another machine than the data and the reward. The run's checkpoints are read and not written.

    Args:
        run: The folder of the recorded run.
        out: Where metrics and samples go. None: the folder `replay` in the run's, in place of an earlier replay's.
        after: The run's checkpoint to start from. 0: as a new run.
    """
    values: dict[str, Any] = {
        "job.dump_folder": str(out or run / "replay"),
        "checkpoint.enable": after > 0,
        "checkpoint.resume": True if after else "auto" if out is None else False,
        "checkpoint.load_step": after or -1,
        "lr_scheduler.total_steps": config.lr_scheduler.total_steps or config.training.steps,
        "parallelism.ranks": 0,
        "rollout.environment": "",
        "rollout.record_gib": 0.0,
        "reward": Reward(workers=1),
        # The rows of a set's own environment must be known, as they are not trained on.
        "validation.sets": [
            each if each.data.source == "environment" else replace(each, environment="")
            for each in config.validation.sets
        ],
    }
    if after:  # else the run's checkpoints are nothing to it
        values["checkpoint.folder"] = str((run / config.checkpoint.folder).absolute())
    if after or not config.sft.steps:  # else the warm start reads the data, less the held-out rows
        values |= {"data": Data(chat_template=False, source_args={"size": 1}), "validation.enable": False}
    return changed(config, values)


def job_of(state: dict[str, Any]) -> Job:
    """Whose trainer saved this state. That of an SFT job has "conversations"."""
    return "sft" if "conversations" in state else "grpo"


def check_same_job(state: dict[str, Any], job: Job) -> None:
    """Refuse to resume from a checkpoint of the other job.

    Args:
        state: What the trainer saved.

    Raises:
        UserError: It is of the other job.
    """
    saved_by = job_of(state)
    if saved_by != job:
        raise UserError(
            f"the checkpoint is of {saved_by}_train.py: start in another [job] dump_folder, with the checkpoint's "
            "folder hf as [model] hf_assets_path"
        )


def covering(path: str, entries: Iterable[str]) -> str:
    """Which of these sections and keys is or holds the key of this path; "" if none."""
    return next((entry for entry in entries if path == entry or path.startswith(f"{entry}.")), "")
