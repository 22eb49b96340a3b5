"""A step's groups as packed rows, in one process or in several that have a share each. It needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.policy.advantages import reward_advantages
from torchtitan.grpo.policy.batch import counted_totals, shaped_reward, split, training_samples
from torchtitan.grpo.policy.packing import Layout, packing_fractions, packing_sums
from torchtitan.grpo.policy.rows import PackedRow
from torchtitan.grpo.reporting.step_metrics import Answers, answer_metrics, described
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


@dataclass
class Counted:
    """What processes need of one another's groups, so that rows are as if one of them had packed them all.

    Attributes:
        minibatches: Answers and tokens that enter the loss, of each minibatch.
        servers: See `SamplerCheck.servers`.
    """

    minibatches: list[tuple[int, int]]
    servers: dict[str, bool]

    @classmethod
    def of(cls, groups: list[Group], version: int, config: "JobConfig", check: SamplerCheck) -> "Counted":
        grpo, limit = config.grpo, config.rollout.max_answer_tokens
        parts = [[groups[i] for i in part] for part in split(len(groups), grpo.minibatches)]
        totals = [counted_totals(part, grpo, limit, config.distill) for part in parts]
        return cls(totals, check.servers(groups, version))

    @classmethod
    def sum(cls, shares: Sequence["Counted"]) -> "Counted":
        """Of all shares."""
        minibatches = [
            (sum(n for n, _ in of_shares), sum(n for _, n in of_shares))
            for of_shares in zip(*(share.minibatches for share in shares), strict=True)
        ]
        servers: dict[str, bool] = {}
        for share in shares:
            servers |= {url: servers.get(url, False) or newest for url, newest in share.servers.items()}
        return cls(minibatches, servers)

    def values(self) -> list[Any]:
        """For another process."""
        return [self.minibatches, self.servers]


@dataclass
class Packed:
    """A step's answers, packed. `minibatches` are rows by rank; the rest is as in `rollouts.Taken`.

    Attributes:
        answers: What `answer_metrics` needs of them.
        sums: See `packing_sums`.
    """

    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: list[list[list[PackedRow]]]
    answers: list[Answers]
    sums: list[float]

    def metrics(self, max_age: int) -> dict[str, float]:
        """Of rollouts and packing. For `max_age` see `answer_metrics`."""
        return answer_metrics(self.answers, self.rewards, max_age) | packing_fractions(self.sums)

    @classmethod
    def of(
        cls,
        groups: list[Group],
        version: int,
        config: "JobConfig",
        check: SamplerCheck,
        layout: Layout,
        totals: Counted | None = None,
    ) -> "Packed":
        """Rewards become advantages, and answers packed rows, of a step that trains weights of this version.

        Args:
            totals: Of the whole step, if these groups are a share of it.
        """
        grpo, limit = config.grpo, config.rollout.max_answer_tokens
        totals = totals or Counted.of(groups, version, config, check)
        rewards = [[shaped_reward(sample, grpo, limit) for sample in group] for group in groups]
        advantages = reward_advantages(rewards, grpo, config.distill)
        servers, minibatches = totals.servers, list[list[list[PackedRow]]]()
        for part, (answers, tokens) in zip(split(len(groups), grpo.minibatches), totals.minibatches, strict=True):
            # The sampler's log-probabilities meet a policy that the first minibatch has changed.
            compared = servers if not minibatches or grpo.proximal_logprobs == "recompute" else ()
            own = [groups[i] for i in part], [advantages[i] for i in part]
            token_servers = partial(check.token_servers, compared)
            samples = training_samples(*own, version, grpo, limit, token_servers, config.distill, (answers, tokens))
            minibatches.append(layout.pack(samples))
        sums = packing_sums(minibatches, layout.attention_tokens)
        return cls(rewards, advantages, servers, minibatches, described(groups, version), sums)
