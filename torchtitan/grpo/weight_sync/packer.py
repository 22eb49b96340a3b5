"""Bucket by bucket from the trainer's shards to one flat tensor in Hugging Face form, ready for the wire.

Everything here runs on the push's stream and the weight-sync groups, so that a thread of its own can do it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.snapshot import Holding, SnapshotBuffer, Snapshots, canonical_name, primary_holdings
from torchtitan.grpo.weight_wire.buckets import Bucket, Checksum, TensorSpec, combine_checksums, plan_buckets


class Stopwatch:
    """Seconds by name: of the device for what a block enqueues on the current stream, of the clock on CPU."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reset(self) -> None:
        """Forget what was measured, for example by a publish that failed."""
        self._spans.clear()

    def take(self) -> dict[str, float]:
        """The sums since the last call. On CUDA the measured work must have finished."""
        seconds: dict[str, float] = {}
        for name, start, end in self._spans:
            span_s = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            seconds[name] = seconds.get(name, 0.0) + span_s
        self.reset()
        return seconds


def hugging_face_specs(
    model: nn.Module, adapter: Any, dtype: torch.dtype
) -> tuple[dict[str, TensorSpec], frozenset[str]]:
    """What is sent for each parameter, in the model's order, and which parameters the adapter rearranges.

    The adapter is asked with meta tensors: no weights move. A parameter that it drops (a tied output) is not sent.

    Returns:
        (parameter name -> spec under its Hugging Face name, names of parameters whose values the adapter changes).

    Raises:
        UserError: A parameter becomes several tensors (mixture of experts).
    """
    specs: dict[str, TensorSpec] = {}
    rearranged = set()
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name)
        probe = torch.empty(parameter.shape, dtype=dtype, device="meta")
        converted = adapter.to_hf({name: probe})
        if len(converted) > 1:
            raise UserError(
                f"[model] {name} becomes {len(converted)} Hugging Face tensors: weight sync sends one per parameter, "
                "so mixture-of-experts models are not supported"
            )
        for hf_name, value in converted.items():
            specs[name] = TensorSpec(hf_name, dtype, tuple(value.shape))
            if value is not probe:
                rearranged.add(name)
    return specs, frozenset(rearranged)


class Sender:
    """Snapshot, gather and pack. Collective to construct; `gather` is collective, `pack` is rank 0's.

    Args:
        model: Parallelised model; see `Snapshot` for when.
        adapter: State-dict adapter between torchtitan's names and Hugging Face's.
        dtype: Precision on the wire.
        limit_bytes: Payload limit of a bucket.
        num_buffers: Wire buffers on rank 0: bucket k uses buffer k % num_buffers, so the caller lets bucket
            k - num_buffers leave the wire before it packs bucket k. With several trainer ranks one more buffer holds
            the shards as they were gathered.
        verify: Put a checksum into each bucket's trailer.
        snapshots: Snapshot buffers; see `Snapshots`.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: Any,
        ranks: Ranks,
        dtype: torch.dtype,
        limit_bytes: int,
        num_buffers: int,
        verify: bool,
        snapshots: int = 2,
    ):
        specs, self._rearranged = hugging_face_specs(model, adapter, dtype)
        self._adapter = adapter
        self._ranks = ranks
        self._verify = verify
        self._names = list(specs)
        self.buckets = plan_buckets(list(specs.values()), limit_bytes)
        self.snapshots = Snapshots(model, self._names, dtype, snapshots)
        self.device = self.snapshots.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.stopwatch = Stopwatch(self.device)
        held = ranks.all_values(self.snapshots.held, "the exchange of shard placements")
        held = [{name: tuple(map(tuple, box)) for name, box in boxes.items()} for boxes in held]
        owned = primary_holdings(held, self.snapshots.shapes)
        self.snapshots.allocate(owned[ranks.rank])
        self._lay_out(owned, num_buffers)

    def _lay_out(self, owned: list[list[Holding]], num_buffers: int) -> None:
        """Slices of the snapshots and of the gathered shards, and the copies that put shards into wire buffers."""
        bucket_of = {}
        names = iter(self._names)
        self._bucket_names = [[next(names) for _ in bucket.tensors] for bucket in self.buckets]
        for bucket, bucket_names in zip(self.buckets, self._bucket_names, strict=True):
            bucket_of.update(dict.fromkeys(bucket_names, bucket.index))
        by_bucket: list[list[list[Holding]]] = [[[] for _ in owned] for _ in self.buckets]
        for rank, holdings in enumerate(owned):
            for holding in holdings:
                by_bucket[bucket_of[holding.name]][rank].append(holding)
        self._counts = [[sum(h.numel for h in rank) for rank in ranks] for ranks in by_bucket]
        own_counts = [counts[self._ranks.rank] for counts in self._counts]
        flats = [buffer.flat for buffer in self.snapshots.buffers]
        self._own = [list(flat.split(own_counts)) for flat in flats]
        if self._ranks.rank != 0:
            return
        if self._ranks.size > 1:
            scratch = flats[0].new_empty(max(sum(counts) for counts in self._counts))
            self._gathered = [[scratch[: sum(counts)] for counts in self._counts]] * len(flats)
        else:
            self._gathered = self._own
        slots = [
            torch.zeros(max(b.wire_bytes for b in self.buckets[i::num_buffers]), dtype=torch.uint8, device=self.device)
            for i in range(min(num_buffers, len(self.buckets)))
        ]
        self._wires = [slots[b.index % num_buffers][: b.wire_bytes] for b in self.buckets]
        self._full = [
            dict(zip(bucket_names, (view for _, view in bucket.views(wire)), strict=True))
            for bucket, bucket_names, wire in zip(self.buckets, self._bucket_names, self._wires, strict=True)
        ]
        self._copies = [
            [
                self._shard_copies(full, gathered, [h for rank in ranks for h in rank])
                for full, gathered, ranks in zip(self._full, of_buffer, by_bucket, strict=True)
            ]
            for of_buffer in self._gathered
        ]
        self._pads = [
            [wire[end:start] for end, start in bucket.gaps()]
            for bucket, wire in zip(self.buckets, self._wires, strict=True)
        ]
        self._checksum = Checksum(self.device, max(b.payload_bytes for b in self.buckets))
        self._checksums = torch.zeros(len(self.buckets), dtype=torch.int64, device=self.device)

    @staticmethod
    def _shard_copies(
        full: dict[str, torch.Tensor], gathered: torch.Tensor, holdings: list[Holding]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(targets, sources): boxes of the full tensors in the wire buffer, and the shards that belong there."""
        targets, sources, start = [], [], 0
        for holding in holdings:
            targets.append(full[holding.name][tuple(slice(low, low + length) for low, length in holding.slices)])
            sources.append(gathered[start : start + holding.numel].view(holding.shape))
            start += holding.numel
        return targets, sources

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run a block on the push's stream, in whichever thread; nothing to do on CPU."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            yield

    def gather(self, bucket: Bucket, snapshot: SnapshotBuffer) -> None:
        """Bring all ranks' shards of a bucket to rank 0. Collective: every rank, every bucket, in order."""
        if self._ranks.size == 1:
            return
        own = self._own[snapshot.index][bucket.index]
        gathered = self._gathered[snapshot.index][bucket.index] if self._ranks.rank == 0 else own
        what = f"the gather of bucket {bucket.index + 1} of {len(self.buckets)}"
        self._ranks.all_to_first(own, gathered, self._counts[bucket.index], what)

    @torch.no_grad()
    def pack(self, bucket: Bucket, snapshot: SnapshotBuffer) -> torch.Tensor:
        """Put the gathered shards into the bucket's wire buffer: whole tensors in Hugging Face form, then the trailer.

        Returns:
            uint8 [bucket.wire_bytes], valid until bucket + num_buffers is packed. On CUDA the current stream holds the
            work that fills it.
        """
        index = bucket.index
        with self.stopwatch.measure("pack"):
            targets, sources = self._copies[snapshot.index][index]
            torch._foreach_copy_(targets, sources)
            full = self._full[index]
            for name in self._bucket_names[index]:
                if name in self._rearranged:
                    (value,) = self._adapter.to_hf({name: full[name]}).values()
                    full[name].copy_(value)
            wire = self._wires[index]
            for pad in self._pads[index]:
                pad.zero_()  # the slot's last bucket may have had a tensor there
            trailer = bucket.trailer(wire)
            for field, value in enumerate((snapshot.version, index, bucket.payload_bytes, 0)):
                trailer[field].fill_(value)
            if self._verify:
                trailer[3] = self._checksum(wire[: bucket.payload_bytes])
            self._checksums[index] = trailer[3]
        return wire

    def expected_acknowledgement(self, version: int) -> list[int]:
        """What a server says of a version that it has in full (`receiver.ACK_FIELDS`). Waits for the device."""
        names = sum(len(bucket.tensors) for bucket in self.buckets)
        return [1, version, names, self.bytes, combine_checksums(self._checksums.tolist())]

    @property
    def bytes(self) -> int:
        """Payload bytes of one version."""
        return sum(bucket.payload_bytes for bucket in self.buckets)
