"""Check a finished run, one line per check. The exit status is 1 if any check fails.

    python scripts/check_run.py outputs/quickstart --steps 150 --min-final-reward 0.9

`--background` is for a run with `[weight_sync] async_weight_update`. `--blocking RUN` compares its speed with the same
run without it.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.grpo.reporting.step_lines import read_lines


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
    parser.add_argument("--steps", type=int, required=True, help="number of steps that the run should have")
    parser.add_argument("--max-mismatch", type=float, default=1e-4, help="mean |sampler - trainer| log-probability")
    parser.add_argument("--max-age", type=int, default=0, help="greatest age of a token, in steps (default 0)")
    parser.add_argument("--background", action="store_true", help="with async_weight_update: versions may be skipped")
    parser.add_argument("--blocking", type=Path, metavar="RUN", help="compare speed with this run, from step 5")
    parser.add_argument("--min-final-reward", type=float, help="held-out greedy reward at the end, at least")
    parser.add_argument("--export", action="store_true", help="load the exported folder with transformers")
    args = parser.parse_args()

    report = Report()
    lines = read_lines(args.run / "metrics.jsonl")
    steps = [line for line in lines if line.get("step", 0) > 0]
    held_out = [line["validation/greedy_reward"] for line in lines if "validation/greedy_reward" in line]
    report.check([line["step"] for line in steps] == list(range(1, args.steps + 1)), f"{len(steps)} steps logged")
    if not steps:
        return 1
    report.check(all("train/loss" in line and "train/grad_norm" in line for line in steps), "every loss is finite")
    trained = [line for line in steps if line.get("train/answer_tokens", 0) > 0 and line.get("train/grad_norm", 0) > 0]
    report.check(len(trained) == len(steps), f"{len(trained)} of {len(steps)} steps changed the weights")
    report.check(*_versions(lines, [line["step"] for line in steps], args.background))
    oldest = max(line.get("rollout/age_max", math.inf) for line in steps)
    report.check(
        oldest <= args.max_age,
        f"every token was sampled by weights at most {oldest:g} steps old, limit {args.max_age}",
    )
    worst = max((line.get("policy/mismatch_abs", math.inf) for line in trained), default=0.0)
    report.check(
        worst <= args.max_mismatch,
        f"sampler and trainer log-probabilities differ by at most {worst:.1e} nat (step means), limit "
        f"{args.max_mismatch}",
    )
    if args.min_final_reward is not None:
        final = held_out[-1] if held_out else -math.inf
        report.check(
            final >= args.min_final_reward, f"held-out reward {final:.3f} at the end, wanted {args.min_final_reward}"
        )
    if args.blocking is not None:
        blocking = read_lines(args.blocking / "metrics.jsonl")
        _compare(report, steps, [line for line in blocking if line.get("step", 0) > 0])
    if args.export:
        report.check(*_exported(args.run / "checkpoint" / f"step-{args.steps}" / "hf"))
    return int(report.failed)


def _versions(lines: list[dict[str, float]], steps: list[int], background: bool) -> tuple[bool, str]:
    """`sync/version` is the oldest version that a server in traffic had acknowledged when the step was logged."""
    acknowledged = [line["sync/version"] for line in lines if "sync/version" in line]
    if not acknowledged:
        return False, "no version was acknowledged"
    first_to_last = f"{acknowledged[0]:.0f} to {acknowledged[-1]:.0f}"
    if not background:
        holds = acknowledged[-len(steps) :] == steps
        return holds, f"every server acknowledged each of versions {first_to_last}"
    missed = sum(line.get("sync/missed", math.inf) for line in lines if "sync/version" in line)
    holds = acknowledged == sorted(acknowledged) and acknowledged[-1] == steps[-1] and missed == 0
    return holds, (
        f"versions {first_to_last} were acknowledged in order, {len(set(acknowledged))} of them by the end of a step; "
        f"{missed:g} missed by a server"
    )


def _compare(report: Report, background: list[dict[str, float]], blocking: list[dict[str, float]]) -> None:
    """Throughput, and the trainer pause per weight update: of the step, and with CUDA of the host thread."""
    background, blocking = background[4:], blocking[4:]
    if not background or not blocking:
        report.check(False, "both runs have 5 steps or more")
        return
    for name, what in (("time/sync_s", "the step"), ("time/sync_host_s", "the host thread")):
        if all(name in line for line in background + blocking):
            ours_ms, theirs_ms = ([1e3 * line[name] for line in run] for run in (background, blocking))
            report.check(
                statistics.median(ours_ms) < statistics.median(theirs_ms),
                f"a weight update pauses {what} for {statistics.median(ours_ms):.2f} ms (at most {max(ours_ms):.2f}), "
                f"with blocking sync for {statistics.median(theirs_ms):.2f} ms (at most {max(theirs_ms):.2f})",
            )
    step_ms, blocking_step_ms = (
        1e3 * statistics.median(line["time/step_s"] for line in run) for run in (background, blocking)
    )
    ours, theirs = (
        statistics.median(line["throughput/answer_tokens_per_s"] for line in run) for run in (background, blocking)
    )
    print(
        f"      throughput {ours:,.0f} answer tokens/s, with blocking sync {theirs:,.0f}: {ours / theirs:.2f} times; "
        f"a step takes {step_ms:.0f} ms, with blocking sync {blocking_step_ms:.0f} ms (medians from step 5)"
    )


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
