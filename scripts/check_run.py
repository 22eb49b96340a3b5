"""Say what a finished run proves, line by line; exit 1 if any line fails.

`python scripts/check_run.py outputs/quickstart --steps 150 --min-final-reward 0.9`
"""

import argparse
import json
import math
import sys
from pathlib import Path


class Report:
    """Prints one line per check and remembers whether any failed."""

    def __init__(self) -> None:
        self.failed = False

    def check(self, holds: bool, what: str) -> None:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}", flush=True)
        self.failed |= not holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="[job] dump_folder")
    parser.add_argument("--steps", type=int, required=True, help="steps that the run should have")
    parser.add_argument("--max-mismatch", type=float, default=1e-4, help="mean |sampler - trainer| log-probability")
    parser.add_argument("--max-first-reward", type=float, help="held-out greedy reward at step 0, at most")
    parser.add_argument("--min-final-reward", type=float, help="held-out greedy reward at the end, at least")
    parser.add_argument("--min-gain", type=float, help="mean reward of the last fifth of steps less the first fifth's")
    parser.add_argument("--export", action="store_true", help="load the exported folder with transformers")
    args = parser.parse_args()

    report = Report()
    lines = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step", 0) > 0]
    held_out = [line["validation/greedy_reward"] for line in lines if "validation/greedy_reward" in line]
    report.check([line["step"] for line in steps] == list(range(1, args.steps + 1)), f"{len(steps)} steps logged")
    if not steps:
        return 1
    report.check(all("train/loss" in line and "train/grad_norm" in line for line in steps), "every loss is finite")
    trained = [line for line in steps if line.get("train/answer_tokens", 0) > 0 and line.get("train/grad_norm", 0) > 0]
    report.check(len(trained) == len(steps), f"{len(trained)} of {len(steps)} steps changed the weights")
    acknowledged = [line["sync/version"] for line in lines if "sync/version" in line]
    report.check(
        acknowledged[-len(steps) :] == [line["step"] for line in steps],
        f"every server acknowledged each of versions {acknowledged[0]:.0f} to {acknowledged[-1]:.0f}, checksums equal",
    )
    worst = max(line.get("policy/mismatch_abs", math.inf) for line in steps)
    report.check(
        worst <= args.max_mismatch,
        f"sampler and trainer log-probabilities differ by at most {worst:.1e} nat (step means), limit "
        f"{args.max_mismatch}",
    )
    if args.max_first_reward is not None:
        report.check(held_out[0] <= args.max_first_reward, f"held-out reward {held_out[0]:.3f} before the first step")
    if args.min_final_reward is not None:
        report.check(
            held_out[-1] >= args.min_final_reward,
            f"held-out reward {held_out[-1]:.3f} at the end, wanted {args.min_final_reward}",
        )
    if args.min_gain is not None:
        rewards = [line["reward/mean"] for line in steps]
        part = max(1, len(rewards) // 5)
        first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
        report.check(last - first >= args.min_gain, f"reward from {first:.3f} to {last:.3f}, wanted +{args.min_gain}")
    if args.export:
        report.check(*_exported(args.run / "checkpoint" / f"step-{args.steps}" / "hf"))
    return int(report.failed)


def _exported(folder: Path) -> tuple[bool, str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        finite = bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())
    whole = not loading["missing_keys"] and not loading["unexpected_keys"]
    return finite and whole, f"transformers loads {folder} with no missing or unexpected tensor"


if __name__ == "__main__":
    sys.exit(main())
