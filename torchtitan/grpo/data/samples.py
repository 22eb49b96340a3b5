"""Prompts and samples, which prompts, engines, rewards and packing exchange; conversations for supervised training."""

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # reward workers import this file too, and start twice as fast without numpy
    import numpy as np

    from torchtitan.grpo.data.kept_tokens import KeptTokens

FinishReason = Literal["stop", "length", "abort"]
IMPOSSIBLE = -1000.0
"""No token that was sampled has so low a log-probability, at any temperature: its probability would be 0 in float32.
Servers write -9999 for -inf, and vLLM for NaN too."""
REWARD_MAX = 1e38
"""Largest weighted sum of an answer's scores. Advantages are float32, and the difference of two rewards must fit."""
ANY_VOCAB = 1 << 31
"""Every token id is below this."""
TEACHER = "teacher"
"""The name in `Sample.reward_failures` under which a teacher's failure stands."""


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        index: Position in its dataset, with a mixture in all of them. It is stable over runs, so seeds and resumes can
            use it.
        token_ids: The rendered prompt as the model sees it. Its length is what limits are about.
        text: The rendered prompt as text.
        answer: The reference answer, "" if the dataset has none.
        columns: All columns of the dataset's row, as JSON values, for reward functions.
        source: The name of its `[[data.mixture]]` source, or its reasoning-gym task if there are several; else "".
        functions: The reward functions that score its answers; empty: all of `[reward] functions`.
    """

    index: int
    token_ids: list[int]
    text: str
    answer: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    functions: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Document:
    """What the model sees in one pass of supervised training.

    Attributes:
        token_ids: int32 [T].
        trained: bool [T], True for tokens to learn.
    """

    token_ids: "np.ndarray"
    trained: "np.ndarray"


@dataclass(frozen=True, eq=False)
class Conversation(Prompt):
    """A row to learn from.

    When rows are checked, `token_ids` are those of its longest document. Later `token_ids`, text and columns are empty.

    Attributes:
        documents: Usually one; see `chat.ChatRenderer`.
    """

    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The likeliest tokens of a teacher, or of the sampler, at each of T positions.

    Attributes:
        ids: int32 [T, K], different tokens at each position, in any order; -1 is none.
        logprobs: float32 [T, K], and -inf for none.
    """

    ids: "np.ndarray"
    logprobs: "np.ndarray"

    @staticmethod
    def none(positions: int, k: int) -> "TopTokens":
        import numpy as np

        return TopTokens(np.full((positions, k), -1, np.int32), np.full((positions, k), -np.inf, np.float32))

    def cut(self, positions: int) -> "TopTokens":
        """Those of the first positions."""
        return TopTokens(self.ids[:positions], self.logprobs[:positions])

    def followed_by(self, other: "TopTokens") -> "TopTokens":
        import numpy as np

        return TopTokens(np.concatenate([self.ids, other.ids]), np.concatenate([self.logprobs, other.logprobs]))


@dataclass
class Sample:
    """One answer to a prompt. `token_ids`, `logprobs` and `versions` have one entry per answer token.

    Attributes:
        token_ids: Answer tokens, with the stop token if the engine stopped on one.
        logprobs: The sampler's log-probability of each token at the sampling temperature. 0 outside `loss_mask`.
        versions: The weight version that sampled each token. Outside `loss_mask`, the version of the token before.
        finish_reason: "stop" (a stop token), "length" (the limit) or "abort" (an environment gave it up).
        text: The decoded answer, without special tokens.
        rewards: The score of each reward function that did not fail.
        reward: Their weighted sum. None before the answer is scored, and if a function failed on it: then the answer is
            left out of its group, as it is if a teacher failed on it. It is not trained on, and enters no baseline. If
            an environment has set it, or `reward_failures`, no function scores the answer.
        loss_mask: True for tokens that the model sampled and that are trained on. The others came from an environment,
            for example a tool's result. None: all are True.
        reward_failures: The reward functions that failed on the answer, and why.
        teacher_logprobs: With `[distill]`: the teacher's log-probability of each token, at the sampling temperature.
            None without a teacher, or if it failed. Outside `loss_mask` it is there and means nothing.
        top: The likeliest tokens in place of each token: the teacher's with `[distill] top_k`, None as above; the
            sampler's with `[grpo] score_centering`, none outside `loss_mask`.
        servers: (first token, server) for each stretch of tokens that one server sampled. Filled in if left empty.
        routes: With `[grpo] routing_replay`: the experts of prompt and answer, see `data/routes.py`, up to the token
            before the last sampled one at least.
        kept: With `[rollout] top_k`: what could be drawn in place of each token; all tokens outside `loss_mask`.
        beyond: Tokens of its own prompt beyond the group's, which count to the answer's limit. `checked` fills it in.
        final: What `[reward] answer_pattern` found last in a held-out answer, see `RewardRunner.find_finals`.
    """

    prompt: Prompt
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    loss_mask: list[bool] | None = None
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    reward_failures: dict[str, str] = field(default_factory=dict)
    teacher_logprobs: list[float] | None = None
    top: TopTokens | None = field(default=None, compare=False)  # arrays have no single truth
    servers: list[tuple[int, str]] = field(default_factory=list)
    routes: "np.ndarray | None" = field(default=None, compare=False)
    kept: "KeptTokens | None" = field(default=None, compare=False)
    beyond: int = 0
    final: str | None = None

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return len(self.sampled_versions)

    @property
    def sampled_versions(self) -> list[int]:
        """The weight version of each token that the model sampled."""
        return self.versions if self.loss_mask is None else list(compress(self.versions, self.loss_mask))


Group = list[Sample]
"""The answers to one prompt, in sample order."""
