"""Checkpoints from which a killed run continues exactly.

There is one folder per checkpoint under `[job] dump_folder`/`[checkpoint] folder`:

    step-20/
      dcp/              weights, optimizer and learning-rate schedule, sharded (torch.distributed.checkpoint)
      rng-rank-0.pt     random states of each rank
      trainer.json      the trainer's other state: data position, weight version, counters
      hf/               Hugging Face folder for inference (`[checkpoint] export_hf`)
      complete.json     step, world size, time and the size of every file; written last

All files are written into `step-20.tmp`, and one rename makes it `step-20`. A folder with the suffix, or without
`complete.json`, is not a checkpoint.
"""

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedTokenizerBase

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import ModelSource, export_hf
from torchtitan.tools.logging import logger

_MARKER = "complete.json"
_STEP_NAME = re.compile(r"step-(\d+)")


class TrainerState(Protocol):
    """The other state of a run, as data that JSON preserves: string keys, lists, no tuples."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, in the order they were written."""
    found = []
    for path in folder.glob("step-*"):
        name = _STEP_NAME.fullmatch(path.name)
        if name and (path / _MARKER).is_file():
            found.append((_read_marker(path)["saved_at"], int(name[1])))
    return [step for _, step in sorted(found)]


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        marker = json.loads((path / _MARKER).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"checkpoint {path} is torn: its {_MARKER} is not JSON. Delete {path} to continue") from error
    if not isinstance(marker, dict) or not {"step", "world_size", "saved_at", "states", "files"} <= marker.keys():
        raise UserError(f"checkpoint {path} is torn: its {_MARKER} lacks entries. Delete {path} to continue")
    return marker


class _ModelState(Stateful):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class Checkpointer:
    """Saves and restores a run. All methods except `check_folder` are collective over the default process group.

    Args:
        checkpoint_cfg: The `[checkpoint]` section: torchtitan's keys and ours.
        dump_folder: `[job] dump_folder`.
        trainer_state: Rank 0 saves its `state_dict`; every rank restores it by `load_state_dict`.
        source, tokenizer: Used for the Hugging Face export. Only rank 0 uses the tokenizer.
        reference: The frozen model of `[grpo] kl_coef`. After a warm start, only the checkpoint has its weights.
        seed: `[debug] seed`. Random states are derived from it if the number of ranks has changed.
    """

    def __init__(
        self,
        checkpoint_cfg: Any,
        dump_folder: str,
        model: nn.Module,
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        trainer_state: TrainerState,
        *,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase | None,
        reference: nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        self.cfg = checkpoint_cfg
        self.folder = Path(dump_folder) / checkpoint_cfg.folder
        self.model, self.source, self.tokenizer, self.seed = model, source, tokenizer, seed
        self.trainer_state = trainer_state
        self.states = {"model": _ModelState(model), "optimizer": optimizers, "lr_scheduler": lr_schedulers}
        if reference is not None:
            self.states["reference"] = _ModelState(reference)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = next(model.parameters()).device
        self._saved_step = 0

    @staticmethod
    def check_folder(checkpoint_cfg: Any, dump_folder: str) -> None:
        """Check at the start that saving and resuming will work. Any rank may call it, before any process group.

        Args:
            checkpoint_cfg: The `[checkpoint]` section, which `load_config` has checked.
            dump_folder: `[job] dump_folder`.

        Raises:
            UserError: The folder cannot be written. It holds checkpoints that a new run would overwrite. The checkpoint
                of `load_step` does not exist.
        """
        if not checkpoint_cfg.enable:
            return
        folder = Path(dump_folder) / checkpoint_cfg.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(
                f"checkpoints cannot be written to {folder} ({error}): change [job] dump_folder or [checkpoint] folder"
            ) from error
        steps = complete_steps(folder)
        if steps and not checkpoint_cfg.resume:
            raise UserError(
                f"{folder} already holds checkpoints of steps {steps}: set [checkpoint] resume = true to continue "
                "them, or another [job] dump_folder for a new run"
            )
        _step_to_load(checkpoint_cfg.load_step, steps, folder)

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`, then drop those beyond `[checkpoint] keep_latest_k`.

        Saving the step that was saved or loaded last does nothing. A step of an older branch of the run (see
        `load_step`) is replaced.

        Raises:
            RuntimeError: On every rank, if any rank failed. The checkpoints before it stay complete.
        """
        if step == self._saved_step:
            return
        started = time.monotonic()
        path = self.folder / f"step-{step}"
        unfinished = path.with_name(path.name + ".tmp")
        self._together(f"clearing {unfinished}", lambda: self._clear(unfinished))
        self._together(f"writing {unfinished / 'dcp'}", lambda: dcp.save(self.states, checkpoint_id=unfinished / "dcp"))
        if self.cfg.export_hf:
            dtype = TORCH_DTYPE_MAP[self.cfg.export_dtype]
            self._together(
                f"writing {unfinished / 'hf'}",
                lambda: export_hf(self.model, self.source, unfinished / "hf", self.tokenizer, dtype),
            )
        rng_path = unfinished / f"rng-rank-{self.rank}.pt"
        self._together(f"writing {rng_path}", lambda: torch.save(_rng_state(self.device), rng_path))
        self._together(f"completing {path}", lambda: self._complete(unfinished, path, step))
        self._saved_step = step
        if self.rank == 0:
            self._drop_old()
            logger.info(f"Saved checkpoint {path} in {time.monotonic() - started:.1f} s")

    def load_latest(self) -> int:
        """Restore `[checkpoint] load_step`, by default the last checkpoint written. Does nothing without `resume`.

        Weights and optimizer state are resharded if the number of ranks has changed. Random states are then derived
        from seed and step, because not every rank has one.

        Returns:
            The step of the checkpoint; 0 if there is no complete one.

        Raises:
            UserError: The checkpoint is torn, or of another model or optimizer. If only rank 0 can see it, the other
                ranks raise RuntimeError.
        """
        if not (self.cfg.enable and self.cfg.resume):
            return 0
        chosen = torch.zeros(2, dtype=torch.int64, device=self.device)  # step, world size at the time
        self._together(f"choosing a checkpoint in {self.folder}", lambda: chosen.copy_(self._choose()))
        dist.broadcast(chosen, src=0)
        step, saved_world_size = chosen.tolist()
        if step == 0:
            logger.info(f"No complete checkpoint in {self.folder}: starting at step 0")
            return 0
        path = self.folder / f"step-{step}"
        try:
            dcp.load(self.states, checkpoint_id=path / "dcp")
        except CheckpointException as error:
            raise UserError(
                f"checkpoint {path} cannot be loaded: it is of another model or optimizer (then restore [model] and "
                f"[optimizer], or set a new [job] dump_folder), or it is torn (then delete {path}). {error}"
            ) from error
        self.trainer_state.load_state_dict(json.loads((path / "trainer.json").read_text(encoding="utf-8")))
        if saved_world_size == self.world_size:  # last, so that nothing draws random numbers in between
            _set_rng_state(torch.load(path / f"rng-rank-{self.rank}.pt", weights_only=True), self.device)
        else:
            _seed_all(self.seed, step)
            logger.warning(
                f"{path} was written by {saved_world_size} ranks and is loaded by {self.world_size}: weights and "
                "optimizer state are exact, random states are derived from the seed"
            )
        self._saved_step = step
        logger.info(f"Loaded checkpoint {path}")
        return step

    def _clear(self, unfinished: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def _complete(self, unfinished: Path, path: Path, step: int) -> None:
        if self.rank != 0:
            return
        (unfinished / "trainer.json").write_text(json.dumps(self.trainer_state.state_dict()), encoding="utf-8")
        files = {str(f.relative_to(unfinished)): f.stat().st_size for f in unfinished.rglob("*") if f.is_file()}
        marker = {"step": step, "world_size": self.world_size, "saved_at": time.time()}
        marker |= {"states": list(self.states), "files": files}
        (unfinished / _MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
        for file in unfinished.rglob("*"):
            _flush(file)
        if path.exists():  # an older branch of the run, or incomplete; a rename cannot replace a folder
            replaced = path.with_name(path.name + ".replaced.tmp")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        unfinished.rename(path)
        _flush(self.folder)

    def _drop_old(self) -> None:
        keep = self.cfg.keep_latest_k
        for step in complete_steps(self.folder)[:-keep] if keep else []:
            # Delete the marker first: a folder that is partly deleted is then not a checkpoint.
            (self.folder / f"step-{step}" / _MARKER).unlink()
            shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)
        for path in self.folder.glob("step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _choose(self) -> torch.Tensor:
        """On rank 0, the step to load and the world size that wrote it, after a check of its files. Else zeros."""
        if self.rank != 0:
            return torch.zeros(2, dtype=torch.int64)
        for path in self.folder.glob("step-*"):
            if not (path / _MARKER).is_file():
                logger.warning(f"{path} is incomplete and is not loaded")
        step = _step_to_load(self.cfg.load_step, complete_steps(self.folder), self.folder)
        if step == 0:
            return torch.zeros(2, dtype=torch.int64)
        path = self.folder / f"step-{step}"
        marker = _read_marker(path)
        if "reference" in self.states and "reference" not in marker["states"]:
            raise UserError(f"checkpoint {path} has no reference model: set [grpo] kl_coef = 0, as when it was written")
        for name, size in marker["files"].items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes, not {size}"
                raise UserError(
                    f"checkpoint {path} is torn: {name} {state}. Delete {path} to continue from the one before, "
                    "or choose one by [checkpoint] load_step"
                )
        return torch.tensor([step, marker["world_size"]])

    def _together(self, what: str, action: Callable[[], object]) -> None:
        """Run `action` on every rank and wait for all. One rank's failure is then an error on each, not a hang."""
        failure: BaseException | None = None
        try:
            action()
        except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(failed)
        if isinstance(failure, UserError):
            raise failure
        if failed.item():
            cause = f"{type(failure).__name__}: {failure}" if failure else "another rank failed, see its log"
            raise RuntimeError(f"checkpoint: {what} failed on rank {self.rank}: {cause}") from failure


def _step_to_load(load_step: int, steps: list[int], folder: Path) -> int:
    """`load_step`, or if it is -1 the last of the complete `steps` of `folder`; 0 if there is none."""
    if load_step < 0:
        return steps[-1] if steps else 0
    if load_step not in steps:
        raise UserError(f"[checkpoint] load_step = {load_step}: {folder} holds complete checkpoints of {steps}")
    return load_step


def _flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk, so that the rename survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _rng_state(device: torch.device) -> dict[str, Any]:
    of_numpy = np.random.get_state()
    assert isinstance(of_numpy, tuple)  # NumPy gives a dictionary only for generators other than its default
    name, keys, position, has_gauss, gauss = of_numpy
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _seed_all(seed: int, step: int) -> None:
    """Seed every rank the same, as torchtitan does, because DTensor draws must agree over the mesh."""
    derived = int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big")
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
