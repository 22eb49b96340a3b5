"""When reward functions, or the environment, fail on so many answers that a run must end."""

from collections import Counter
from collections.abc import Sequence

from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.errors import UserError


def check_failures(groups: Sequence[Group], max_failed_fraction: float) -> None:
    """Refuse to go on with scored groups in which too many answers have no reward.

    Args:
        max_failed_fraction: `[reward] max_failed_fraction`.

    Raises:
        UserError: More than this share of the answers has no reward, or none has one.
    """
    samples = [sample for group in groups for sample in group]
    failed = [sample for sample in samples if sample.reward is None]
    if not failed or (len(failed) < len(samples) and len(failed) <= max_failed_fraction * len(samples)):
        return
    raise UserError(
        f"{len(failed)} of {len(samples)} answers have no reward, over [reward] max_failed_fraction = "
        f"{max_failed_fraction:g}: {described(failed)}"
    )


def described(failed: Sequence[Sample]) -> str:
    """What failed on these answers, how often, and the last one on which it failed in the most frequent way."""
    times = Counter(name for sample in failed for name in sample.reward_failures)
    ways = Counter(way for sample in failed for way in sample.reward_failures.items())
    last = {way: sample for sample in failed for way in sample.reward_failures.items()}
    parts = []
    for name, count in times.most_common():
        way = max((way for way in ways if way[0] == name), key=ways.__getitem__)
        text = last[way].text[:80]
        example = f"{text!r} as the answer to prompt" if text else "prompt"
        example += f" {last[way].prompt.index}"
        parts.append(f'"{name}" failed on {count}, for example on {example}: it {way[1]}')
    return "; ".join(parts)
