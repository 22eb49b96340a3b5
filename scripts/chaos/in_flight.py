"""A run that trains in flight while its servers are broken: its flags, and what must be true of its steps."""

import math
from typing import Any

from chaos.processes import Flags

MAX_AGE, REQUEST_S, STRAGGLER_S = 2, 3.0, 1.0
MISMATCH = 0.05
"""Greatest mean |sampler - trainer| log-probability: our weights, a few small steps old."""
FLAGS: Flags = {
    "--job.config_file": "train_configs/quickstart.toml",
    "--training.steps": "1000000",
    "--metrics.no-enable_tensorboard": None,
    "--async_grpo.enabled": None,
    "--async_grpo.max_trajectory_age_steps": str(MAX_AGE),
    "--weight_sync.async_weight_update": None,
    "--weight_sync.timeout_seconds": "8",
    "--weight_sync.straggler_seconds": str(STRAGGLER_S),
    "--rollout.request_timeout_seconds": str(REQUEST_S),
    "--validation.no-enable": None,
    "--checkpoint.no-enable": None,
    # Far from random weights; from then on versions hardly differ in thousands of steps: other weights would show.
    "--sft.steps": "20",
    "--optimizer.lr": "1e-6",
    "--grpo.zero_variance_groups": "keep",
    "--grpo.entropy_coef": "0.01",
    "--grpo.prompts_per_step": "8",
    "--grpo.group_size": "2",
    "--reward.functions": "exact_match,chaos.rewards:paced",
}


def sound(lines: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the steps of a run whose servers were broken; empty if all were trained as they should be."""
    wrong = []
    ages = [line.get("rollout/age_max", 0) for line in lines]
    if max(ages) > MAX_AGE or min(ages) < 0:
        wrong.append(f"tokens of age {min(ages)} to {max(ages)} were trained, bound {MAX_AGE}")
    trained = [line for line in lines if line.get("train/answer_tokens")]
    mismatch = max((line.get("policy/mismatch_abs", math.inf) for line in trained), default=0.0)
    if mismatch > MISMATCH:
        wrong.append(f"sampler and trainer differ by {mismatch:.3f} nat in a step, limit {MISMATCH}")
    if not all("train/loss" in line and "train/grad_norm" in line for line in lines):
        wrong.append("a loss is not finite")
    if any(line.get("rollout/aborted_fraction") for line in lines):
        wrong.append("answers that a server had aborted are in a batch")
    if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
        wrong.append("steps are missing in metrics.jsonl")
    return wrong
