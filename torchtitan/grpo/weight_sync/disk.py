"""Weights through a folder, for servers that can read the trainer's files but cannot join a process group with it.

A version is a folder of safetensors files, one per bucket. It is written under another name and renamed when it is
complete, so nobody reads a partial version. Servers check it by the same plan, trailers and checksums as a broadcast.
"""

import fcntl
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.version_names import own_run
from torchtitan.grpo.weight_sync.link import ServerLink
from torchtitan.grpo.weight_sync.push import VersionCopy
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, block_layers, peft_config
from torchtitan.grpo.weight_wire.bucket_files import check_bucket, write_bucket
from torchtitan.grpo.weight_wire.buckets import Bucket

_MEMORY = Path("/dev/shm")
"""A file system in memory."""
_PREFIX = "torchtitan-grpo-"
_IN_USE = "in-use"
"""A file that the owner of a folder keeps locked. The lock ends with the owner's process, however that ends."""


class DiskCopy(VersionCopy):
    """A full version in files.

    Args:
        folder: Where versions are kept. "" makes a folder in memory (/dev/shm), or else a temporary one.
        buckets: The plan.
        adapter: If the plan is one of LoRA adapters: how they apply. A version is then a folder as `peft` writes it,
            for SGLang.
        verify: Read an adapter's files again before a server may. SGLang would not check them.

    Raises:
        UserError: The folder has no room.
    """

    def __init__(
        self, folder: str, buckets: Sequence[Bucket], adapter: AdapterInfo | None = None, verify: bool = True
    ) -> None:
        super().__init__()
        self._config, self._checks = "", adapter is not None and verify
        if adapter is not None:
            layers = block_layers(spec.name for bucket in buckets for spec in bucket.tensors)
            self._config = json.dumps(peft_config(adapter.rank, adapter.alpha, layers, adapter.base_name))
        self._own = not folder
        if self._own:
            parent = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
            _remove_unowned(parent)
            self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = (self._folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self._folder / "lock").rename(self._folder / _IN_USE)  # locked before others look for it
        else:
            self._folder = Path(folder).absolute()
            self._folder.mkdir(parents=True, exist_ok=True)
        self._buckets = buckets
        self._part = self._whole = self._folder / "version.part"
        self._remove_versions()  # an earlier run's
        self._check_space()

    def _check_space(self) -> None:
        """A version is written beside the one before it."""
        needed = 2 * sum(bucket.wire_bytes for bucket in self._buckets)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            self.close()
            raise UserError(
                f'[weight_sync] transport = "disk" needs {needed:,} bytes in {self._folder} for two versions of the '
                f"weights, and {free:,} are free: set [weight_sync] disk_folder to a folder with more room"
            )

    def begin(self) -> None:
        super().begin()
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir()
        if self._config:
            (self._part / "adapter_config.json").write_text(self._config, encoding="utf-8")

    def store(self, index: int, wire: torch.Tensor) -> None:
        write_bucket(self._part, self._buckets[index], wire.cpu())
        if self._checks:
            check_bucket(self._part, self._buckets[index])

    def complete(self, version: int, expected: list[int]) -> None:
        old = list(self._folder.glob("version-*"))
        self._whole = self._folder / f"version-{version:08d}"
        shutil.rmtree(self._whole, ignore_errors=True)  # the same version, published again
        self._part.rename(self._whole)
        for folder in old:
            if folder != self._whole:
                shutil.rmtree(folder, ignore_errors=True)
        super().complete(version, expected)

    def feed(self) -> "DiskFeed":
        return DiskFeed(self.version, self._whole)

    def _remove_versions(self) -> None:
        for folder in [self._part, *self._folder.glob("version-*")]:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._remove_versions()
        if self._own:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()


def _remove_unowned(parent: Path) -> None:
    """Remove folders that killed trainers left behind. Each one keeps a whole model in memory."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with (folder / _IN_USE).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, another user's, or just being made
            continue


@dataclass(frozen=True)
class DiskFeed:
    """A version in a folder, which the server reads itself."""

    version: int
    folder: Path


class DiskLink(ServerLink):
    """A server that reads versions from a `DiskCopy`. There is no group: an HTTP reply acknowledges a version."""

    def connect(self, plan_info: dict) -> None:
        self._buckets = len(plan_info["plan"])
        self._given = False
        self._update = None
        with self._phase("connect"):
            info = plan_info | {"backend": "disk", "master_address": "", "master_port": 0, "rank_offset": 1}
            info |= {"world_size": 1 + self.control.world_size(), "timeout_seconds": self._timeout_s}
            self.control.init_transfer(info)

    # A DiskLink only gets what a DiskCopy feeds.
    def update(  # type: ignore[override]
        self, feed: DiskFeed, buckets: Sequence[Bucket], num_buffers: int
    ) -> dict[str, float]:
        """Have the server read the feed's version. `wire` is 0, since reading is part of `apply`."""
        self._begin({"version": feed.version, "run": own_run(), "folder": str(feed.folder)})
        read_started = time.perf_counter()
        with self._phase("apply"):
            self._servers_error(time.monotonic() + self._timeout_s)
        self.seconds |= {"wire": 0.0, "apply": time.perf_counter() - read_started}
        self.bytes_done = sum(bucket.payload_bytes for bucket in buckets)
        self._finish(feed.version)
        return self.seconds
