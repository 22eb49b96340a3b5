"""Stages that every rank runs, with one outcome for all."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.errors import UserError, in_words
from torchtitan.grpo.process.collectives import gather_json
from torchtitan.grpo.process.disk_full import no_room

Result = TypeVar("Result")


class StageFailed(RuntimeError):
    """A stage has failed on some rank. Every rank raises it, none is left in a collective, and the run can go on."""


class Together:
    """Runs stages on all ranks of the default group. If one rank fails, every rank raises, and none waits for it.

    Ranks agree over a gloo group of their own: a verdict must not be taken for another rank's part of a collective,
    and the rank that is late can be named.

    Args:
        timeout_s: Longest wait for the other ranks, in a stage and after it.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=self._timeout) if self.world_size > 1 else None

    def locally(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Run what waits for no other rank.

        Returns:
            Every rank's result. They travel as JSON, and are lists where they were tuples: None, or something small.

        Raises:
            UserError: A rank raised one.
            StageFailed: A rank raised another error.
            RuntimeError: A rank has ended, or did not come in time.
        """
        result: Any = None
        failure: BaseException | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = error
        return self._agree(what, result, failure)

    def collectively(self, what: str, action: Callable[[], Result]) -> Result:
        """Run what waits for other ranks, and return this rank's result.

        Raises:
            StageFailed: From DCP, which tells all ranks of one rank's failure.
            RuntimeError: This rank failed inside a collective. It must not wait for the others, which may wait for it
                on their devices, where no message reaches them. Its end ends them: gloo and torchrun see to that.
        """
        failure: BaseException | None = None
        try:
            result = action()
        except CheckpointException as error:  # a BaseException
            failure = error
            for cause, _ in error.failures.values():
                if not isinstance(cause, Exception):  # a signal's SystemExit, which DCP catches too
                    raise cause from error
        except Exception as error:
            if self.world_size > 1:
                raise RuntimeError(
                    f"checkpoint: {what} failed on rank {self.rank} inside a collective, so the run cannot go on: "
                    f"{_in_words(error)}"
                ) from error
            failure = error
        self._agree(what, None, failure)
        return result

    def _agree(self, what: str, result: Any, failure: BaseException | None) -> list[Any]:
        """Every rank's result, or one error for all."""
        words = "" if failure is None else _in_words(failure)
        try:
            outcomes = self._gathered((result, words, isinstance(failure, UserError)))
        except RuntimeError as error:
            raise RuntimeError(
                f"checkpoint: after {what}, rank {self.rank} waited for the others: {error} {words}"
            ) from failure or error
        failed = {rank: words for rank, (_, words, _) in enumerate(outcomes) if words}
        if not failed:
            return [result for result, _, _ in outcomes]
        for _, words, by_user in outcomes:
            if by_user:
                raise UserError(words) from failure
        first, words = next(iter(failed.items()))
        others = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise StageFailed(f"checkpoint: {what} failed on rank {first}{others}: {words}") from failure

    def _gathered(self, outcome: tuple[Any, str, bool]) -> list[Any]:
        """Every rank's outcome."""
        if self.group is not None:
            dist.monitored_barrier(self.group, self._timeout, wait_all_ranks=True)
        return gather_json(outcome, self.group, lambda work: work.wait())


def _in_words(error: BaseException) -> str:
    """Kind and text in short. A CheckpointException's text holds a traceback for each rank: its first cause does."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if number := no_room(error):
        return os.strerror(number)
    return in_words(error)
