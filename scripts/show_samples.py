"""Print a run's samples: prompt, answer, reward and advantage, in colour on a terminal.

python scripts/show_samples.py outputs/quickstart --step 20 --min-reward 0.5 --limit 10
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOLD, DIM, RED, GREEN, CYAN = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[36m"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder ([job] dump_folder), or its samples.jsonl")
    parser.add_argument("--step", type=int, help="only this step; a negative one counts from the last (-1: the last)")
    parser.add_argument("--min-reward", type=float, help="only answers with at least this reward")
    parser.add_argument("--max-reward", type=float, help="only answers with at most this reward")
    parser.add_argument("--limit", type=int, default=20, help="at most this many, the newest (default 20; 0: all)")
    return parser.parse_args(argv)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All samples of a run folder or file, oldest first. An unfinished last line is left out."""
    path = path / "samples.jsonl" if path.is_dir() else path
    if not path.exists():
        sys.exit(f"error: {path} does not exist; a run writes it if [metrics] samples_per_step is over 0")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def chosen(samples: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    step = arguments.step
    if step is not None and step < 0:
        steps = sorted({sample["step"] for sample in samples})
        step = steps[step] if -step <= len(steps) else None
        samples = samples if step is not None else []
    kept = [
        sample
        for sample in samples
        if (step is None or sample["step"] == step)
        and (arguments.min_reward is None or sample["reward"] >= arguments.min_reward)
        and (arguments.max_reward is None or sample["reward"] <= arguments.max_reward)
    ]
    return kept[-arguments.limit :] if arguments.limit > 0 else kept


def lines_of(sample: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A sample as (colour, line)."""
    by_function = ", ".join(f"{name} {value:g}" for name, value in sample["rewards"].items())
    versions = "-".join(str(version) for version in dict.fromkeys(sample["versions"]))
    head = (
        f"step {sample['step']}  prompt {sample['prompt_index']}  reward {sample['reward']:g} ({by_function})  "
        f"advantage {sample['advantage']:+.3f}  {sample['answer_tokens']} tokens, {sample['finish_reason']}  "
        f"weights {versions}"
    )
    yield BOLD + (GREEN if sample["advantage"] > 0 else RED if sample["advantage"] < 0 else ""), head
    if sample["reward_failures"]:
        yield RED, f"  failed: {', '.join(sample['reward_failures'])}"
    for label, colour in (("prompt", DIM), ("answer", ""), ("reference", CYAN)):
        # Drop the white space that a chat template puts around a text.
        first, *rest = sample[label].strip().split("\n")
        yield colour, f"  {label:>9} | {first}"
        yield from ((colour, f"  {'':>9} | {line}") for line in rest)
    yield "", ""


def main() -> None:
    arguments = parse_arguments()
    samples = chosen(read_samples(arguments.run), arguments)
    if not samples:
        sys.exit("no sample passes these filters")
    colours = sys.stdout.isatty()
    for sample in samples:
        for colour, line in lines_of(sample):
            print(f"{colour}{line}\033[0m" if colours and colour else line)


if __name__ == "__main__":
    main()
