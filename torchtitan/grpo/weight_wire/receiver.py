"""The server's end of a weight update: receive buckets, verify each, hand tensors to the engine, acknowledge.

Imports torch and safetensors only, so it runs in any inference server's environment, without torchtitan.

There are two messages, both plain JSON, sent through the server's own HTTP routes:

`POST /init_weight_transfer_engine {"init_info": {...}}`, once per connection, with the fields of `InitInfo`:
    {"protocol": 5, "run": "gpu01-4711-5f3a2c", "backend": "gloo", "master_address": "127.0.0.1", "master_port": 40123,
     "rank_offset": 1, "world_size": 2, "num_buffers": 2, "timeout_seconds": 300.0,
     "plan": [[["model.embed_tokens.weight", "float32", [512, 64], 0], ...], ...]}
With LoRA also `"adapter": {...}`, the fields of `adapters.AdapterInfo`: the plan is one of adapters then.

`POST /update_weights {"update_info": {"version": 7, "run": "gpu01-4711-5f3a2c", "resume": true}}`, once per version and
to a paused server, with the fields of `UpdateInfo`. All buckets move within this one call. If the acknowledgement is
what the trainer expects, it takes the version into service. Otherwise it fails, and the server stays paused.

With backend "disk" there is no group. `update_info` names the folder that holds the version, and says what a server
that has all of it would acknowledge. The HTTP reply is the acknowledgement.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from torchtitan.grpo.weight_wire.bucket_files import read_bucket
from torchtitan.grpo.weight_wire.buckets import Bucket, Checksum, combine_checksums, plan_from_json
from torchtitan.grpo.weight_wire.refusals import PROTOCOL, other_protocol
from torchtitan.grpo.weight_wire.rendezvous import address_towards, join_store
from torchtitan.grpo.weight_wire.shared_memory import Shared
from torchtitan.grpo.weight_wire.transport import Group, wait
from torchtitan.grpo.weight_wire.transports import TRANSPORTS
from torchtitan.grpo.weight_wire.version_names import lives, owned_by

ACK_FIELDS = 5
"""Per rank: 1 if every check passed, weight version, tensor count, payload bytes, combined checksum."""

Load = Callable[[list[tuple[str, torch.Tensor]]], None]
LoadBucket = Callable[[Bucket, torch.Tensor], None]


@dataclass
class InitInfo:
    """What a server needs to connect: the run, the rendezvous, the ranks and the plan (`buckets.plan_to_json`).

    `adapter`: if the plan is one of LoRA adapters, the fields of `adapters.AdapterInfo`.
    """

    protocol: int
    run: str
    backend: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    num_buffers: int
    timeout_seconds: float
    plan: list[list[list]]
    adapter: dict[str, Any] | None = None

    def __new__(cls, protocol: int = PROTOCOL, **_: Any) -> Self:
        """Looks at the protocol before the other fields, which may be others with another one."""
        if protocol != PROTOCOL:
            raise ValueError(other_protocol(protocol, PROTOCOL))
        return super().__new__(cls)


@dataclass
class UpdateInfo:
    """What a server needs per update. With `resume` it goes on by itself. With backend "disk", `folder` holds the
    version's files, and `expected` is the acknowledgement of all of them (ACK_FIELDS)."""

    version: int
    run: str = ""
    resume: bool = False
    folder: str = ""
    expected: list[int] | None = None


class Receiver:
    """One server rank's end of the group with the trainer. Constructing it blocks until the trainer has joined.

    Args:
        init_info: Fields of `InitInfo`.
        device: Where weights arrive: the device that the engine computes on.
        rank_in_server: This worker's index among the server's `world_size - rank_offset` workers. Its rank in the
            group is `rank_in_server + rank_offset`.

    Raises:
        ValueError: The trainer has another protocol, or its plan is broken.
        TimeoutError, RuntimeError: The trainer did not join within `timeout_seconds`, or is gone.
    """

    def __init__(self, init_info: dict, device: torch.device, rank_in_server: int = 0):
        info = InitInfo(**init_info)
        self.info = info
        self.device = torch.device(device)
        self.buckets = plan_from_json(info.plan)
        self._checksum = Checksum(self.device, max(bucket.payload_bytes for bucket in self.buckets))
        self._group: Group | None = None
        self._nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        if info.backend in TRANSPORTS and not TRANSPORTS[info.backend].join:
            return
        store = join_store(info.master_address, info.master_port, info.timeout_seconds)
        self._group = Group(
            info.backend,
            store,
            rank_in_server + info.rank_offset,
            info.world_size,
            self.device,
            info.timeout_seconds,
            address_towards(info.master_address, info.master_port),
        )

    def yield_to(self, run: str) -> None:
        """Leave the group, since a trainer of `run` connects now.

        Raises:
            ValueError: That is another run, and the one that this end belongs to still has the server.
        """
        owner = self.info.run
        if run != owner and (lives(owner) if self._group is None else self._group.rank0_lives()):
            raise ValueError(owned_by(owner))
        self.close()

    @property
    def names(self) -> list[str]:
        """Hugging Face names of all tensors of an update, in their order."""
        return [spec.name for bucket in self.buckets for spec in bucket.tensors]

    def receive(
        self, update_info: dict, load: Load, complete: Callable[[], None] | None = None, copies: bool = False
    ) -> None:
        """Receive one version. The engine must be paused, since a failure leaves it with a mix of old and new weights.

        Args:
            update_info: Fields of `UpdateInfo`.
            load: Called once per bucket, in plan order, with (name, tensor) pairs in checkpoint form: full tensors,
                Hugging Face names. Each bucket has a fresh buffer, so the engine may keep the tensors; unless `copies`.
            complete: Called after the last bucket and before the acknowledgement. It raises if the engine finds that a
                tensor is missing.
            copies: See `receive_buckets`.

        Raises:
            ValueError: A bucket was torn: wrong version, index, size or checksum. It is not given to `load`. Or what
                came is not all of what the trainer sent.
            TimeoutError, RuntimeError: The trainer is slow or gone. The group is given up; the trainer connects again.
            Anything that `load` or `complete` raises.

        After a torn bucket or a failed load, the remaining buckets are received and discarded, and the acknowledgement
        says "no". Both ends stay in step, and the trainer may repeat the update over the same group.
        """
        self.receive_buckets(update_info, lambda bucket, wire: load(bucket.views(wire)), complete, copies)

    def receive_buckets(
        self, update_info: dict, load: LoadBucket, complete: Callable[[], None] | None = None, copies: bool = False
    ) -> None:
        """As `receive`, but `load` gets whole buckets: a part of the plan, and its bytes (uint8).

        Args:
            copies: `load` copies what it needs and keeps no view. With backend "ipc" it may then read the trainer's
                own memory, and gets no buffer of its own.
        """
        info = UpdateInfo(**update_info)
        if self._group is None:
            self._read_buckets(info, load, complete)
            return
        try:
            failure = self._receive_buckets(info.version, load, complete, copies)
        except (TimeoutError, RuntimeError):
            self.close()
            raise
        if failure is not None:
            raise failure

    def _receive_buckets(
        self, version: int, load: LoadBucket, complete: Callable[[], None] | None, copies: bool
    ) -> Exception | None:
        posted: deque = deque()
        checksums: list[int] = []
        names = received_bytes = 0
        failure: Exception | None = None
        for bucket in self.buckets[: self.info.num_buffers]:
            posted.append(self._post(bucket))
        for bucket in self.buckets:
            wire, work = posted.popleft()
            deadline = time.monotonic() + self.info.timeout_seconds
            where = f"bucket {bucket.index + 1} of {len(self.buckets)}"
            what = f"{where} of version {version} from the trainer, after {received_bytes} bytes"
            wait(work, deadline, what, self._group.raise_if_abandoned, self._group.rest)
            # Post the next receive before loading this bucket, so the wire never waits for the engine.
            if bucket.index + self.info.num_buffers < len(self.buckets):
                posted.append(self._post(self.buckets[bucket.index + self.info.num_buffers]))
            if failure is None:
                try:
                    if isinstance(work, Shared):
                        wire = work.wire if copies else work.wire.clone()
                    checksums.append(self._verify(bucket, wire, version))
                    load(bucket, wire)
                    names += len(bucket.tensors)
                    received_bytes += bucket.payload_bytes
                except Exception as error:  # raised once both ends are in step again
                    failure = error
            if isinstance(work, Shared):
                self._group.give_back(work)
        if failure is None and complete is not None:
            try:
                complete()
            except Exception as error:
                failure = error
        own = [int(failure is None), version, names, received_bytes, combine_checksums(checksums)]
        expected = self._acknowledge(own)
        if failure is None and own != expected:
            failure = ValueError(f"[ok, version, tensors, bytes, checksum] {own} is not the trainer's {expected}")
        return failure

    def _read_buckets(self, info: UpdateInfo, load: LoadBucket, complete: Callable[[], None] | None) -> None:
        checksums: list[int] = []
        for bucket in self.buckets:
            wire = read_bucket(info.folder, bucket).to(self.device)
            checksums.append(self._verify(bucket, wire, info.version))
            load(bucket, wire)
        names, payload_bytes = len(self.names), sum(bucket.payload_bytes for bucket in self.buckets)
        found = [1, info.version, names, payload_bytes, combine_checksums(checksums)]
        if found != info.expected:
            raise ValueError(
                f"version {info.version} in {info.folder} is not the trainer's: [ok, version, tensors, bytes, "
                f"checksum] {found}, expected {info.expected}"
            )
        if complete is not None:
            complete()

    def _post(self, bucket: Bucket) -> tuple[torch.Tensor, torch.distributed.Work | Shared]:
        if self._group.lends:
            return self._nothing, self._group.borrow()
        wire = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=self.device)
        return wire, self._group.broadcast(wire)

    def _verify(self, bucket: Bucket, wire: torch.Tensor, version: int) -> int:
        """The bucket's checksum. Raises ValueError if the bucket is not what the plan says."""
        own = self._checksum(wire[: bucket.payload_bytes])
        fields = torch.cat([bucket.trailer(wire), own.view(1)])
        got_version, got_index, got_bytes, sent_checksum, own_checksum = fields.tolist()
        where = f"bucket {bucket.index + 1} of {len(self.buckets)} of version {version} refused"
        if (got_version, got_index, got_bytes) != (version, bucket.index, bucket.payload_bytes):
            raise ValueError(
                f"{where}: its trailer says version {got_version}, bucket {got_index + 1}, {got_bytes} bytes, expected "
                f"version {version}, bucket {bucket.index + 1}, {bucket.payload_bytes} bytes"
            )
        if own_checksum != sent_checksum:
            raise ValueError(f"{where}: checksum of its {got_bytes} bytes is {own_checksum}, sent {sent_checksum}")
        return sent_checksum

    def _acknowledge(self, fields: list[int]) -> list[int]:
        """Add this rank's row to a table [world_size, ACK_FIELDS]. Its first row is what the trainer expects."""
        table = torch.zeros(self._group.size, ACK_FIELDS, dtype=torch.int64)
        table[self._group.rank] = torch.tensor(fields)
        table = table.to(self.device)
        deadline = time.monotonic() + self.info.timeout_seconds
        what = f"the trainer to take the acknowledgement of version {fields[1]}"
        wait(self._group.all_reduce(table), deadline, what, self._group.raise_if_abandoned, self._group.rest)
        return table[0].tolist()

    def close(self) -> None:
        """Leave the group without waiting."""
        if self._group is not None:
            self._group.abort()
