"""Print a run's samples: prompt, answer, reward and advantage, in colour on a terminal."""

import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.grpo.errors import UserError, written_out
from torchtitan.grpo.reporting.step_lines import read_lines

BOLD, DIM, RED, GREEN, CYAN = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[36m"


def read_samples(path: Path, validation: bool) -> list[dict[str, Any]]:
    """All samples of a run folder or file, oldest first. An unfinished last line is left out."""
    name = "validation_samples.jsonl" if validation else "samples.jsonl"
    path = path if path.is_file() else path / name
    if not path.exists():
        key = "[validation] enable is on" if validation else "[metrics] samples_per_step is over 0"
        raise UserError(f"{path} does not exist; a run writes it if {key}")
    samples = read_lines(path)
    if not samples or not all({"step", "prompt_index", "reward", "answer"} <= sample.keys() for sample in samples):
        raise UserError(f"{path} holds no samples of a run, or none yet: name its folder, or a samples.jsonl in it")
    return samples


def chosen(samples: list[dict[str, Any]], arguments: Namespace) -> list[dict[str, Any]]:
    step = arguments.step
    if step is not None and step < 0:
        steps = sorted({sample["step"] for sample in samples})
        step = steps[step] if -step <= len(steps) else None
        samples = samples if step is not None else []
    kept = [
        sample
        for sample in samples
        if (step is None or sample["step"] == step)
        and _within(sample["reward"], arguments.min_reward, arguments.max_reward)
    ]
    return kept[-arguments.limit :] if arguments.limit > 0 else kept


def _within(reward: float | None, least: float | None, most: float | None) -> bool:
    """An answer without a reward, on which a reward function failed, passes only without bounds."""
    if reward is None:
        return least is None and most is None
    return (least is None or reward >= least) and (most is None or reward <= most)


def marked(answer: str, given: list[list[int]]) -> str:
    """The answer with «» around what the environment wrote. White space at the end of it stays outside."""
    for first, end in reversed(given):
        text = answer[first:end].rstrip()
        answer = f"{answer[:first]}«{text}»{answer[first + len(text) :]}"
    return answer


def lines_of(sample: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A sample as (colour, line)."""
    by_function = ", ".join(f"{name} {value:g}" for name, value in sample["rewards"].items())
    versions = "-".join(str(version) for version in dict.fromkeys(sample["versions"]))
    reward = "none" if sample["reward"] is None else f"{sample['reward']:g}"
    how = sample["kind"] if "kind" in sample else f"advantage {sample['advantage']:+.3f}"
    head = (
        f"step {sample['step']}  prompt {sample['prompt_index']}  reward {reward} ({by_function})  "
        f"{how}  {sample['answer_tokens']} tokens, {sample['finish_reason']}  "
        f"weights {versions}"
    )
    sign = sample.get("advantage", 0)
    yield BOLD + (GREEN if sign > 0 else RED if sign < 0 else ""), head
    for name, why in sample["reward_failures"].items():
        yield RED, f"  {name} {why}"
    texts = sample | {"answer": marked(sample["answer"], sample.get("given", []))}
    for label, colour in (("prompt", DIM), ("answer", ""), ("reference", CYAN)):
        # Drop the white space that a chat template puts around a text.
        first, *rest = written_out(texts[label].strip(), "\n\t").split("\n")
        yield colour, f"  {label:>9} | {first}"
        yield from ((colour, f"  {'':>9} | {line}") for line in rest)
    yield "", ""


def main(arguments: Namespace) -> int:
    samples = chosen(read_samples(arguments.run, arguments.validation), arguments)
    if not samples:
        raise UserError("no sample passes these filters")
    colours = sys.stdout.isatty()
    for colour, line in itertools.chain.from_iterable(map(lines_of, samples)):
        print(f"{colour}{line}\033[0m" if colours and colour else line)
    return 0
