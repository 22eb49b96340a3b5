"""Packs the trainer's shards, bucket by bucket, into one flat tensor in Hugging Face form, ready for the wire.

A single rank whose tensors need no rearranging takes its snapshots in that form. Nothing is copied for them here.

Everything here runs on the push's own stream and the weight-sync groups, so a thread of its own can do it.
"""

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.finite import is_finite
from torchtitan.grpo.model.shards import Slices
from torchtitan.grpo.weight_sync.published import PublishedTensor, PublishedWeights
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.snapshot import (
    Holding,
    SnapshotBuffer,
    Snapshots,
    joined,
    overlap,
    primary_holdings,
    within,
)
from torchtitan.grpo.weight_wire.buckets import Bucket, Checksum, combine_checksums, plan_buckets
from torchtitan.grpo.weight_wire.transport import on_stream


class Stopwatch:
    """Seconds by name: on CUDA the device's, for the work that a block enqueues; on CPU the clock's."""

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

    def take(self) -> dict[str, float]:
        """Sums since the last call. On CUDA the measured work must have finished."""
        seconds: dict[str, float] = {}
        for name, start, end in self._spans:
            span_s = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            seconds[name] = seconds.get(name, 0.0) + span_s
        self._spans.clear()
        return seconds


def zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


class Piece(NamedTuple):
    """A rank's part of one published tensor; its box is in the parameter's coordinates."""

    tensor: PublishedTensor
    held: Holding


class Packer:
    """Snapshot, gather and pack. Constructing it and `gather` are collective; `pack` is for rank 0.

    Args:
        published: What to send.
        limit_bytes: Payload limit of a bucket.
        num_buffers: Wire buffers on rank 0. Bucket k uses buffer k % num_buffers, so the caller waits until bucket
            k - num_buffers has left the wire before it packs bucket k. With several trainer ranks, one more buffer
            holds the gathered shards. Where snapshots have the form of buckets, there is none, and a snapshot is held
            until its last bucket has left the wire.
        snapshots: Snapshot buffers; see `Snapshots`.
        allocate: Makes so many zero bytes on a device, for buckets.

    Attributes:
        buckets: The plan, a pure function of names, shapes, dtype and `limit_bytes` (I7).
        gathered: Buckets gathered since the start. It grows as long as weights move.
    """

    def __init__(
        self,
        published: PublishedWeights,
        ranks: Ranks,
        limit_bytes: int,
        num_buffers: int,
        snapshots: int = 2,
        allocate: Callable[[int, torch.device], torch.Tensor] = zeros,
    ):
        self._ranks = ranks
        self.gathered = 0
        self.buckets = plan_buckets([tensor.spec for tensor in published.tensors], limit_bytes)
        self.snapshots = Snapshots(published.parameters, published.dtype, snapshots)
        self.device = self.snapshots.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.stopwatch = Stopwatch(self.device)
        held = ranks.all_values(self.snapshots.held, "the exchange of shard placements")
        held = [{name: tuple(map(tuple, box)) for name, box in boxes.items()} for boxes in held]
        owned = primary_holdings(held, self.snapshots.shapes)
        pieces = self._pieces(published, owned)
        own = [piece.held for bucket in pieces for piece in bucket[ranks.rank]]
        self._as_sent = (
            ranks.size == 1
            and all(tensor.rearrange is None for tensor in published.tensors)
            and len(joined(own)) == len(published.tensors)  # stacked experts are copied as one
        )
        if self._as_sent:
            self._take_as_sent(own, allocate)
        else:
            self.snapshots.allocate(own)
            self._lay_out(published, pieces, num_buffers, allocate)
        if ranks.rank == 0:
            self._checksum = Checksum(self.device, max(b.payload_bytes for b in self.buckets))
            self._checksums = torch.zeros(len(self.buckets), dtype=torch.int64, device=self.device)
            self._finite = torch.ones(len(self.buckets), dtype=torch.bool, device=self.device)

    def _pieces(self, published: PublishedWeights, owned: list[list[Holding]]) -> list[list[list[Piece]]]:
        """For each bucket and rank: what the rank gives to it, in the order of the bucket's tensors.

        Rank 0 has all ranks' pieces. The others have their own only.
        """
        boxes: defaultdict[str, list[tuple[int, int, Slices]]] = defaultdict(list)  # start, rank, box
        for rank, holdings in enumerate(owned):
            for holding in holdings if self._ranks.rank in (0, rank) else ():
                boxes[holding.name].append((_first_dim(holding.slices)[0], rank, holding.slices))
        longest = {name: max(_first_dim(box)[1] for _, _, box in of_name) for name, of_name in boxes.items()}
        for of_name in boxes.values():
            of_name.sort()
        tensors = iter(published.tensors)
        pieces = []
        for bucket in self.buckets:
            of_ranks: list[list[Piece]] = [[] for _ in owned]
            for tensor in (next(tensors) for _ in bucket.tensors):
                of_name = boxes[tensor.parameter]
                start, length = _first_dim(tensor.box)
                # Only boxes that may overlap it: a parameter of E experts has E tensors and as many boxes as ranks.
                first = bisect.bisect_left(of_name, (start - longest.get(tensor.parameter, 0) + 1,))
                for _, rank, box in of_name[first : bisect.bisect_left(of_name, (start + length,))]:
                    if (shared := overlap(box, tensor.box)) is not None:
                        of_ranks[rank].append(Piece(tensor, Holding(tensor.parameter, shared)))
            pieces.append(of_ranks)
        return pieces

    def _take_as_sent(self, own: list[Holding], allocate: Callable[[int, torch.device], torch.Tensor]) -> None:
        """Snapshots are buckets."""
        self._wires = []
        for _ in range(self.snapshots.count):
            wires = [allocate(bucket.wire_bytes, self.device) for bucket in self.buckets]
            views = [bucket.views(wire) for bucket, wire in zip(self.buckets, wires, strict=True)]
            self.snapshots.add(own, [view for of_bucket in views for _, view in of_bucket])
            self._wires.append(wires)

    def _lay_out(
        self,
        published: PublishedWeights,
        pieces: list[list[list[Piece]]],
        num_buffers: int,
        allocate: Callable[[int, torch.device], torch.Tensor],
    ) -> None:
        """Slices of the snapshots and of the gathered shards, and the copies that put shards into wire buffers."""
        # Only rank 0 needs the other ranks' counts.
        self._counts = [[sum(piece.held.numel for piece in rank) for rank in ranks] for ranks in pieces]
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
            allocate(max(b.wire_bytes for b in self.buckets[i::num_buffers]), self.device)
            for i in range(min(num_buffers, len(self.buckets)))
        ]
        wires = [slots[b.index % num_buffers][: b.wire_bytes] for b in self.buckets]
        self._wires = [wires] * len(flats)
        tensors = {tensor.spec.name: tensor for tensor in published.tensors}
        full = [
            {name: view.view(tensors[name].box_shape) for name, view in bucket.views(wire)}
            for bucket, wire in zip(self.buckets, wires, strict=True)
        ]
        self._rearranged = [
            [(view, rearrange) for name, view in views.items() if (rearrange := tensors[name].rearrange) is not None]
            for views in full
        ]
        self._copies = [
            [
                self._shard_copies(views, gathered, [piece for rank in ranks for piece in rank])
                for views, gathered, ranks in zip(full, of_buffer, pieces, strict=True)
            ]
            for of_buffer in self._gathered
        ]
        self._pads = [
            [wire[end:start] for end, start in bucket.gaps()] for bucket, wire in zip(self.buckets, wires, strict=True)
        ]

    @staticmethod
    def _shard_copies(
        full: dict[str, torch.Tensor], gathered: torch.Tensor, pieces: list[Piece]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(targets, sources): boxes of the full tensors in the wire buffer, and the shards that belong there."""
        targets, sources, start = [], [], 0
        for tensor, held in pieces:
            targets.append(full[tensor.spec.name][within(held.slices, tensor.box)])
            sources.append(gathered[start : start + held.numel].view(held.shape))
            start += held.numel
        return targets, sources

    def on_stream(self) -> AbstractContextManager[None]:
        """Run a block on the push's stream, in any thread."""
        return on_stream(self._stream, self.device)

    def gather(self, bucket: Bucket, snapshot: SnapshotBuffer) -> None:
        """Bring all ranks' shards of a bucket to rank 0. Collective: every rank, every bucket, in order."""
        self.gathered += 1
        if self._ranks.size == 1:
            return
        own = self._own[snapshot.index][bucket.index]
        gathered = self._gathered[snapshot.index][bucket.index] if self._ranks.rank == 0 else own
        what = f"the gather of bucket {bucket.index + 1} of {len(self.buckets)}"
        self._ranks.all_to_first(own, gathered, self._counts[bucket.index], what)

    @torch.no_grad()
    def pack(self, bucket: Bucket, snapshot: SnapshotBuffer) -> torch.Tensor:
        """Put the gathered shards into the bucket's wire buffer: full tensors in Hugging Face form, then the trailer.

        Returns:
            uint8 [bucket.wire_bytes], valid until bucket + num_buffers is packed, or, where snapshots have the form of
            buckets, as long as the snapshot. On CUDA the work that fills it is on the current stream.
        """
        index = bucket.index
        with self.stopwatch.measure("pack"):
            wire = self._wires[snapshot.index][index]
            if not self._as_sent:
                self._fill(index, snapshot)
            trailer = bucket.trailer(wire)
            for field, value in enumerate((snapshot.version, index, bucket.payload_bytes, 0)):
                trailer[field].fill_(value)
            payload = wire[: bucket.payload_bytes]
            trailer[3], finite = self._checksum.with_finite(payload, self.snapshots.dtype)
            self._checksums[index] = trailer[3]
            self._finite[index] = finite if finite is not None else is_finite(payload.view(self.snapshots.dtype))
        return wire

    def _fill(self, index: int, snapshot: SnapshotBuffer) -> None:
        targets, sources = self._copies[snapshot.index][index]
        torch._foreach_copy_(targets, sources)
        for view, rearrange in self._rearranged[index]:
            value = rearrange(view).contiguous()  # memory of its own, unless the order of elements stays
            view.copy_(value.view(view.shape))
        for pad in self._pads[index]:
            pad.zero_()  # the buffer's previous bucket may have had a tensor there

    def expected_acknowledgement(self, version: int) -> list[int]:
        """The acknowledgement of a server that has all of a version (`receiver.ACK_FIELDS`). Waits for the device.

        Raises:
            UserError: A weight is infinite or NaN. No server may serve this version, and no later one will be better.
        """
        finite = self._finite.tolist()
        if not all(finite):
            bucket = self.buckets[finite.index(False)]
            raise UserError(
                f"version {version} of the weights is not finite and is not published: look between "
                f"{bucket.tensors[0].name} and {bucket.tensors[-1].name}. The policy has diverged: resume from the "
                "last checkpoint, with a lower [optimizer] lr"
            )
        names = sum(len(bucket.tensors) for bucket in self.buckets)
        return [1, version, names, self.bytes, combine_checksums(self._checksums.tolist())]

    @property
    def bytes(self) -> int:
        """Payload bytes of one version."""
        return sum(bucket.payload_bytes for bucket in self.buckets)


def _first_dim(box: Slices) -> tuple[int, int]:
    return box[0] if box else (0, 1)
