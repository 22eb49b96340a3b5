"""The disk that checkpoints take, and whether a run that begins has it."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.grpo.checkpoint.marker import complete_steps
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.lora import adapter_parameters
from torchtitan.grpo.process.disk_full import is_disk_full
from torchtitan.tools.logging import logger

if TYPE_CHECKING:  # torchtitan's models take seconds to import
    from torchtitan.grpo.model.source import ModelSource

_TRIED_BYTES = 1 << 20
"""What is written where a disk says that it has no room at all: some say so that have."""


def checkpoint_bytes(config: JobConfig, parameters: int, trained: int) -> int:
    """Bytes of one checkpoint: what is trained, AdamW's two moments, the reference and the export.

    Args:
        parameters: Of the whole model, without adapters.
        trained: Parameters that are trained: all, or those of the adapters.
    """
    held, checkpoint, lora = TORCH_DTYPE_MAP[config.training.dtype].itemsize, config.checkpoint, config.lora
    exported = trained + parameters * lora.merge if lora.enable else parameters
    export = exported * TORCH_DTYPE_MAP[checkpoint.export_dtype].itemsize if checkpoint.export_dtype != "none" else 0
    reference = parameters * held if config.grpo.kl_coef and not lora.enable else 0
    return trained * 3 * held + reference + export


def most_at_once(config: JobConfig) -> int:
    """Checkpoints that are on the disk at once: those that are kept, and the one that is being written."""
    checkpoint = config.checkpoint
    written = -(-config.training.steps // checkpoint.interval)
    kept = checkpoint.keep_latest_k + bool(checkpoint.keep_best)
    return min(kept + 1, written) if checkpoint.keep_latest_k else written


def disk_lines(config: JobConfig, parameters: int, trained: int, here: bool = True) -> list[str]:
    """A table for `--dry_run`; `parameters` and `trained` are those of `checkpoint_bytes`. `here`: the run is for this
    machine."""
    checkpoint, lora = config.checkpoint, config.lora
    if not checkpoint.enable:
        return []
    each, at_once = checkpoint_bytes(config, parameters, trained), most_at_once(config)
    parts = ("adapters" if lora.enable else "weights") + ", AdamW state"
    parts += ", reference" * bool(config.grpo.kl_coef and not lora.enable)
    parts += ", export" * (checkpoint.export_dtype != "none")
    parts += ", merged model" * lora.merge
    folder = Path(config.job.dump_folder) / checkpoint.folder
    lines = [
        f"disk for checkpoints, in {folder}",
        f"  {'each':<28}{mib(each):>14}  {parts}",
        f"  {f'at most {at_once} at once':<28}{mib(at_once * each):>14}",
    ]
    free = free_bytes(next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each)))
    if here and free is not None:
        verdict = "all fit" if free >= at_once * each else f"{free // each} fit" if free >= each else "does NOT fit"
        lines.append(f"  {'free on this machine':<28}{mib(free):>14}  {verdict}")
    return lines


def check_disk(config: JobConfig, source: "ModelSource") -> None:
    """Before a run takes any time: compare the room for checkpoints with what they take. A warning if not all fit that
    the run will have at once.

    Raises:
        UserError: Not even the first one fits. A disk that does not say how much is free is not refused.
    """
    checkpoint = config.checkpoint
    folder = Path(config.job.dump_folder) / checkpoint.folder
    there = complete_steps(folder) if checkpoint.enable and checkpoint.resume else []
    begun = checkpoint.load_step if checkpoint.load_step >= 0 else there[-1] if there else 0
    free = free_bytes(folder) if checkpoint.enable and begun < config.training.steps else None
    if free is None:
        return
    with torch.device("meta"):
        model = source.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = list(model.layers.children())
    each = checkpoint_bytes(config, parameters, len(layers) * adapter_parameters(source.lora, layers[0]) or parameters)
    if free < each:
        less = ', or set [checkpoint] export_dtype = "none"' if checkpoint.export_dtype != "none" else ""
        raise UserError(
            f"[job] dump_folder: a checkpoint takes {mib(each)} ({each} bytes), and {mib(free)} ({free} bytes) are "
            f"free for it in {folder}, so nothing could be saved: make room, choose a folder on another disk{less}"
        )
    more = max(1, most_at_once(config) - len(there))
    if free < more * each:
        fit = free // each
        logger.warning(
            f"the disk of {folder} has room for {fit} checkpoint{'s' * (fit > 1)} of {mib(each)}, and the run will "
            f"have {more} more at once: a later save will fail. Make room, or lower [checkpoint] keep_latest_k = "
            f"{checkpoint.keep_latest_k}{' (0 keeps all)' * (not checkpoint.keep_latest_k)}"
        )


def free_bytes(folder: Path) -> int | None:
    """Room for this user on the folder's disk; None if it is not known, as on some network disks."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    free = disk.f_frsize * (disk.f_bavail if os.geteuid() else disk.f_bfree)
    if free or not disk.f_blocks:
        return free if disk.f_blocks else None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return 0 if is_disk_full(error) else None
    return None


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
