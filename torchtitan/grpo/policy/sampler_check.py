"""Whether each server samples from the policy that is trained: its log-probabilities against the trainer's.

Only tokens of the version that is trained are compared. Older ones differ by right, by as much as the policy has moved.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.errors import UserError

TOKENS_MIN = 256
"""Fewer tokens of a server are not judged, except before the first optimizer step. They add up over steps."""


class SamplerCheck:
    """Compares each server's mean |trainer - sampler| log-probability with `[rollout] max_logprob_mismatch`.

    Before the first optimizer step with something to compare, the run ends if every server is over the limit. After
    each step, a server that is over it leaves traffic, and weight sync connects and feeds it again. The run ends if too
    few servers would be left. Sums that are not finite are the trainer's own fault and judge no server.

    The same calls come on every rank. `servers` are the batch's, in the order that `numbers` counts.

    Args:
        fleet: Rank 0's; None elsewhere.

    Attributes:
        is_due: The check before the first optimizer step is still to come.
    """

    def __init__(self, config: JobConfig, fleet: Fleet | None) -> None:
        ahead = config.async_grpo
        self.is_due = True
        self._limit = config.rollout.max_logprob_mismatch
        self._fleet = fleet
        # An answer that goes on with old keys and values is of no single version.
        self._mixes = ahead.enabled and ahead.in_flight_weight_updates
        self._mixes = self._mixes and not ahead.recompute_kv_cache_after_weight_updates
        self._waiting: dict[str, tuple[float, float]] = {}
        self._left: set[str] = set()  # after the last step; answers from before then may be in this one

    def servers(self, groups: Sequence[Group], version: int) -> list[str]:
        """The servers that sampled tokens of this version, in the order of their names."""
        samples = (sample for group in groups for sample in group if self._compares(sample, version))
        return sorted({server for sample in samples for _, server in sample.servers if server})

    def numbers(self, servers: Sequence[str], version: int, sample: Sample) -> list[int]:
        """For each token of the sample the number of its server in `servers`, from 1; 0 if it is not compared.

        Empty if none is.
        """
        if not servers or not self._compares(sample, version):
            return []
        numbers = [0] * len(sample.token_ids)
        for first, server in sample.servers:
            number = servers.index(server) + 1 if server in servers else 0
            numbers[first:] = [number] * (len(numbers) - first)
        return [number if v == version else 0 for number, v in zip(numbers, sample.versions, strict=True)]

    def before_first_step(self, servers: Sequence[str], sums: Mapping[str, Any]) -> None:
        """`sums` are `losses.server_sums` over all ranks; with no tokens the next step is checked in place of this one.

        Raises:
            UserError: Every server is over the limit, on every rank.
        """
        means = self._means(_by_server(servers, sums))
        self.is_due = not means
        if means and all(not mean <= self._limit for mean in means.values()):
            raise self._error(means)

    def after_step(self, servers: Sequence[str], sums: Mapping[str, Any]) -> None:
        """Judge each server by its tokens since it was last judged.

        Raises:
            UserError: Too few servers would be left. Rank 0 alone knows.
        """
        for server, (tokens, total) in _by_server(servers, sums).items():
            if server not in self._left and math.isfinite(total):
                before = self._waiting.get(server, (0.0, 0.0))
                self._waiting[server] = before[0] + tokens, before[1] + total
        judged = {server: sums for server, sums in self._waiting.items() if sums[0] >= TOKENS_MIN}
        for server in judged:
            del self._waiting[server]
        over = {server: mean for server, mean in self._means(judged).items() if mean > self._limit}
        self._left = set(over)
        if not over or self._fleet is None:
            return
        fleet = self._fleet
        left = [known for known in fleet.servers if not known.lost and known.url not in over]
        if len(left) < max(1, fleet.min_servers):
            raise self._error(over)
        for known in fleet.servers:
            if known.url in over:
                fleet.distrust(known, str(self._error({known.url: over[known.url]})))

    def _compares(self, sample: Sample, version: int) -> bool:
        versions = sample.sampled_versions
        return version in versions and (not self._mixes or min(versions) == version)

    @staticmethod
    def _means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        return {server: total / tokens for server, (tokens, total) in sums.items() if tokens}

    def _error(self, means: Mapping[str, float]) -> UserError:
        return UserError(
            f"sampler and trainer log-probabilities of the same tokens differ by "
            f"{', '.join(f'{mean:.3f} nat on average at {server}' for server, mean in means.items())}, over [rollout] "
            f"max_logprob_mismatch = {self._limit}: check that the server serves this model, runs with "
            "--logprobs-mode processed_logprobs and no quantisation"
        )


def _by_server(servers: Sequence[str], sums: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Each server's tokens and their summed absolute difference."""
    if not servers:
        return {}
    pairs = zip(sums["server_tokens"], sums["server_mismatch_abs_sum"], strict=True)
    return dict(zip(servers, pairs, strict=True))
