"""The trainer's end of one SGLang server: the steps of `ServerLink` through SGLang's own routes.

None of our code runs in the server. An HTTP reply acknowledges each bucket, and the reported version name the whole
version. From 0.5.23 on, SGLang tells checksums of what it holds: `held.SglangChecksums` compares a part of the tensors
before the server is resumed. SGLang skips tensors that its model does not know. The check of log-probabilities in the
first step finds a mismatch of models.
"""

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

import torch

from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.disk import DiskFeed
from torchtitan.grpo.weight_sync.held import SglangChecksums
from torchtitan.grpo.weight_sync.link import ServerLink
from torchtitan.grpo.weight_sync.push import Feed
from torchtitan.grpo.weight_wire.buckets import Bucket, plan_from_json
from torchtitan.grpo.weight_wire.rendezvous import Rendezvous
from torchtitan.grpo.weight_wire.transport import in_thread, wait
from torchtitan.grpo.weight_wire.transports import TRANSPORTS
from torchtitan.grpo.weight_wire.version_names import version_name

_DRAIN_LOOK_S = 0.02


class SglangServerLink(ServerLink):
    """See `ServerLink`. SGLang cannot drain while new requests wait there, so the trainer sends none meanwhile."""

    control: SglangControl

    def _drain(self) -> None:
        self._wait_until_idle()
        self._clear_cache = True  # no answer is using its keys and values
        self.control.pause("keep", clear_cache=True)

    def _wait_until_idle(self) -> None:
        """Have the server finish its running answers, and get no new ones."""
        self.hold()
        deadline = time.monotonic() + self.pause.drain_timeout_s
        while self.requests_in_flight():
            self.check()
            if time.monotonic() > deadline:
                raise self._drains_too_long()
            time.sleep(_DRAIN_LOOK_S)

    def _forget(self) -> None:
        """Drop cached prefixes, unless frozen answers use them. Then `extra_key` keeps versions apart. But a request
        that waits in SGLang's queue meanwhile finds those of the version before."""
        if self._clear_cache:
            with self._phase("apply"):
                self.control.forget()


class SglangLink(SglangServerLink):
    """A process group with the server."""

    _name = ""
    """Of the process group, "" while there is none."""
    _held: SglangChecksums

    def _connect(self, plan_info: dict) -> None:
        """The plan stays in the trainer."""
        self._held = SglangChecksums(self.control, plan_from_json(plan_info["plan"]))
        deadline = time.monotonic() + self.timeout_s
        world_size = 1 + self.control.world_size()
        self.control.check_takes_models()
        self._leave()
        name, address = f"torchtitan_grpo_{uuid.uuid4().hex[:12]}", self._own_address()
        device = "cuda/" if TRANSPORTS[self.backend].own_gpus else "cpu/"
        prefixes = name, f"{name}/", device  # as SGLang's torch nests them
        rendezvous = Rendezvous(self.backend, world_size, self.device, self.timeout_s, address, prefixes)

        def serve() -> None:
            self.control.join_group(name, self.backend, address, rendezvous.port, world_size)

        self._group = self._both_ends(serve, rendezvous, deadline)
        self._name = name

    def _leave(self) -> None:
        name, self._name = self._name, ""
        if name:
            with suppress(EngineError, UserError):  # a server that was restarted does not know the group
                self.control.leave_group(name)

    def update(self, feed: Feed, buckets: Sequence[Bucket], num_buffers: int) -> dict[str, float]:
        """See `ServerLink.update`. Buckets go one after the other. `apply` is 0, since it is part of `wire`."""
        with self._on_stream():
            self._version, self._update = feed.version, None
            with self._phase("start"):
                self.control.start_update()
            self._listens()
            with self._phase("verify"):
                self._held.begin()
            wire_started = time.perf_counter()
            for bucket in buckets:
                wire, filled = feed.bucket(bucket.index)
                wire = self._on_device(wire)
                last = bucket.index == len(buckets) - 1
                self._send(bucket, wire, filled, version_name(feed.version) if last else None)
                with self._phase("verify"):
                    self._held.add(bucket, wire)
                feed.release(bucket.index + 1)
            self.check()  # buckets of a version that was given up may have been overwritten
            self._forget()
            self.seconds |= {"wire": time.perf_counter() - wire_started, "apply": 0.0}
            self._finish(feed.version)
        return self.seconds

    def _finish(self, version: int) -> None:
        """Its checksums, then as ever. SGLang has a quantised layer's last form when the update has ended."""
        started = time.perf_counter()
        with self._phase("finish"):
            self.control.finish_update()
        with self._phase("verify"):
            self._held.check()
        self._take_into_service(version, started)

    def _send(self, bucket: Bucket, wire: torch.Tensor, filled: torch.cuda.Event | None, version: str | None) -> None:
        """Send one bucket: from the call that makes the server receive it to the reply that it has loaded it."""
        tensors = [(spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape)) for spec in bucket.tensors]
        flattened = not bucket.gaps()  # SGLang takes a bucket in one piece only if it has no padding
        sent = [wire[: bucket.payload_bytes]] if flattened else [view for _, view in bucket.views(wire)]
        with self._phase("transfer"):
            if filled is not None:
                torch.cuda.current_stream(self.device).wait_event(filled)
            deadline = time.monotonic() + self.timeout_s
            self._update = in_thread(
                lambda: self.control.receive(self._name, tensors, flattened, version, self.timeout_s),
                "weight-sync-update",
            )
            works = [self._group.broadcast(tensor) for tensor in sent]
            for work in works:
                wait(work, deadline, "the server to receive a bucket", self._raise_if_update_failed)
            self._wait_for_reply(deadline)
        self.bytes_done += bucket.payload_bytes


class SglangFolderLink(SglangServerLink):
    """An SGLang server that reads versions from a `DiskCopy`. There is no group."""

    def _connect(self, plan_info: dict) -> None:
        self.control.world_size()
        self.control.check_takes_models()

    def update(self, feed: DiskFeed, buckets: Sequence[Bucket], num_buffers: int) -> dict[str, float]:
        """Have the server read the feed's version."""
        self._version, self._update = feed.version, None
        self._listens()
        folder, name = str(feed.folder), version_name(feed.version)
        self._read(buckets, lambda: self.control.load_folder(folder, name, self.timeout_s))
        self._forget()
        self._take_into_service(feed.version)
        return self.seconds
