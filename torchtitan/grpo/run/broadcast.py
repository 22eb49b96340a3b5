"""From rank 0 to every rank over gloo, without pickle: packed rows and small JSON values."""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.errors import UserError, in_words, written_out
from torchtitan.grpo.policy.rows import PackedRow, from_bytes
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.collectives import broadcast_json, gather_json, scatter
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.run.watchdog import Progress
from torchtitan.grpo.weight_sync.sync_thread import PHASES

BEAT_S = 1.0
_LOOK = timedelta(seconds=0.5)
_KEY = "torchtitan-grpo/rank-0"
_STOP_KEY = "torchtitan-grpo/stop"
_STOP = "stop this run"
"""The only key of a message that is no value: it ends the wait for one, and says why."""
_GROUP_TIMEOUT = timedelta(days=30)  # the waits here have limits of their own, and better messages


def patience_s(config: JobConfig) -> float:
    """How long rank 0 may do nothing but wait, by its own limits: for servers or a harness, one group, and a push."""
    rollout = config.rollout
    serving_s = rollout.start_timeout_seconds + rollout.group_timeout_seconds + 2 * rollout.request_timeout_seconds
    if rollout.environment == "endpoint":
        serving_s += rollout.lease_seconds  # a harness at work is waited for
    return serving_s + PHASES * config.weight_sync.timeout_seconds


class Broadcaster:
    """Sends from rank 0 over a gloo group of its own, so that a long rollout does not need a long NCCL timeout.

    The other ranks wait as long as rank 0 lives and gets on. Each second, a thread of rank 0 writes into the process
    group's store what it does and for how long it has not got on. A thread of every other rank reads it.

    All methods raise TimeoutError or RuntimeError when a wait is given up. The message says what rank 0 was doing.

    Args:
        progress: This process's.
        limit_s: Longest time that rank 0 may not get on. Also rank 0's longest wait for the others.
        silence_s: Longest time without a word from rank 0's thread, because its process or machine is stopped.

    Attributes:
        rank, ranks: This one's number, and how many there are.
        on_stop: Called on every rank, in a thread, when one has called `request_stop`; on rank 0 with its error.
    """

    def __init__(self, progress: Progress, limit_s: float, silence_s: float = 60.0) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_source = self.rank == 0
        self._progress, self._limit_s, self._silence_s = progress, limit_s, silence_s
        self.on_stop: Callable[[str], None] = lambda why: None
        self._stops = False
        self._how = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT), self._wait
        self._messages = 0
        self._data_ranks: list[int] = []  # of each rank
        self._said: dict[str, Any] = {"count": -1, "doing": "starting", "still_s": 0.0, "changes": 0}
        self._heard_at = time.monotonic()
        self._closed = threading.Event()
        progress.watch(lambda: (self._messages, self._said["changes"]))
        if self.ranks > 1:
            # A connection of its own: others may block the store's, for example while they form a group.
            self._store = dist.distributed_c10d._get_default_store().clone()
            threading.Thread(target=self._beat, name="rank-0-beat", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self._closed.set()

    def describe(self) -> str:
        """What rank 0 said last; for the other ranks."""
        return f"rank 0 {self._said['doing']}, without progress for {self._said['still_s']:.0f} s"

    def json(self, value: Any = None) -> Any:
        """Rank 0's JSON value on every rank; the others' argument is ignored.

        Raises:
            StopRequested: Rank 0 has called `stop_all` instead.
        """
        self._messages += 1
        received = broadcast_json(value, self.is_source, *self._how)
        if isinstance(received, dict) and _STOP in received:
            raise StopRequested(*received[_STOP])
        return received

    def request_stop(self, why: str = "") -> None:
        """On any rank, in any thread: ask rank 0 to stop the run, because of an error if there is one. Each rank learns
        of it within a second or two."""
        if self.is_source:
            self._stop(why)
        else:
            self._store.set(_STOP_KEY, written_out(why))  # it takes no half of a character

    def _stop(self, why: str = "") -> None:
        self._stops = True
        self.on_stop(why)

    def stop_all(self, error: Exception | None = None) -> None:
        """On rank 0, where it would send the next value: the others raise StopRequested there, with this error."""
        with contextlib.suppress(StopRequested):
            self.json({_STOP: ["" if error is None else in_words(error), isinstance(error, UserError)]})

    def barrier(self) -> None:
        """Wait for rank 0, which may validate or push for longer than NCCL lets other ranks wait."""
        self.json()

    def meet(self) -> None:
        """Wait for every rank."""
        gather_json(None, *self._how)

    def rows(self, parts: Sequence[Buffer] | None, rank: int) -> list[PackedRow]:
        """The rows of data-parallel rank `rank`, from those of all ranks, `encoded`, on rank 0 (None elsewhere).

        No rank gets another one's. Ranks of one data-parallel rank, as with tensor parallelism, get the same.

        Raises:
            StopRequested: Rank 0 has called `stop_all` instead.
        """
        if parts is not None and self.ranks == 1:
            self._messages += 1
            return from_bytes(parts[rank])
        sizes = self.json(None if parts is None else [*map(len, parts)])  # or rank 0's word that the run stops
        if not self._data_ranks:
            self._data_ranks = gather_json(rank, *self._how)
        own = scatter(None if parts is None else [parts[r] for r in self._data_ranks], max(sizes), *self._how)
        return from_bytes(own.numpy().data[: sizes[rank]] if parts is None else parts[rank])

    def _wait(self, work: dist.Work) -> None:
        began = time.monotonic()
        while True:
            ended = work.is_completed()  # then `wait` gives its end at once; torch 2.11 cannot tell its exception
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:  # either the look is over, or the transport failed
                if ended:
                    whom = "another rank" if self.is_source else f"rank 0 ({self._last()})"
                    raise RuntimeError(f"lost the connection to {whom}: {error}") from error
            if self.is_source:
                if time.monotonic() > began + self._limit_s:
                    raise TimeoutError(f"waited {self._limit_s:g} s for the other ranks, which do not take a message")
            else:
                self._check_rank0(began)

    def _check_rank0(self, began: float) -> None:
        """On a rank that waits since `began`: raise TimeoutError if rank 0 is silent, or does not get on."""
        if time.monotonic() > max(began, self._heard_at) + self._silence_s:
            raise TimeoutError(f"rank 0 has not been heard of for {self._silence_s:g} s; {self._last()}")
        if self._said["still_s"] > self._limit_s:
            raise TimeoutError(f"rank 0 has not got on for {self._said['still_s']:.0f} s; {self._last()}")

    def _last(self) -> str:
        return f"its last word was that it was {self._said['doing']}"

    def _beat(self) -> None:
        """In a thread: rank 0 writes, the others read. It may hang with the store; nobody waits for it."""
        progress, stopped = self._progress, False
        for count in itertools.count():
            try:
                if self.is_source:
                    if not stopped and self._store.check([_STOP_KEY]):
                        stopped = True
                        self._stop(self._store.get(_STOP_KEY).decode())
                    said = {"still_s": progress.still_s(), "doing": progress.describe(), "changes": progress.changes}
                    self._store.set(_KEY, json.dumps(said | {"count": count, "stops": self._stops}))
                else:
                    said = json.loads(self._store.get(_KEY))
                    if said["count"] != self._said["count"]:
                        self._said, self._heard_at = said, time.monotonic()
                    if said["stops"] and not self._stops:
                        self._stop()
            except RuntimeError:  # the store is gone, and so is rank 0 or torchrun: others notice that too
                return
            if self._closed.wait(BEAT_S):
                return
