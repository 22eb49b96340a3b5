"""Whether each server samples from the policy that is trained: its log-probabilities against the trainer's."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, repeat
from typing import Any

import numpy as np

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)

TOKENS_MIN = 256
"""Fewer tokens of a server are not judged, except before the first optimizer step. They add up over steps."""

ONE_SIDED = 0.8
"""Share of the difference that has one sign if a server samples from a part of the vocabulary. Rounding has either."""

NARROWED, CERTAIN, LEAST = 1.25, 8.0, 300.0
"""A server does not draw from the policy if a step's tokens are likelier than such draws: by the limit, or NARROWED
times the limit as a share of the entropy, whichever is less; by CERTAIN standard errors; and by LEAST nat in all. Draws
from an almost certain policy may well hold none of its rare tokens, and so have no deviation."""

ROUNDED = 0.08
"""Nats between an FP8 sampler and the policy from which on a warning says so. SmolLM2 began with 0.04, and with 0.11
where servers rounded the layers' inputs, too."""

EXPLAINED = 2
"""At most so many servers of a step are asked why they differ."""

MOST_MOVED = 1.0
"""Nats by which the policy moves within a version, at most, on average over tokens. Steps that learn stay far below."""

Sums = dict[tuple[str, int], tuple[float, float]]
"""By server and age: tokens, and their summed |trainer - sampler| log-probability."""
_Waiting = dict[tuple[str, int], tuple[float, float, float]]
"""The same, and third what the sum would be at the other servers' means of the same steps."""


class SamplerCheck:
    """Compares each server's mean |trainer - sampler| log-probability with `[rollout] max_logprob_mismatch`.

    The trained version's tokens (age 0) should not differ at all. Older ones differ by what the policy has moved since,
    which the other servers' tokens of the same step and age tell. But a policy that moves fast moves further on some
    prompts than on others. So a server is over the limit if it differs by more than the limit plus twice that. By
    MOST_MOVED for each version of their age, no policy moves: more is not taken off, and that much if no other server
    tells. An answer that goes on with old keys and values is of no single version from there on: only its tokens before
    that are compared.

    Before the first optimizer step with tokens of age 0, the run ends if every server is over the limit. After each
    step, a server that is over it leaves traffic, and weight sync connects and feeds it again. If too few servers would
    be left, tokens of age 0 end the run. Older ones cause a warning. They end the run where the answers that come after
    it differ, again, by more than any policy moves. Sums that are not finite are the trainer's own fault and judge no
    server.

    A server is over the limit too if it finds its tokens of age 0 likelier throughout, by a twentieth of the limit: it
    samples from a part of the vocabulary. One that reports log-probabilities of the whole vocabulary then does not.
    So its tokens' log-probabilities are compared with the policy's entropy, too (NARROWED), where no answer is left out
    for what it is: in synchronous runs without environment, port, filter and oversampling, which keep groups of equal
    rewards and have a reward for every answer.

    Every rank makes the same calls. `servers` are those of the batch, see the method of this name.

    Args:
        fleet: Rank 0's; None elsewhere.

    Attributes:
        is_due: The check before the first optimizer step is still to come.
        explain: Says why a server is over the limit, "" for nothing. Every rank calls it, in the same order.
    """

    def __init__(self, config: JobConfig, fleet: Fleet | None) -> None:
        ahead = config.async_grpo
        self.is_due = True
        self.explain: Callable[[str], str] = lambda server: ""
        self._quantization = config.rollout.quantization
        self._limit = config.rollout.max_logprob_mismatch
        self._max_age = ahead.max_age
        self._mixes = ahead.keeps_kv
        grpo, rollout = config.grpo, config.rollout
        selects = ahead.enabled or grpo.overlong_filter or grpo.oversampling or grpo.zero_variance_groups != "keep"
        self._sees_all_draws = not (selects or rollout.environment or rollout.serve_port)
        self._fleet = fleet
        self._waiting: _Waiting = {}
        self._left: dict[str, int] = {}  # server -> steps that may still train on answers from before it left
        self._explained = Counter[str]()
        self._beyond: set[str] = set()  # servers whose older tokens were last further off than a policy moves

    def servers(self, groups: Iterable[Group], version: int) -> dict[str, bool]:
        """The servers of the answers' compared tokens, and whether any of an answer's is of this version."""
        found: dict[str, bool] = {}
        for sample in (sample for group in groups for sample in group):
            end, versions = self._compared(sample)
            for first, server in sample.servers:
                if server and first < end:
                    found[server] = found.get(server, False) or version in versions
        return found

    def token_servers(self, servers: Iterable[str], sample: Sample) -> np.ndarray:
        """int16: for each token of the sample the number of its server in `servers`, from 1; 0 if it is not compared.

        Empty if none is.
        """
        order = {server: number for number, server in enumerate(servers, 1)}
        if not order:
            return np.zeros(0, np.int16)
        numbers: np.ndarray = np.zeros(len(sample.token_ids), np.int16)
        end, _ = self._compared(sample)
        for first, server in sample.servers:
            numbers[first:end] = order.get(server, 0)
        return numbers

    def before_first_step(self, servers: Sequence[str], sums: Mapping[str, Any]) -> None:
        """`sums` are `sums.by_server` over all ranks. Without tokens of age 0 the check is still due.

        Raises:
            UserError: Every server is over the limit, on every rank.
        """
        means = {s: mean for (s, age), mean in _means(_by_server(servers, sums)).items() if age == 0}
        self.is_due = not means
        if self._fleet and self._quantization != "none" and (worst := max(means.values(), default=0.0)) > ROUNDED:
            logger.warning(
                f"servers in {self._quantization} differ from the policy by {worst:.3f} nat a token: this model will "
                "learn less. Do those of [rollout] urls have --quantization fp8_per_tensor --linear-backend marlin "
                "--moe-backend marlin?"
            )
        if means and all(not mean <= self._limit for mean in means.values()):
            raise self._error(means, self._causes(means))

    def after_step(self, servers: Sequence[str], sums: Mapping[str, Any], has_rewards: bool = True) -> None:
        """Judge each server by its tokens since it was last judged.

        Args:
            has_rewards: Every answer has one.

        Raises:
            UserError: Too few servers would be left. Rank 0 alone knows.
        """
        step = {
            key: sums
            for key, sums in _by_server(servers, sums).items()
            if key[0] not in self._left and sums[0] and math.isfinite(sums[1])
        }
        for key, (tokens, total) in step.items():
            before = self._waiting.get(key, (0.0, 0.0, 0.0))
            self._waiting[key] = before[0] + tokens, before[1] + total, before[2] + tokens * _moved(key, step)
        self._left = {server: steps - 1 for server, steps in self._left.items() if steps > 1}
        enough = {key: sums for key, sums in self._waiting.items() if sums[0] >= TOKENS_MIN}
        self._waiting = {key: sums for key, sums in self._waiting.items() if key not in enough}
        over = {
            key: total / tokens
            for key, (tokens, total, moved) in enough.items()
            if total / tokens > self._limit + 2 * moved / tokens
        }
        narrowed = _narrowed(servers, sums, self._limit) if self._sees_all_draws and has_rewards else {}
        one_sided = self._one_sided(servers, sums)
        one_sided |= {(server, 0) for server in narrowed}
        over |= {key: total / tokens for key, (tokens, total) in step.items() if key in one_sided}
        beyond = {server for (server, age), mean in over.items() if age and mean > self._limit + 2 * age * MOST_MOVED}
        proven = bool(beyond & self._beyond) or any(age == 0 for _, age in over)
        self._beyond = self._beyond - {server for server, age in enough if age} | beyond
        if over:
            worst = {server: max(over[key] for key in over if key[0] == server) for server, _ in over}
            causes = {server: why for server, why in narrowed.items() if worst.get(server, math.inf) <= self._limit}
            causes |= self._causes({server: mean for server, mean in worst.items() if server not in causes})
            if self._fleet is not None:
                self._withdraw(worst, causes, self._fleet, proven)
        self._left |= {server: self._max_age + 1 for server, _ in over}

    def _withdraw(self, worst: Mapping[str, float], causes: Mapping[str, str], fleet: Fleet, proven: bool) -> None:
        """`proven`: it ends the run, if too few servers would be left."""
        left = [server for server in fleet.servers if not server.lost and server.url not in worst]
        if len(left) < max(1, fleet.min_servers):
            if proven:
                raise self._error(worst, causes)
            logger.warning("%s. Too few other servers are left to do without", self._error(worst, causes))
            return
        for server in fleet.servers:
            if server.url in worst:
                fleet.distrust(server, str(self._error({server.url: worst[server.url]}, causes)))

    def _compared(self, sample: Sample) -> tuple[int, list[int]]:
        """How many of its first tokens are compared, and the versions of the sampled ones among these."""
        versions = sample.sampled_versions
        if not self._mixes or len(set(versions)) <= 1:
            return len(sample.token_ids), versions
        sampled = compress(range(len(sample.versions)), sample.loss_mask or repeat(True))
        return next(i for i in sampled if sample.versions[i] != versions[0]), versions[:1]

    def _one_sided(self, servers: Sequence[str], sums: Mapping[str, Any]) -> set[tuple[str, int]]:
        """Of servers with enough tokens of age 0."""
        bounded, excess = (_by_server(servers, sums, f"server_{name}_sum") for name in ("bounded", "excess"))
        least = self._limit / 20
        judged = (key for key, (tokens, _) in bounded.items() if not key[1] and tokens >= TOKENS_MIN)
        return {
            key
            for key in judged
            if excess[key][1] > ONE_SIDED * bounded[key][1] and excess[key][1] > least * bounded[key][0]
        }

    def _causes(self, means: Mapping[str, float]) -> dict[str, str]:
        """Why the worst of these servers are over the limit. One that is over it again and again is asked more and more
        seldom."""
        causes: dict[str, str] = {}
        for server in sorted(means, key=lambda server: (-means[server], server))[:EXPLAINED]:
            self._explained[server] += 1
            if self._explained[server].bit_count() == 1 and (why := self.explain(server)):
                causes[server] = why
        return causes

    def _error(self, means: Mapping[str, float], causes: Mapping[str, str]) -> UserError:
        known = "; ".join(f"{server}: {causes[server]}" for server in means if server in causes)
        advice = (
            "check that the server serves this model, runs with --logprobs-mode processed_logprobs and no quantisation"
        )
        where = " (docs/by_symptom.md#the-mismatch-grows)"
        if all(mean <= self._limit for mean in means.values()):
            return UserError(f"answers of {', '.join(means)} are not draws from the policy: {known or advice}{where}")
        return UserError(
            f"sampler and trainer log-probabilities of the same tokens differ by "
            f"{', '.join(f'{mean:.3f} nat on average at {server}' for server, mean in means.items())}, over [rollout] "
            f"max_logprob_mismatch = {self._limit}: {known or advice}{where}"
        )


def _by_server(servers: Sequence[str], sums: Mapping[str, Any], name: str = "server_mismatch_abs_sum") -> Sums:
    if not servers:
        return {}
    ages = range(len(sums["server_tokens"]) // len(servers))
    keys = [(server, age) for server in servers for age in ages]
    return dict(zip(keys, zip(sums["server_tokens"], sums[name], strict=True), strict=True))


def _narrowed(servers: Sequence[str], sums: Mapping[str, Any], limit: float) -> dict[str, str]:
    """Servers that do not draw from the policy, with the cause in words. See NARROWED."""
    if not sums.get("server_drawn_tokens"):
        return {}
    ages, found = len(sums["server_drawn_tokens"]) // len(servers), {}
    for number, server in enumerate(servers):
        tokens, entropy, surprise, squared = (
            sums[f"server_{name}"][number * ages]
            for name in ("drawn_tokens", "entropy_sum", "surprise_sum", "surprise_squared_sum")
        )
        if -surprise > max(limit * min(NARROWED * entropy, tokens), CERTAIN * math.sqrt(squared), LEAST):
            found[server] = (
                f"sampling mask or temperature: draws from the policy have a log-probability of "
                f"{-entropy / tokens:.3f} nat on average, and its tokens {-(entropy + surprise) / tokens:.3f}"
            )
    return found


def _moved(key: tuple[str, int], step: Sums) -> float:
    """By how much the policy has moved since a server's tokens of this age, at most: as the other servers' say."""
    server, age = key
    most = age * MOST_MOVED
    others = [sums for (other, its_age), sums in step.items() if age and its_age == age and other != server]
    return min(most, sum(total for _, total in others) / sum(tokens for tokens, _ in others)) if others else most


def _means(sums: Sums) -> dict[tuple[str, int], float]:
    return {key: total / tokens for key, (tokens, total) in sums.items() if tokens}
