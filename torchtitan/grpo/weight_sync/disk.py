"""Weights through a folder, for servers that can read the trainer's files but cannot join a process group with it.

A version is a folder of safetensors files, one per bucket. It is written under another name and renamed when it is
complete, so nobody reads a partial version. Servers check it by the same plan, trailers and checksums as a broadcast.
They are told what the checksums of all buckets make together, so files of another run never pass for ours.

    disk_folder, or /dev/shm
      torchtitan-grpo-gpu01-4711-5f3a2c-8d2e90b1    one run's own, named after it
        in-use                                      locked as long as that run lives
        version-00000007
"""

import fcntl
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.disk_full import no_room
from torchtitan.grpo.weight_sync.copies import VersionCopy
from torchtitan.grpo.weight_sync.link import ReceiverLink
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, block_layers, peft_config
from torchtitan.grpo.weight_wire.bucket_files import check_bucket, write_bucket
from torchtitan.grpo.weight_wire.buckets import Bucket
from torchtitan.grpo.weight_wire.version_names import FOLDER_PREFIX, MEMORY, lives, own_run

logger = logging.getLogger(__name__)

_IN_USE = "in-use"
"""A file that the owner of a folder keeps locked. The lock ends with the owner's process, however that ends."""


class DiskCopy(VersionCopy):
    """A full version in files.

    Args:
        folder: Where this run's own folder is made, which holds the versions. Several runs may share it. "": in memory
            (/dev/shm), or else with the temporary files.
        buckets: The plan.
        adapter: If the plan is one of LoRA adapters: how they apply. A version is then a folder as `peft` writes it,
            for SGLang. Its files are read again before a server may, since SGLang would not check them.

    Raises:
        UserError: The folder has no room, or cannot be written to.
    """

    def __init__(self, folder: str, buckets: Sequence[Bucket], adapter: AdapterInfo | None = None) -> None:
        super().__init__()
        self._config = ""  # of an adapter
        if adapter is not None:
            layers = block_layers(spec.name for bucket in buckets for spec in bucket.tensors)
            self._config = json.dumps(peft_config(adapter.rank, adapter.alpha, layers, adapter.base_name))
        parent = Path(folder).absolute() if folder else MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_unowned(parent)
            self._folder = parent / f"{FOLDER_PREFIX}{own_run()}-{secrets.token_hex(4)}"
            self._folder.mkdir(mode=0o777 if folder else 0o700)
            self._lock = _locked(self._folder)
        except OSError as error:
            raise UserError(f"{parent} cannot be written to ({error}): change [weight_sync] disk_folder") from error
        self._buckets = buckets
        self._part = self._whole = self._folder / "version.part"
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
        with self._writing():
            self._part.mkdir()
            if self._config:
                (self._part / "adapter_config.json").write_text(self._config, encoding="utf-8")

    def store(self, index: int, wire: torch.Tensor) -> None:
        with self._writing():
            write_bucket(self._part, self._buckets[index], wire.cpu())
        if self._config:
            check_bucket(self._part, self._buckets[index])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not no_room(error):
                raise
            raise UserError(f"no room for weights in {self._folder} ([weight_sync] disk_folder): {error}") from error

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
        return DiskFeed(self.version, self._whole, tuple(self.expected))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def _locked(folder: Path) -> TextIO:
    """The folder's lock, held. Others find it only once it is held."""
    file = (folder / "lock").open("w")
    os.register_at_fork(after_in_child=file.close)  # a fork may outlive this process
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # a network file system without locks: nobody else can lock it, or removes it, either
        logger.warning("%s cannot be locked (%s): remove it yourself if this run is killed", folder, error)
    (folder / "lock").rename(folder / _IN_USE)
    return file


def _remove_unowned(parent: Path) -> None:
    """Remove folders that killed trainers of this host left behind. Each one has a whole model in it.

    Those of other hosts stay: not every network file system has locks that hold between hosts.
    """
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        if lives(folder.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0]) is not False:
            continue
        try:
            with (folder / _IN_USE).open("r+") as lock:  # NFS locks only what is open for writing
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, another user's, or just being made
            continue


@dataclass(frozen=True)
class DiskFeed:
    """A version in a folder, which the server reads itself. `expected`: the acknowledgement of one that has all of it
    (`receiver.ACK_FIELDS`)."""

    version: int
    folder: Path
    expected: tuple[int, ...] = ()


class FolderLink(ReceiverLink):
    """A server that reads versions from a `DiskCopy`. There is no group: an HTTP reply acknowledges a version."""

    def _connect(self, plan_info: dict) -> None:
        info = plan_info | {"backend": "disk", "master_address": "", "master_port": 0, "rank_offset": 1}
        self.control.init_transfer(info | {"world_size": 1 + self.control.world_size()})

    def update(self, feed: DiskFeed, buckets: Sequence[Bucket], num_buffers: int) -> dict[str, float]:
        """Have the server read the feed's version."""
        self._begin({"version": feed.version, "folder": str(feed.folder), "expected": list(feed.expected)})
        self._read(buckets, lambda: self._wait_for_reply(time.monotonic() + self.timeout_s))
        self._take_into_service(feed.version)
        return self.seconds
