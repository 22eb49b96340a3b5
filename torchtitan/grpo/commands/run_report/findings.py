"""What a run's numbers mean: what bounds its steps, what went well, what needs a look."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan.grpo.commands.run_report.run_folder import Run
from torchtitan.grpo.reporting.ledger import shares, verdict

Level = Literal["good", "note", "warning", "problem"]

HELP = {
    "rollout": "More or faster servers, shorter answers, or [async_grpo]: the trainer waits for answers.",
    "trainer": "More trainer GPUs, longer packed rows, [compile], or less activation checkpointing.",
    "sync": "[weight_sync] async_weight_update sends weights beside the next step.",
    "reward": "More [reward] workers, or a faster reward function.",
}
"""What helps against each bound; docs/by_symptom.md and docs/performance.md have more."""

_FALL = 0.05
"""Held-out reward that is lost since the best validation, in shares of the best, from which it is a warning."""
_COLLAPSED = 0.1
_TRUNCATED = 0.1
_MISMATCH = 0.05


@dataclass(frozen=True)
class Finding:
    """`symptom` is the section of docs/by_symptom.md that says what to do, "" if none does."""

    level: Level
    title: str
    text: str = ""
    symptom: str = ""


@dataclass(frozen=True)
class Bound:
    """What bounds the steps.

    Attributes:
        sentence: As the console says it: `rollout-bound (rollout 71%, trainer 22%)`.
        help: What to change, "" if the steps are balanced.
        shares: By kind, 0 to 1.
    """

    sentence: str
    help: str
    shares: dict[str, float]


def bound(run: Run) -> Bound | None:
    """Of all steps together, less the first one, which starts everything; None without times."""
    lines = run.steps[1:] or run.steps
    names = {name for line in lines for name in line if name.startswith("time/")}
    seconds = {name: sum(line.get(name, 0.0) for line in lines) for name in names}
    sentence = verdict(seconds)
    if not sentence:
        return None
    return Bound(sentence, HELP.get(sentence.partition("-bound")[0], ""), shares(seconds))


def findings(run: Run) -> list[Finding]:
    """Problems first, then warnings, notes and what went well."""
    found = [*_learning(run), *_signal(run), *_rewards(run), *_training(run), *_rollouts(run), *_servers(run)]
    order = ("problem", "warning", "note", "good")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _learning(run: Run) -> Iterator[Finding]:
    wanted = run.values.get("training.steps")
    done = run.lines[-1]["step"] if run.lines else 0
    if wanted and done < wanted:
        yield Finding("note", f"Step {done:,} of {wanted:,}", "The run goes on, or has ended before its last step.")
    elif wanted:
        yield Finding("good", f"All {wanted:,} steps done")
    held_out = run.points("validation/greedy_reward")
    if len(held_out) >= 2:
        (_, first), (step, last) = held_out[0], held_out[-1]
        best_step, best = max(held_out, key=lambda point: point[1])
        if last < best - _FALL * abs(best):
            text = f"It was {best:.3f} at step {best_step:,} and is {last:.3f} at step {step:,}."
            title = "Held-out reward has fallen since its best"
            yield Finding("warning", title, text, "reward-up-held-out-reward-down")
        elif last > first:
            yield Finding("good", f"Held-out reward rose from {first:.3f} to {last:.3f}")
        else:
            title = f"Held-out reward has not risen: {first:.3f} at first, {last:.3f} now"
            yield Finding("warning", title, symptom="the-reward-is-flat")
    entropy = [value for _, value in run.points("policy/entropy")]
    tenth = len(entropy) // 10
    if tenth and statistics.fmean(entropy[-tenth:]) < _COLLAPSED * statistics.fmean(entropy[:tenth]):
        text = "The policy answers nearly always the same. A bonus, clip-higher or a higher temperature keeps it wider."
        title = f"Entropy fell from {entropy[0]:.2g} to {entropy[-1]:.2g}"
        yield Finding("note", title, text, "reward-up-held-out-reward-down")


def _signal(run: Run) -> Iterator[Finding]:
    zero = run.points("reward/zero_variance_fraction")
    values = run.values
    # By these, equal rewards give a gradient too. Rewards that a length penalty sets apart are not counted as equal.
    kl_in_reward = values.get("grpo.kl_coef", 0) > 0 and values.get("grpo.kl_placement") == "reward"
    if kl_in_reward or values.get("distill.teacher_urls"):
        zero = []
    equal = {step for step, share in zero if share >= 1}
    silent = sorted(equal | {step for step, tokens in run.points("train/answer_tokens") if tokens == 0})
    if silent:
        left_out = " among the answers that [grpo] overlong_filter keeps" * bool(values.get("grpo.overlong_filter"))
        text = f"No group's rewards differed{left_out}, so nothing was learned: {_listed(silent)}."
        yield Finding("warning", f"{_count(len(silent), 'step')} without a signal", text, "all-groups-are-equal")
    recent = [share for _, share in zero[-max(1, len(zero) // 10) :]]
    if recent and (share := statistics.fmean(recent)) > 0.5:
        text = "Their prompts are always or never solved: other prompts or larger groups give more signal."
        yield Finding("note", f"{share:.0%} of the newest groups gave no signal", text, "all-groups-are-equal")


def _rewards(run: Run) -> Iterator[Finding]:
    failures = [(step, count) for step, count in run.points("reward/failures") if count]
    if failures:
        names = sorted({name for sample in run.samples for name in sample["reward_failures"]})
        text = f"Steps {_listed([step for step, _ in failures])}."
        text += f" Functions in samples.jsonl that failed: {', '.join(names)}." if names else ""
        title = f"{_count(sum(count for _, count in failures), 'reward')} failed"
        yield Finding("problem", title, text, "the-reward-is-flat")
    cut = [share for _, share in run.points("rollout/truncated_fraction")]
    recent = cut[-max(1, len(cut) // 10) :]
    if recent and (share := statistics.fmean(recent)) > _TRUNCATED:
        text = "Their rewards are of unfinished answers: raise [rollout] max_answer_tokens, or penalise length."
        title = f"{share:.0%} of the newest answers were cut at the length limit"
        yield Finding("warning", title, text, "answers-are-cut")


def _training(run: Run) -> Iterator[Finding]:
    if skipped := run.total("train/skipped_steps"):
        text = "Their gradients were not finite. Lower the learning rate, or look at the answers of those steps."
        yield Finding("problem", f"{_count(skipped, 'update')} left out", text)
    if failed := run.total("checkpoint/failed"):
        yield Finding("problem", f"{_count(failed, 'checkpoint')} could not be saved", "The log says why.")
    if run.values.get("checkpoint.enable") is False:
        yield Finding("warning", "Checkpoints are off", "The trained weights are not saved ([checkpoint] enable).")
    mismatch = [value for _, value in run.points("policy/mismatch_abs")]
    if mismatch and (median := statistics.median(mismatch)) > _MISMATCH:
        text = "Servers and trainer disagree by this much in the mean. Old answers or other precisions cause it."
        yield Finding("warning", f"Log-probabilities differ by {median:.2g} nats", text, "the-mismatch-grows")
    if retries := run.total("memory/alloc_retries"):
        text = "Each time the allocator emptied its cache. Shorter rows or more checkpointing leave more room."
        yield Finding("warning", f"GPU memory was short {_count(retries, 'time')}", text, "out-of-memory")


def _rollouts(run: Run) -> Iterator[Finding]:
    if requests := run.total("rollout/retried"):
        text = "A server failed them, and another one answered."
        yield Finding("note", f"{_count(requests, 'request')} sent again", text)
    if groups := run.last("rollout/groups_timed_out"):  # a resumed run goes on counting groups
        text = "They took longer than [rollout] group_timeout_seconds."
        yield Finding("warning", f"{_count(groups, 'group')} given up", text)
    if groups := run.last("rollout/groups_late"):
        text = "Fewer groups ahead, or a higher age limit, waste less."
        yield Finding("note", f"{_count(groups, 'group')} dropped as too old", text)


def _servers(run: Run) -> Iterator[Finding]:
    lost = [step for step, count in run.points("sync/servers_lost") if count]
    if lost:
        title = f"Servers were lost in {_count(len(lost), 'step')}"
        yield Finding("warning", title, f"Steps {_listed(lost)}.", "a-server-is-out-of-traffic")
    missed = sum(count for _, count in run.points("sync/missed"))
    if missed:
        text = "They got the next version, or were fed alone."
        yield Finding("note", f"Servers missed {_count(missed, 'weight update')}", text, "a-server-is-out-of-traffic")


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'' if number == 1 else 's'}"


def _listed(steps: list[float]) -> str:
    """The first steps of a list in words."""
    shown = ", ".join(f"{step:,.0f}" for step in steps[:6])
    return shown + (f" and {len(steps) - 6:,} more" if len(steps) > 6 else "")
