"""Bounds of every number that has some on its own."""

from dataclasses import dataclass
from operator import attrgetter

from torchtitan.config import JobConfig
from torchtitan.grpo.config.keys import label, show


@dataclass(frozen=True)
class Range:
    """Interval of a number; `above` and `below` are open ends."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    why: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.at_least, "over": self.above, "at most": self.at_most, "under": self.below}
        return " and ".join(f"{word} {end:g}" for word, end in words.items() if end is not None)


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
ONE_OR_MORE = Range(at_least=1)
SHARE = Range(at_least=0, at_most=1)

RANGES: dict[str, Range] = {
    "metrics.log_freq": ONE_OR_MORE,
    "metrics.samples_per_step": NOT_NEGATIVE,
    "optimizer.lr": POSITIVE,
    "optimizer.beta1": Range(at_least=0, below=1),
    "optimizer.beta2": Range(at_least=0, below=1),
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "lr_scheduler.warmup_steps": NOT_NEGATIVE,
    "lr_scheduler.total_steps": ONE_OR_MORE,
    "lr_scheduler.decay_ratio": SHARE,
    "lr_scheduler.min_lr_factor": SHARE,
    "training.seq_len": Range(at_least=2, why="a prompt and an answer need a token each"),
    "training.max_norm": Range(above=0, why="gradients are scaled down to it"),
    "training.steps": ONE_OR_MORE,
    "training.tokens_per_microbatch": NOT_NEGATIVE,
    "training.kept_logits_mib": NOT_NEGATIVE,
    "training.gc_freq": ONE_OR_MORE,
    "parallelism.data_parallel_replicate_degree": ONE_OR_MORE,
    "parallelism.tensor_parallel_degree": ONE_OR_MORE,
    "checkpoint.interval": ONE_OR_MORE,
    "checkpoint.keep_latest_k": NOT_NEGATIVE,
    "checkpoint.load_step": Range(at_least=-1, why="-1 is the newest"),
    "activation_checkpoint.memory_budget": SHARE,
    "comm.init_timeout_seconds": ONE_OR_MORE,
    "comm.trace_buf_size": NOT_NEGATIVE,
    "validation.freq": ONE_OR_MORE,
    "validation.prompts": ONE_OR_MORE,
    "validation.samples_per_prompt": ONE_OR_MORE,
    "validation.temperature": Range(above=0, why="greedy answers are always measured too"),
    "debug.seed": Range(at_least=0, below=2**32, why="NumPy takes no other"),
    "grpo.prompts_per_step": ONE_OR_MORE,
    "grpo.group_size": Range(at_least=2, why="an advantage compares the answers of one group"),
    "grpo.minibatches": ONE_OR_MORE,
    "grpo.ratio_clip_min": Range(above=0, at_most=1, why="ratios are held above 1 - ratio_clip_min"),
    "grpo.ratio_clip_max": Range(above=0, why="ratios are held below 1 + ratio_clip_max"),
    "grpo.ratio_clip_c": NOT_NEGATIVE,
    "grpo.kl_coef": NOT_NEGATIVE,
    "grpo.importance_min": NOT_NEGATIVE,
    "grpo.importance_max": POSITIVE,
    "grpo.replace_limit": Range(at_least=1, why="a step needs prompts_per_step groups"),
    "grpo.oversampling": NOT_NEGATIVE,
    "grpo.entropy_coef": NOT_NEGATIVE,
    "grpo.overlong_buffer_tokens": NOT_NEGATIVE,
    "grpo.overlong_penalty": Range(at_least=0, why="it is subtracted from the reward"),
    "async_grpo.max_trajectory_age_steps": Range(at_least=1, why="0 is what [async_grpo] enabled = false gives"),
    "async_grpo.order_window": NOT_NEGATIVE,
    "rollout.temperature": Range(above=0, why="log-probabilities are those of logits / temperature"),
    "rollout.max_answer_tokens": ONE_OR_MORE,
    "rollout.max_concurrent_requests": ONE_OR_MORE,
    "rollout.request_timeout_seconds": POSITIVE,
    "rollout.group_timeout_seconds": POSITIVE,
    "rollout.start_timeout_seconds": POSITIVE,
    "rollout.max_logprob_mismatch": POSITIVE,
    "rollout.embedded_max_sequences": ONE_OR_MORE,
    "rollout.min_servers": ONE_OR_MORE,
    "weight_sync.straggler_seconds": POSITIVE,
    "weight_sync.num_buffers": ONE_OR_MORE,
    "weight_sync.buffer_memory_ratio": Range(above=0, at_most=1),
    "weight_sync.bucket_mib_max": ONE_OR_MORE,
    "weight_sync.timeout_seconds": POSITIVE,
    "data.max_prompt_tokens": ONE_OR_MORE,
    "data.size": ONE_OR_MORE,
    "data.arithmetic_max": ONE_OR_MORE,
    "reward.workers": ONE_OR_MORE,
    "reward.timeout_seconds": POSITIVE,
    "sft.steps": NOT_NEGATIVE,
    "sft.batch_size": ONE_OR_MORE,
    "sft.lr": POSITIVE,
}


def check_ranges(config: JobConfig) -> list[str]:
    """Say which numbers are out of their bounds, and what the bounds are."""
    messages = []
    for path, allowed in RANGES.items():
        value = attrgetter(path)(config)
        if value is not None and value not in allowed:
            why = f" ({allowed.why})" if allowed.why else ""
            messages.append(f"{label(path)} = {show(value)} must be {allowed}{why}")
    return messages
