"""The files of an evaluation, and its table."""

from __future__ import annotations

import contextlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.resolved import FILE as CONFIG
from torchtitan.grpo.config.resolved import write_config
from torchtitan.grpo.data.held_out import HeldOutAnswers
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.estimates import estimates, final_answer, is_right
from torchtitan.grpo.reporting.sample_log import answer_record

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

ANSWERS, RESULT = "answers.jsonl", "result.json"
_PACKAGES = ("torchtitan-grpo", "torchtitan", "torch", "transformers", "math-verify", "reasoning-gym")


def new_folder(wanted: Path) -> Path:
    """`wanted`, or with the first number that is free: results are never overwritten."""
    beside = wanted if wanted.name.strip(".") else wanted.resolve()  # of `.`, too
    for number in range(1, 10**6):
        folder = wanted if number == 1 else Path(f"{beside}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"results cannot be written to {folder} ({error.strerror}): give an --out") from error
        return folder
    raise UserError(f"{wanted}: too many results with this name: give another --out")


def remove_if_empty(folder: Path) -> None:
    """Of an evaluation that was refused: the next one gets its name."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_answers(folder: Path, answers: HeldOutAnswers, config: JobConfig) -> None:
    """Append the answers to one set to ANSWERS, so that they outlive a server that dies later."""
    with (folder / ANSWERS).open("a", encoding="utf-8", errors="backslashreplace") as file:
        for kind, groups in (("greedy", answers.greedy), ("sampled", answers.sampled)):
            for sample in (sample for group in groups for sample in group):
                found = {"final_answer": final_answer(sample, config.reward), "right": is_right(sample, config.reward)}
                record = {"set": answers.held_out.name, "kind": kind} | answer_record(sample) | found
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_result(
    folder: Path, answers: list[HeldOutAnswers], config: JobConfig, about: dict[str, Any]
) -> dict[str, Any]:
    """Write CONFIG, and then RESULT, whole or not at all.

    Args:
        about: What else RESULT says: which model, which servers, when.

    Returns:
        The content of RESULT.
    """
    result = about | {
        "sets": {each.held_out.name or "held-out": _of_set(each, config) for each in answers},
        "answers": ANSWERS,
        "versions": _versions(),
        "config": CONFIG,
    }
    write_config(config, folder)
    unfinished = folder / f"{RESULT}.tmp"
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    unfinished.rename(folder / RESULT)
    return result


def table(result: dict[str, Any]) -> str:
    """Each metric of each set, for the terminal."""
    rows = [("set", "prompts", "metric", "mean", "standard error")]
    for name, of_set in result["sets"].items():
        for metric, estimate in of_set["metrics"].items():
            error = estimate["standard_error"]
            error = "-" if error is None else f"{error:.4f}"
            rows.append((name, str(of_set["prompts"]), metric, f"{estimate['mean']:.4f}", error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if i in (1, 3, 4) else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _of_set(answers: HeldOutAnswers, config: JobConfig) -> dict[str, Any]:
    """How a set was asked, and each metric's mean and standard error."""
    held_out = answers.held_out
    samples = [sample for group in answers.groups for sample in group]
    return {
        "prompts": len(held_out.prompts),
        "samples_per_prompt": held_out.samples,
        "temperature": held_out.temperature,
        "top_p": held_out.top_p,
        "max_answer_tokens": held_out.max_answer_tokens,
        "truncated_answers": sum(sample.finish_reason == "length" for sample in samples),
        "failed_scores": sum(len(sample.reward_failures) for sample in samples),
        "metrics": {name: estimate._asdict() for name, estimate in estimates(answers, config.reward).items()},
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
