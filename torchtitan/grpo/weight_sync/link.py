"""The trainer's end of one server: its control routes, its process group, and the state of the current update."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import PlainError, UserError
from torchtitan.grpo.weight_sync.push import Feed
from torchtitan.grpo.weight_wire.buckets import Bucket
from torchtitan.grpo.weight_wire.receiver import ACK_FIELDS
from torchtitan.grpo.weight_wire.rendezvous import Rendezvous, address_towards
from torchtitan.grpo.weight_wire.transport import Group, in_thread, on_stream, wait
from torchtitan.grpo.weight_wire.version_names import origin, own_run, version_of

_CHECK_S = 0.05
_DRAIN_CHECK_S = 0.25
_SERVER_SAYS_WHY_S = 2.0
"""How long to wait, once the transport broke, for the server's HTTP error. It says more than "connection reset"."""


class WeightSyncError(PlainError, RuntimeError):
    """A version did not reach a server, or was not seen to. A server without all of it stays paused: it may hold a mix
    of old and new weights."""

    def __init__(self, server: str, phase: str, version: int, bytes_done: int, cause: object):
        self.server, self.phase, self.version, self.bytes = server, phase, version, bytes_done
        self.cause = str(cause)
        super().__init__(f"weight sync to {server}: phase {phase}, version {version}, {bytes_done} bytes: {cause}")


@dataclass(frozen=True)
class Pause:
    """How a server is paused for an update.

    Attributes:
        in_flight: Running answers are frozen and continue under the new weights. Otherwise the server finishes them.
        recompute_kv: Keys and values of answers that continue are computed again under the new weights.
        drain_timeout_s: Without `in_flight`, how long the server may take to finish its running answers.
    """

    in_flight: bool = True
    recompute_kv: bool = True
    drain_timeout_s: float = 600.0


@dataclass(eq=False)
class ServerLink:
    """One server, used from one thread at a time.

    A version takes `stop`, then `update`, which resumes the server. A failure raises WeightSyncError, gives up the
    group, if there is one, and leaves a server that has not all of the version paused, so it never serves a mix of two
    (I3). `connect` starts over.

        ServerLink
          ReceiverLink             servers that run weight_wire/receiver.py: vLLM, embedded
            GroupLink              over a process group
            disk.FolderLink        over files
          sglang_link.SglangServerLink    and its SglangLink, SglangFolderLink and SglangAdapterLink

    An engine's row in `engines/registry.py` names its link. All links take these arguments.

    Args:
        control: The server's control routes.
        backend: "nccl", "gloo" or "ipc"; not used by links over files.
        device: Where buckets lie.
        timeout_s: Bound of each phase (I6).
        pause: How the server is paused.
        check: Called in every wait. What it raises ends the wait and leaves the link as it is.
        hold: Keeps new requests from the server until it is admitted again; for engines that cannot drain on their own.
        requests_in_flight: Our requests that the server has not answered; for the same engines.
        versions_in_use: Versions that our requests name; for engines that have several at once. None: not known now.
    """

    control: HttpControl
    backend: str
    device: torch.device
    timeout_s: float
    pause: Pause
    check: Callable[[], None]
    hold: Callable[[], None]
    requests_in_flight: Callable[[], int]
    versions_in_use: Callable[[], set[int] | None] = set

    def __post_init__(self) -> None:
        self.url = self.control.url
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._group: Group | None = None
        self._update: Future[None] | None = None
        self._in_flight: deque[tuple[dist.Work, int, float]] = deque()
        self._version = -1
        self._buckets = 0
        self._started = self._stopped = 0.0
        self._resumed: float | None = None  # when the server did it by itself
        self._clear_cache = True
        self._given = False  # a whole version, on this connection
        self.bytes_done = 0
        self.seconds: dict[str, float] = {}

    def connect(self, plan_info: dict) -> None:
        """Form the connection with the server. `plan_info`: the fields of `InitInfo` that all servers share."""
        self._buckets = len(plan_info["plan"])
        self._given = False
        self._update = None  # the last update's error must not explain failures from here on
        with self._phase("connect"):
            self._connect(plan_info)

    def _connect(self, plan_info: dict) -> None:
        raise NotImplementedError

    def _own_address(self) -> str:
        """This machine's address on the route to the server."""
        where = urlsplit(self.url)
        assert where.hostname is not None  # config/urls.py refuses addresses without a host
        return address_towards(where.hostname, where.port or 80)

    def _both_ends(self, serve: Callable[[], None], rendezvous: Rendezvous, deadline: float) -> Group:
        """Make the call that has the server join, and wait until it has returned and this end has joined too."""
        served, joined = in_thread(serve, "weight-sync-init"), rendezvous.joined
        try:
            while not (served.done() and joined.done()):
                if served.done():
                    served.result()  # raises the server's error now: it will not join
                self.check()
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out waiting for the server to join the weight-transfer group")
                time.sleep(0.005)
            served.result()
            return rendezvous.group()
        except BaseException:
            rendezvous.give_up(served)
            raise
        finally:
            del served, joined  # their error's traceback has this frame

    def stop(self, version: int) -> None:
        """Pause the server, as `Pause` says, for an update to this version or a newer one."""
        self._version, self.bytes_done, self.seconds = version, 0, {}
        # The prefix cache is keyed by version. Clear what an earlier run cached under the same numbers.
        self._clear_cache = self.pause.recompute_kv or not self._given
        self._in_flight.clear()
        self._started, self._resumed = time.perf_counter(), None
        if self.control.asleep:  # and then pause: one that was restarted is awake, and goes on
            with self._phase("wake up"):
                self.control.wake_up("weights")
            self.seconds["wake"] = time.perf_counter() - self._started
        if self.pause.in_flight:
            with self._phase("pause"):
                self.control.pause("keep", self._clear_cache)
        else:
            with self._phase("drain"):
                self._drain()
            self.seconds["drain"] = time.perf_counter() - self._started
        self._stopped = time.perf_counter()

    def _drain(self) -> None:
        """Have the server finish its running answers."""
        deadline = time.monotonic() + self.pause.drain_timeout_s
        reply_s = self.pause.drain_timeout_s + self.timeout_s  # the wait below fires first, since its error says more
        paused = in_thread(lambda: self.control.pause("wait", self._clear_cache, reply_s), "weight-sync-drain")
        while not paused.done():
            self.check()
            if time.monotonic() > deadline:
                raise self._drains_too_long()
            futures.wait([paused], timeout=_DRAIN_CHECK_S)
        paused.result()

    def _drains_too_long(self) -> TimeoutError:
        return TimeoutError(
            f"timed out: its running answers took over {self.pause.drain_timeout_s:g} s ([rollout] "
            "request_timeout_seconds, with [async_grpo] in_flight_weight_updates = false)"
        )

    def update(self, feed: Any, buckets: Sequence[Bucket], num_buffers: int) -> dict[str, float]:
        """Bring the server, which `stop` paused, to the feed's version, and resume it.

        Args:
            feed: What the transport's `VersionCopy` gives; over a group a `Feed`.

        Returns:
            Seconds by phase. `pause`: from `stop` until the server is told to receive. `wire`: from then until it had
            received the last bucket. `apply`: until it had loaded the last. `acknowledge`: reply, or else version check
            and resume. `total`: all of these. `stopped`: from the end of `stop` until the server was resumed, the time
            in which it generated nothing. `wake`, of a server that slept: until it had its memory again. `drain`,
            without `Pause.in_flight`: the part of `pause` in which it finished its running answers.
        """
        raise NotImplementedError

    def _listens(self) -> None:
        """The server may receive."""
        self.seconds["pause"] = time.perf_counter() - self._started

    def _read(self, buckets: Sequence[Bucket], load: Callable[[], None]) -> None:
        """Have the server read a version from files: `load` waits for it. `wire` is 0, since reading is part of
        `apply`."""
        started = time.perf_counter()
        with self._phase("apply"):
            load()
        self.check()  # files of a version that was given up may have been torn
        self.seconds |= {"wire": 0.0, "apply": time.perf_counter() - started}
        self.bytes_done = sum(bucket.payload_bytes for bucket in buckets)

    def _take_into_service(self, version: int, started: float | None = None) -> None:
        """Check the version that the server reports, then resume it; unless it did so by itself."""
        started = started or time.perf_counter()
        if self._resumed is None:
            self._check_version(version)
            if self.control.asleep:  # nothing samples before the version is whole
                waking = time.perf_counter()
                with self._phase("wake up"):
                    self.control.wake_up("kv_cache")
                self.seconds["wake"] += time.perf_counter() - waking
            with self._phase("resume"):
                self.control.resume()
        self._given = True
        now = time.perf_counter()
        stopped = (self._resumed or now) - self._stopped
        self.seconds |= {"acknowledge": now - started, "stopped": stopped, "total": now - self._started}

    def _check_version(self, version: int) -> None:
        with self._phase("finish"):
            reported = self.control.weight_version()
            if reported is not None and version_of(reported) != version:
                raise RuntimeError(
                    f"the server reports weights {reported!r} after version {version}: {origin(reported)}"
                )

    def close(self) -> None:
        """Give up the group without waiting for the server."""
        group, self._group = self._group, None
        self._in_flight.clear()
        if group is not None:
            group.abort()

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            self.close()
            raise
        except (RuntimeError, OSError) as error:  # TimeoutError is an OSError
            cause = str(error)
            if not isinstance(error, TimeoutError) and self._update is not None:
                cause = self._update_failure() or cause
            self.close()
            raise WeightSyncError(self.url, phase, self._version, self.bytes_done, cause) from error

    def _update_failure(self) -> str:
        """The error of the server's update call, if it fails soon; else ""."""
        with suppress(TimeoutError):
            return str(self._update.exception(_SERVER_SAYS_WHY_S) or "")
        return ""

    def _on_stream(self) -> AbstractContextManager[None]:
        """Run a block on this server's own stream, so that a server that does not receive delays no other's copies."""
        return on_stream(self._stream, self.device)

    def _on_device(self, wire: torch.Tensor) -> torch.Tensor:
        """A bucket where buckets lie: one of a `MemoryCopy` is in host memory, and may find no room on the device."""
        with self._phase("transfer"):
            return wire.to(self.device, non_blocking=True)

    def _raise_if_update_failed(self) -> None:
        """For waits on a collective: if the server's update call has failed, the collective will never complete."""
        self.check()
        if self._update.done():
            self._update.result()

    def _wait_for_reply(self, deadline: float) -> None:
        """Wait for the server's update call to return. Raises what it raised."""
        update = self._update
        assert update is not None  # the call has begun
        while not update.done():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError("timed out waiting for the server's update call to return")
            futures.wait([update], timeout=_CHECK_S)
        update.result()


class ReceiverLink(ServerLink):
    """A server that runs `weight_wire.receiver`. One call covers the whole plan, and resumes a server that is awake."""

    control: VllmControl

    def _begin(self, update_info: dict) -> None:
        """Have the server listen (`receiver.UpdateInfo`)."""
        self._version = update_info["version"]
        self._listens()
        update_info = update_info | {"run": own_run(), "resume": not self.control.asleep}
        # One call covers the whole plan. Each bucket is bounded by `timeout_s`, and those bounds fire before this one.
        update_timeout_s = (self._buckets + 2) * self.timeout_s
        self._update = in_thread(lambda: self.control.update(update_info, update_timeout_s), "weight-sync-update")

    def _wait_for_reply(self, deadline: float) -> None:
        super()._wait_for_reply(deadline)
        if not self.control.asleep:
            self._resumed = time.perf_counter()


class GroupLink(ReceiverLink):
    """A process group with the server. An update begins (the server's receive loop starts), posts each bucket with at
    most `num_buffers` on the wire, and waits for the acknowledgement and the reply."""

    def _connect(self, plan_info: dict) -> None:
        deadline = time.monotonic() + self.timeout_s
        world_size = 1 + self.control.world_size()
        address = self._own_address()
        rendezvous = Rendezvous(self.backend, world_size, self.device, self.timeout_s, address)
        info = plan_info | {"backend": self.backend, "master_address": address, "master_port": rendezvous.port}
        info |= {"rank_offset": 1, "world_size": world_size}
        self._group = self._both_ends(lambda: self.control.init_transfer(info), rendezvous, deadline)

    def update(self, feed: Feed, buckets: Sequence[Bucket], num_buffers: int) -> dict[str, float]:
        """See `ServerLink.update`."""
        with self._on_stream():
            self._begin({"version": feed.version})
            wire_started = time.perf_counter()
            for bucket in buckets:
                wire, filled = feed.bucket(bucket.index)
                wire = self._on_device(wire)
                self._post(wire, bucket.payload_bytes, filled)
                self._wait_in_flight(num_buffers - 1)
                feed.release(bucket.index + 1 - len(self._in_flight))
            self._wait_in_flight(0)
            feed.release(len(buckets))
            self.seconds["wire"] = time.perf_counter() - wire_started
            acknowledged = self._acknowledge(feed.expected())
            self._take_into_service(feed.version, acknowledged)
        return self.seconds

    def _post(self, wire: torch.Tensor, payload_bytes: int, filled: torch.cuda.Event | None) -> None:
        """Put a bucket on the wire. It must not change until `_wait_in_flight` has waited for it."""
        with self._phase("transfer"):
            if filled is not None:
                torch.cuda.current_stream(self.device).wait_event(filled)
            deadline = time.monotonic() + self.timeout_s
            self._in_flight.append((self._group.broadcast(wire), payload_bytes, deadline))

    def _wait_in_flight(self, at_most: int) -> None:
        """Wait until at most that many buckets are on the wire. Each is bounded from the moment it was posted."""
        with self._phase("transfer"):
            while len(self._in_flight) > at_most:
                work, payload_bytes, deadline = self._in_flight[0]
                wait(work, deadline, "the server to receive a bucket", self._raise_if_update_failed, self._group.rest)
                self._in_flight.popleft()
                self.bytes_done += payload_bytes

    def _acknowledge(self, expected: list[int]) -> float:
        """Wait until every rank of the server has acknowledged the full version and its update call has returned. Both
        ends compare. Returns when the acknowledgement had come."""
        self.check()  # buckets of a version that was given up may have been overwritten
        started = time.perf_counter()
        with self._phase("acknowledge"):
            deadline = time.monotonic() + self.timeout_s
            table = torch.zeros(self._group.size, ACK_FIELDS, dtype=torch.int64)
            table[0] = torch.tensor(expected)
            table = table.to(self.device)
            what = "the server's acknowledgement"
            wait(self._group.all_reduce(table), deadline, what, self._raise_if_update_failed, self._group.rest)
            for rank, row in enumerate(table.tolist()[1:]):
                if row[0] == 0:
                    self._wait_for_reply(deadline)
                if row != expected:
                    raise RuntimeError(
                        f"server rank {rank} acknowledged [ok, version, tensors, bytes, checksum] {row}, "
                        f"expected {expected}"
                    )
            acknowledged = time.perf_counter()
            self.seconds["apply"] = acknowledged - started
            self._wait_for_reply(deadline)
        return acknowledged
