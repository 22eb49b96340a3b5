"""How errors take a run to its end (I12)."""

import contextlib
from collections.abc import Iterator

from torchtitan.grpo.errors import in_words
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.run.broadcast import Broadcaster


class Ending:
    """What a trainer knows of the end of its run, and how errors take it there.

    Attributes:
        trained: The newest step of which all is here: weights, optimizer and schedule. None amid its optimizer steps.
        failure: The error that ends the run on this rank, if it is known before all ranks stop.
    """

    def __init__(self, broadcast: Broadcaster) -> None:
        self.trained: int | None = 0
        self.failure: Exception | None = None
        self._broadcast = broadcast

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """What fails inside ends the run before it packs another step: this one is logged and saved first.

        No other rank may wait for this one inside, but for a push: `request_stop` ends that wait.
        """
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            self._broadcast.request_stop(f"rank {self._broadcast.rank}: {in_words(error)}")

    @contextlib.contextmanager
    def rank0_alone(self) -> Iterator[None]:
        """Rank 0's part of the work, for which the others wait. What fails inside, or failed before, stops all ranks.

        Raises:
            StopRequested: On rank 0. On the others, where they wait.
        """
        if not self._broadcast.is_source:
            yield
            return
        try:
            self.check()
            yield
        except Exception as error:
            if not isinstance(error, StopRequested):
                self.failure = error
            self._broadcast.stop_all(self.failure)
            raise StopRequested from None

    def check(self) -> None:
        """Raise what has failed."""
        if self.failure is not None:
            raise self.failure
