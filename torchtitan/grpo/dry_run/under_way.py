"""How many answers are under way at once, and whether the age leaves time for the longest one."""

from torchtitan.config import JobConfig
from torchtitan.grpo.config.batch import requests_at_once, surplus_groups
from torchtitan.grpo.config.share import rollout_processes

MEAN = 4
"""The length of an average answer is not known before a run: here, one in so many of the longest."""


def answers_at_once(config: JobConfig) -> int:
    """How many answers servers may run at once before steps wait for an answer of `max_answer_tokens`.

    While servers run S answers at once, each at the same speed, an answer of L tokens takes as long as S * L tokens of
    all of them. A step takes n answers of m tokens on average. So the longest answer passes (S / n) * (L / m) steps,
    and it is in time if that is at most the age.
    """
    answers = config.grpo.prompts_per_step * config.grpo.group_size
    return config.async_grpo.max_age * answers // MEAN


def under_way_lines(config: JobConfig) -> list[str]:
    """Groups, answers and requests under way at most; for in-flight updates, what the age covers."""
    grpo, rollout, ahead = config.grpo, config.rollout, config.async_grpo
    surplus = surplus_groups(grpo)
    groups = (ahead.max_age + 1) * grpo.prompts_per_step + surplus
    servers = rollout.replicas or len(rollout.urls) or 1
    each = " each" if rollout.urls_file else f" on {servers}" if servers > 1 else ""
    processes = rollout_processes(config)
    each += f", by {processes} rollout processes" if processes > 1 else ""
    what = "turn of an answer" if rollout.environment else "group"
    lines = [
        f"  under way        at most {groups:,} groups, {groups * grpo.group_size:,} answers; one request for each "
        f"{what}, {servers * requests_at_once(rollout):,} at once{each}"
    ]
    if ahead.enabled and ahead.in_flight_weight_updates:
        mean = max(1, rollout.max_answer_tokens // MEAN)
        lines += [
            f"  age              {ahead.max_age}: no step waits for an answer of "
            f"{rollout.max_answer_tokens:,} tokens while servers run at most {answers_at_once(config):,}",
            f"                   answers at once (for a mean of {mean:,} tokens; in proportion for others)",
        ]
    return lines
