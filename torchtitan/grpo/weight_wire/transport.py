"""A process group between trainer rank 0 and one server (I4), and bounded waits on it (I6).

It is built on torch's `ProcessGroupGloo` or `ProcessGroupNCCL`, or on `shared_memory`, over a TCPStore. Neither
end has to initialise `torch.distributed`, and no default group is touched. Needs torch only, so it runs in any server.
"""

import atexit
import os
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire.shared_memory import Shared, SharedMemoryGroup
from torchtitan.grpo.weight_wire.transports import ABANDONED, TRANSPORTS

T = TypeVar("T")

_POLL_S = 0.0002
_POLL_MAX_S = 0.05
_POLL_GROWTH = 1.1
"""A work's end is seen after a tenth more than it took, at most: the server stands still meanwhile."""
_LOOK_S = 0.25
_ANSWER_S = 2.0
PREFIX = "torchtitan_grpo"
"""Of all keys in the rendezvous store."""
_HERE = "here"
"""Prefix of the keys with which ranks say that they are about to join."""
_GIVEN_UP = "this end has given the transfer up"
_JOIN_POLL_S = 0.005
_NCCL_TIMEOUT_FACTOR = 10.0
_GLOO_TIMEOUT_MARGIN_S = 5.0
_ABORT_POLL_S = 0.05
_EXIT_S = 5.0
_constructing = threading.Lock()
_ending = threading.Lock()
_destroying: set[threading.Thread] = set()
_exiting = False


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Run a block on a stream, in any thread. Without one, as on a CPU, there is nothing to do."""
    if stream is None:
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(stream):
        yield


def in_thread(call: Callable[[], T], name: str) -> "Future[T]":
    """Run `call` in a daemon thread, so that a call that never returns blocks neither the caller nor the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who gives up the wait cannot cancel it
    threading.Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def _run(call: Callable[[], T], future: "Future[T]") -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del call, future  # the error's traceback has this frame: together they would keep each other alive


@contextmanager
def _no_nccl_teardown() -> Iterator[None]:
    # ProcessGroupNCCL reads this variable at construction. By default, its watchdog ends the process when a peer is
    # lost. A lost server must not end the trainer, nor a lost trainer the server: our own deadlines report the loss.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@atexit.register
def _destroy_no_more() -> None:
    # A thread that returns from a C++ destructor while Python shuts down crashes the process.
    global _exiting
    with _ending:
        _exiting = True
        threads = list(_destroying)
    deadline = time.monotonic() + _EXIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def join_nccl(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str
) -> "dist.ProcessGroupNCCL":
    """NCCL's group, whose watchdog never acts."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_NCCL_TIMEOUT_FACTOR * timeout_s)
    with _constructing, _no_nccl_teardown():
        return dist.ProcessGroupNCCL(store, rank, size, options)


def join_gloo(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str
) -> "dist.ProcessGroupGloo":
    """Gloo's group, bound to this machine's `address`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s + _GLOO_TIMEOUT_MARGIN_S)
    options._threads = 2
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def join_memory(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str
) -> SharedMemoryGroup:
    """A group within one machine, whose servers read the trainer's own buckets."""
    return SharedMemoryGroup(store, rank, size, device, timeout_s)


class Group:
    """Rank 0 is the trainer's; ranks 1.. are one server's workers.

    Joining blocks until all ranks have joined. Ranks first wait for one another in the store, bounded by `timeout_s`:
    that wait can be given up, while gloo's own set-up takes no word, and NCCL's does not even have a bound.

    The group's own timeout is longer than `timeout_s`. So a `wait` here fires first, and its error says what was waited
    for. With NCCL it is much longer: its watchdog must never act. Gloo can cancel an operation only by that timeout, so
    there it is only a little longer.
    """

    def __init__(
        self,
        backend: str,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        address: str,
        prefixes: Sequence[str] = (),
    ):
        """Join the group.

        Args:
            address: This machine's, on the route to the other end; gloo binds to it.
            prefixes: Where an engine's own code is the other end: its prefixes of keys in the store, wrapped in this
                order. It neither waits for all ranks before it joins nor runs a first all-reduce.

        Raises:
            TimeoutError, RuntimeError: The other end did not join in time, or failed.
        """
        if backend not in TRANSPORTS:
            raise ValueError(f"weight transfer backend {backend!r}: expected one of {', '.join(TRANSPORTS)}")
        self.transport = TRANSPORTS[backend]
        self.rank = rank
        self.size = size
        self.device = device
        for prefix in prefixes or (PREFIX,):
            store = dist.PrefixStore(prefix, store)
        self._store = store
        self.hosts: dist.Store | None = None  # of rank 0: it lives as long as the group
        self._next_look = 0.0
        self._look: Future[bool] | None = None  # under way
        self._works: list[dist.Work] = []  # operations that may be running, if they cannot be aborted
        if not prefixes:
            self._meet(timeout_s)
        self._pg = pkgutil.resolve_name(self.transport.join)(store, rank, size, device, timeout_s, address)
        if prefixes:
            return
        # The first collective creates NCCL's communicator. Run it here, where both ends are present.
        ranks = torch.ones(1, dtype=torch.int64, device=device)
        what = "the first all_reduce of a weight-transfer group"
        try:
            wait(self.all_reduce(ranks), time.monotonic() + timeout_s, what, rest=self.rest)
            if ranks.item() != size:
                raise RuntimeError(f"weight-transfer group: {ranks.item()} ranks answered, expected {size}")
        except BaseException:
            self.abort()  # not by the destructor, which waits
            raise

    def _meet(self, timeout_s: float) -> None:
        """Wait until every rank is about to join."""
        deadline = time.monotonic() + timeout_s
        self._store.set(f"{_HERE}/{self.rank}", "1")
        keys = [f"{_HERE}/{rank}" for rank in range(self.size)]
        pause_s = _JOIN_POLL_S
        while not self._has(keys, deadline):
            if self._has([ABANDONED], deadline):
                raise RuntimeError("the other end has given this connection up")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)

    def _has(self, keys: list[str], deadline: float) -> bool:
        """Whether the store has the keys. In a thread: `check` itself waits for a rank 0 that is frozen."""
        try:
            return self._asked(keys).result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError("timed out waiting for all ranks to join the weight-transfer group") from None

    def _asked(self, keys: list[str]) -> "Future[bool]":
        store = self._store
        return in_thread(lambda: store.check(keys), "weight-transfer-look")

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start sending `tensor` from rank 0 to every rank. Keep it alive and unchanged until the work is done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._started(lambda pg: pg.broadcast([tensor], options))

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Start a sum over all ranks, in place."""
        return self._started(lambda pg: pg.allreduce([tensor]))

    @property
    def lends(self) -> bool:
        """Whether buckets stay in rank 0's memory: ranks 1.. `borrow` and `give_back` them."""
        return self.transport.shares_memory

    def borrow(self) -> Shared:
        """For ranks 1..: the next bucket. The work has its `wire` once it is complete."""
        return self._started(lambda pg: pg.receive())

    def give_back(self, bucket: Shared) -> None:
        """For ranks 1..: the bucket has been loaded, or will be by what is on the current stream."""
        self._started(lambda pg: pg.release(bucket))

    def rest(self, seconds: float) -> None:
        """A pause between two looks at a work. It ends early if there is something to see, where that can be told."""
        pg = self._pg
        if isinstance(pg, SharedMemoryGroup):
            pg.rest(seconds)
        else:
            time.sleep(seconds)

    def _started(self, start: Callable[[Any], Any]) -> Any:
        pg = self._pg
        if pg is None:  # by another thread
            raise RuntimeError(_GIVEN_UP)
        work = start(pg)
        if not self.transport.can_abort:
            self._works = [w for w in self._works if not w.is_completed()] + [work]
        return work

    def raise_if_abandoned(self) -> None:
        """For waits of ranks 1..: raise if rank 0 has given up the group. NCCL itself does not report that.

        It does not wait for a rank 0 that is frozen: the wait's own deadline ends that.

        Raises:
            RuntimeError: Rank 0 has given up, or its store is gone, or this end has given up.
        """
        if self._pg is None:
            raise RuntimeError(_GIVEN_UP)
        if self._look is not None and self._look.done():
            look, self._look = self._look, None
            try:
                abandoned = look.result()
            finally:
                del look  # its error's traceback has this frame, and below it those that hold buffers
            if abandoned:
                raise RuntimeError("the trainer has given this transfer up")
            self._next_look = time.monotonic() + _LOOK_S
        if self._look is None and time.monotonic() >= self._next_look:
            self._look = self._asked([ABANDONED])

    def rank0_lives(self) -> bool:
        """For ranks 1..: whether rank 0 answers and has not given up the group. One that is frozen counts as gone."""
        if self._pg is None:
            return False
        try:
            return not self._asked([ABANDONED]).result(_ANSWER_S)
        except (RuntimeError, TimeoutError):
            return False

    def abort(self) -> None:
        """Give up the group without waiting for its peers. Running operations fail, or end by their own timeout.

        A thread does the work: NCCL's abort waits for its kernels to stop, and gloo's destructor waits for operations
        that only the group's timeout ends. The end of the process waits for neither.
        """
        pg, self._pg = self._pg, None
        if pg is None:
            return
        holder, works, self._works = [pg], self._works, []
        del pg

        def give_up() -> None:
            if self.rank == 0:
                with suppress(RuntimeError):
                    self._store.set(ABANDONED, "1")
            while not all(work.is_completed() for work in works):
                time.sleep(_ABORT_POLL_S)
            with _ending:
                if not _exiting:
                    _destroying.add(threading.current_thread())
            if threading.current_thread() not in _destroying:
                threading.Event().wait()  # forever, so that this frame's objects are never destroyed
            if self.transport.own_gpus:
                torch.cuda.set_device(self.device)
            if self.transport.can_abort:
                holder[0].abort()
            works.clear()
            holder.clear()
            _destroying.discard(threading.current_thread())

        threading.Thread(target=give_up, name="weight-sync-abort", daemon=True).start()


def wait(
    work: dist.Work | Shared,
    deadline: float,
    what: str,
    check: Callable[[], None] | None = None,
    rest: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for `work` until `deadline` (time.monotonic seconds). On CUDA, also order the current stream after it.

    `check` is called between polls. It may raise to end the wait, when another channel says that waiting is useless.
    `rest` pauses between two polls (`Group.rest`).

    Raises:
        TimeoutError: The deadline passed. The message says `what` was waited for. The work is still running: abort its
            group.
        RuntimeError: The transport failed (the peer closed the connection, for example).
    """
    pause_s = _POLL_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out waiting for {what}")
        if check is not None:
            check()
        rest(pause_s)
        pause_s = min(pause_s * _POLL_GROWTH, _POLL_MAX_S)
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"{what}: {error}") from error
