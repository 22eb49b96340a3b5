"""Publish a version of the weights to all servers: verified, bounded, and on every trainer rank."""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo import job_config
from torchtitan.grpo.engines.control import ServerControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.buckets import Bucket, bucket_bytes, plan_to_json
from torchtitan.grpo.weight_sync.link import ServerLink, WeightSyncError, in_thread
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.receiver import PROTOCOL
from torchtitan.grpo.weight_sync.sender import Sender

_PHASES = 8
"""Phases of rank 0, each bounded by `timeout_seconds`, that another rank may sit through in one wait: connecting anew,
pause, start, a bucket on the wire, acknowledgement, finish, version, resume."""


_LINK_PHASES = ("pause", "apply", "acknowledge")


class GatherError(WeightSyncError):
    """The trainer's own ranks did not come together; no server is to blame."""


@dataclass
class SyncReport:
    """One publish, as rank 0 saw it; the same on every rank.

    Attributes:
        bytes: Payload of one version, to each server.
        seconds: `snapshot`: copying the shards (device). `gather`: waiting for the other ranks' shards. `pack`:
            assembling and checksumming buckets (device). `wire`: from the first bucket on a wire to the last one
            received; gather and pack of later buckets happen within it. `pause`: the slowest server's pause and start.
            `apply`: from the last bucket received to the last one loaded. `acknowledge`: finish, version check and
            resume. `total`: the whole call.
    """

    version: int
    bytes: int
    buckets: int
    seconds: dict[str, float]


def device_memory_bytes(device: torch.device) -> int:
    """All memory of the device; of the machine for CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class WeightSync:
    """How weights leave the trainer. Construct, `connect`, `publish` and `close` on every trainer rank.

    `take` (the snapshot) and `push` (everything after it) are the two halves of `publish`: `push` uses neither the
    default process group nor the calling thread's CUDA stream.

    Args:
        model: Parallelised model, with its optimizer made.
        adapter: State-dict adapter to Hugging Face names.
        config: `[weight_sync]`.
        controls: The servers, on rank 0; [] elsewhere.
        device: The trainer's device.
        tied: The model's output is its embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: Any,
        config: job_config.WeightSync,
        controls: list[ServerControl],
        device: torch.device,
        tied: bool,
    ):
        on_cuda = device.type == "cuda"
        self._model, self._adapter, self._config, self._tied = model, adapter, config, tied
        self._device = device
        self._backend = config.transport if config.transport != "auto" else "nccl" if on_cuda else "gloo"
        if self._backend == "nccl" and not on_cuda:
            raise UserError('[weight_sync] transport = "nccl" needs a trainer on CUDA: use "auto" or "gloo"')
        dtype = config.dtype if config.dtype != "auto" else "bfloat16" if on_cuda else "float32"
        self._dtype = getattr(torch, dtype)
        self._links = [ServerLink(control, self._backend, device, config.timeout_seconds) for control in controls]
        self._sender: Sender | None = None

    def connect(self) -> None:
        """Plan the buckets and form one group per server. Collective over the trainer's ranks; bounded."""
        config = self._config
        self._ranks = Ranks(self._device, config.timeout_seconds, _PHASES * config.timeout_seconds)
        limit = bucket_bytes(
            device_memory_bytes(self._device), config.buffer_memory_ratio, config.num_buffers, config.bucket_mib_max
        )
        self._sender = Sender(
            self._model, self._adapter, self._ranks, self._dtype, limit, config.num_buffers, config.verify
        )
        if self._sender.device.type != self._device.type:
            raise UserError(
                f"[training] enable_cpu_offload: the weights lie on {self._sender.device}, the trainer computes on "
                f"{self._device}; weight sync needs them on the trainer's device"
            )
        sends_output = any(spec.name == "lm_head.weight" for b in self._sender.buckets for spec in b.tensors)
        if sends_output == self._tied:
            raise UserError(
                f"[model] tied is {self._tied}, but the adapter {'gives' if sends_output else 'drops'} lm_head.weight"
            )
        self._plan_info = {
            "protocol": PROTOCOL,
            "num_buffers": config.num_buffers,
            "verify": config.verify,
            "plan": plan_to_json(self._sender.buckets),
        }
        self._on_rank0_then_share("connect", self._connect_links)

    def publish(self, version: int) -> SyncReport:
        """Send the weights as they are now; returns when every server has acknowledged them and is resumed.

        Collective over the trainer's ranks.

        Raises:
            WeightSyncError: On every rank, naming server, phase, version and bytes. The servers that were being
                updated stay paused; the next publish connects to them anew.
        """
        started = time.perf_counter()
        self.take()
        report = self.push(version)
        report.seconds["total"] = time.perf_counter() - started
        return report

    def take(self) -> None:
        """Snapshot this rank's shards; see `Snapshot.take` for what must wait for it."""
        self._sender.snapshot.take()

    def push(self, version: int) -> SyncReport:
        """Send the last snapshot. Collective, on the weight-sync groups only."""
        with self._sender.on_stream():
            if self._ranks.rank != 0:
                for bucket in self._sender.buckets:
                    self._gather(bucket, version)
            shared = self._on_rank0_then_share(f"the outcome of version {version}", lambda: self._push(version))
        return SyncReport(**shared)

    def close(self) -> None:
        """Leave all groups with the servers. Waits for nobody."""
        for link in self._links:
            link.close()

    def _push(self, version: int) -> dict[str, Any]:
        left = deque(self._sender.buckets)
        try:
            return asdict(self._push_to_servers(version, left))
        except Exception as error:
            for link in self._links:
                link.close()
            if not isinstance(error, GatherError):
                while left:  # the other ranks send all their buckets before they ask how it went
                    self._gather(left.popleft(), version)
            raise

    def _push_to_servers(self, version: int, left: deque[Bucket]) -> SyncReport:
        """Pipeline: bucket k + 1 is gathered and packed while bucket k is on the wire."""
        self._connect_links()
        self._sender.stopwatch.reset()
        sender, links, clock = self._sender, self._links, time.perf_counter
        begun = [in_thread(lambda link=link: link.begin(version), "weight-sync-begin") for link in links]
        gather_s, wire_start = 0.0, None
        while left:
            for link in links:
                link.wait_in_flight(self._config.num_buffers - 1)
            gather_start = clock()
            bucket = left.popleft()
            self._gather(bucket, version)
            gather_s += clock() - gather_start
            wire = sender.pack(bucket, version)
            for future in begun:
                future.result()
            wire_start = wire_start or clock()
            for link in links:
                link.post(wire, bucket.payload_bytes)
        for link in links:
            link.wait_in_flight(0)
        wire_s = clock() - wire_start
        expected = sender.expected_acknowledgement(version)
        for link in links:
            link.acknowledge(expected)
        for future in [in_thread(lambda link=link: link.finish(version), "weight-sync-finish") for link in links]:
            future.result()
        seconds = {phase: max((link.seconds[phase] for link in links), default=0.0) for phase in _LINK_PHASES}
        seconds |= {"gather": gather_s, "pack": 0.0, "wire": wire_s, "snapshot": sender.snapshot.seconds()}
        seconds |= sender.stopwatch.take()
        return SyncReport(version, sender.bytes, len(sender.buckets), seconds)

    def _gather(self, bucket: Bucket, version: int) -> None:
        try:
            self._sender.gather(bucket)
        except (RuntimeError, TimeoutError) as error:
            raise GatherError("the servers", "gather", version, 0, error) from error

    def _connect_links(self) -> None:
        missing = [link for link in self._links if not link.connected]
        joining = [
            in_thread(lambda link=link: link.connect(self._plan_info), "weight-sync-connect") for link in missing
        ]
        for future in joining:
            future.result()

    def _on_rank0_then_share(self, what: str, call: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Rank 0's result of `call` on every rank, or its error raised on every rank."""
        if self._ranks.rank != 0:
            shared = self._ranks.share(None, what)
            if "error" in shared:
                raise WeightSyncError(*shared["error"])
            return shared
        try:
            result = call() or {}
        except GatherError:
            raise  # the other ranks are not here: they time out in the gather
        except Exception as error:
            named = isinstance(error, WeightSyncError)
            known = error if named else WeightSyncError("the servers", what, -1, 0, error)
            self._ranks.share({"error": [known.server, known.phase, known.version, known.bytes, known.cause]}, what)
            raise
        return self._ranks.share(result, what)
