"""The teachers of a run: they score a group's answers while its rewards are computed."""

import asyncio
import logging
from collections.abc import Awaitable
from statistics import fmean

from torchtitan.grpo.data.samples import TEACHER, Group, Prompt, Sample
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.teachers.scorers import Asked, Scorer, Scores

logger = logging.getLogger(__name__)

TEACHER_S = "distill/teacher_s"
"""A metric: the mean wait for the scores of a group."""
RETRY_S = 1.0
"""Pause after each teacher has failed once."""

_THEIR_KEYS = {
    "[rollout] urls": "[distill] teacher_urls",
    "[rollout] engine": "[distill] engine",
    "[rollout] api_key_env": "[distill] api_key_env",
    "[rollout] request_timeout_seconds": "half of [rollout] request_timeout_seconds",
}


def about_teachers(message: str) -> str:
    """A message of a server's client or control, with the keys of [distill] in place of those of [rollout]."""
    for key, theirs in _THEIR_KEYS.items():
        message = message.replace(key, theirs)
    return f"[distill] a teacher: {message}"


class Teachers:
    """Scores groups. Everything happens on one event loop, that of the collector.

    A request goes to the teacher with the fewest requests of those whose last one did not fail. If it fails, the next
    one is asked, and after all of them the first again. After `timeout_s` the group has no scores.

    Args:
        scorers: The teachers by `Prompt.source`; those of "" score all further prompts.
        timeout_s: `[rollout] request_timeout_seconds`.
        alone: No reward is needed: an answer that nothing rewards has the reward 0.
    """

    def __init__(self, scorers: dict[str, list[Scorer]], timeout_s: float, alone: bool = False) -> None:
        self._scorers, self._timeout_s = scorers, timeout_s
        self.alone = alone
        self.failed_requests = 0
        """Since the start."""
        self._waits_s: list[float] = []

    async def scored(self, group: Group, rewarded: Awaitable[Group]) -> Group:
        """The group with rewards, as `rewarded` gives it, and the teacher's log-probabilities.

        Without the teacher's, the answers have no reward either, and `reward_failures` says why.

        Raises:
            UserError: A teacher refuses the request for a reason that the user can fix.
        """
        failure, _ = await asyncio.gather(self._fill_in(group), rewarded)
        if failure:
            for sample in group:
                sample.reward = None
                sample.reward_failures[TEACHER] = failure
        return group

    def has_scored(self, group: Group) -> bool:
        """Whether a group that an earlier run finished has what these teachers give."""
        return all(_scored_as(sample) == self._all()[0].top_k for sample in group if _counts(sample))

    def metrics(self) -> dict[str, float]:
        """What waiting took since the last call, and the requests that failed since the start."""
        waits, self._waits_s = self._waits_s, []
        wait = {TEACHER_S: fmean(waits)} if waits else {}
        return wait | {"distill/failed_requests": self.failed_requests}

    async def close(self) -> None:
        for scorer in self._all():
            await scorer.close()

    def _all(self) -> list[Scorer]:
        return [scorer for scorers in self._scorers.values() for scorer in scorers]

    def _of(self, prompt: Prompt) -> list[Scorer]:
        return self._scorers.get(prompt.source) or self._scorers[""]

    async def _fill_in(self, group: Group) -> str:
        """Set the samples' `teacher_logprobs` and `top`. Returns why that failed, or ""."""
        prompt, answered = group[0].prompt, [sample for sample in group if sample.token_ids]
        for sample in group:
            sample.teacher_logprobs = []
        if not answered:
            return ""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            asked = [(sample.prompt.token_ids, sample.token_ids) for sample in answered]
            scores = await self._ask(self._of(prompt), asked, f"prompt{prompt.index}")
        except EngineError as error:
            for sample in group:
                sample.teacher_logprobs = None
            return (
                f"gave no log-probabilities within {self._timeout_s:g} s ([rollout] request_timeout_seconds): {error}"
            )
        self._waits_s.append(clock() - began)
        for sample, own in zip(answered, scores, strict=True):
            sample.teacher_logprobs, sample.top = own.logprobs, own.top
        return ""

    async def _ask(self, scorers: list[Scorer], asked: list[Asked], what: str) -> list[Scores]:
        """The first answer of a teacher. EngineError, that of the last one, if none answers in time."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while True:
            for scorer in sorted(scorers, key=lambda scorer: (scorer.failing, scorer.in_flight)):
                try:
                    return await self._one(scorer, asked, what, deadline - clock())
                except EngineError as error:
                    last = error
                    if clock() >= deadline:
                        raise
            if clock() + RETRY_S >= deadline:
                raise last
            await asyncio.sleep(RETRY_S)

    async def _one(self, scorer: Scorer, asked: list[Asked], what: str, left_s: float) -> list[Scores]:
        scorer.in_flight += 1
        try:
            async with asyncio.timeout(max(left_s, 0.001)):
                scores = await scorer.score(asked, f"{what}-teacher")
        except (EngineError, TimeoutError) as error:
            self.failed_requests += 1
            if not scorer.failing:
                logger.warning("teacher %s failed, others or the same are asked again: %s", scorer.url, error)
            scorer.failing = True
            raise (
                error if isinstance(error, EngineError) else EngineError(f"{scorer.url}: no answer in time")
            ) from error
        except UserError as error:
            raise type(error)(about_teachers(str(error))) from error
        finally:
            scorer.in_flight -= 1
        if scorer.failing:
            logger.info("teacher %s answers again", scorer.url)
        scorer.failing = False
        return scores


def _counts(sample: Sample) -> bool:
    return bool(sample.token_ids) and TEACHER not in sample.reward_failures


def _scored_as(sample: Sample) -> int | None:
    """`[distill] top_k` of the run in which a teacher scored it; None if none did."""
    if sample.teacher_logprobs is None:
        return None
    return 0 if sample.top is None else sample.top.ids.shape[1]
