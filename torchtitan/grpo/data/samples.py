"""What moves between prompts, engines, rewards and packing."""

from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        index: Position in its dataset; stable over runs, so seeds and resumes can be derived from it.
        token_ids: The rendered prompt as the model sees it.
        text: The rendered prompt as a person reads it.
        answer: The reference answer, "" if the dataset has none.
        columns: The dataset's whole row, for reward functions. JSON values only.
    """

    index: int
    token_ids: list[int]
    text: str
    answer: str = ""
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One answer to a prompt. `token_ids`, `logprobs` and `versions` have one entry per answer token.

    Attributes:
        token_ids: Answer tokens; the stop token is included when the engine stopped on one.
        logprobs: The sampler's log-probability of each token, at the sampling temperature; 0 where not `loss_mask`.
        versions: The weight version that sampled each token; where not `loss_mask`, that of the token before.
        finish_reason: "stop" (a stop token), "length" (the limit) or "abort" (cut off by the engine).
        text: The decoded answer, special tokens left out.
        rewards: Each reward function's score; `reward` is their weighted sum.
        loss_mask: Which tokens the model sampled, and are trained on; the others came from an environment (a tool's
            result). None: all.
        reward_failures: Reward functions that raised or ran out of time on this sample (scored 0).
    """

    prompt: Prompt
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    loss_mask: list[bool] | None = None
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    reward_failures: list[str] = field(default_factory=list)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model sampled."""
        return len(self.sampled_versions)

    @property
    def sampled_versions(self) -> list[int]:
        """The weight version of each token that the model sampled: what an environment said has none."""
        return self.versions if self.loss_mask is None else list(compress(self.versions, self.loss_mask))


Group = list[Sample]
"""The answers to one prompt, in sample order."""
