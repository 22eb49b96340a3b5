"""Saving a run and continuing it."""

import functools
import io
import itertools
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedTokenizerBase

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.grpo.checkpoint.marker import MARKER, Marker, damages, flush, markers, measured
from torchtitan.grpo.checkpoint.random_states import random_states, seed_all, set_random_states
from torchtitan.grpo.checkpoint.together import StageFailed, Together
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import ModelSource, gather_hf, write_hf
from torchtitan.tools.logging import logger


class TrainerState(Protocol):
    """The other state of a run, as data that JSON preserves: string keys, lists, no tuples."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, in the order they were written."""
    return [marker.step for marker in markers(folder)[0]]


class _ModelState(Stateful):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class Checkpointer:
    """Saves and restores a run. `save` and `load_latest` are collective over the default process group.

    Args:
        checkpoint_cfg: The `[checkpoint]` section: torchtitan's keys and ours.
        dump_folder: `[job] dump_folder`.
        trainer_state: Rank 0 saves its `state_dict`; every rank restores it by `load_state_dict`.
        source, tokenizer: Used for the Hugging Face export. Only rank 0 uses the tokenizer.
        reference: The frozen model of `[grpo] kl_coef`. After a warm start, only the checkpoint has its weights.
        seed: `[debug] seed`. Random states are derived from it if the number of ranks has changed.
        timeout_s: `[comm] init_timeout_seconds`: longest wait of ranks for one that writes or reads.
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
        timeout_s: float = 1800.0,
    ) -> None:
        self.cfg = checkpoint_cfg
        self.folder = Path(dump_folder) / checkpoint_cfg.folder
        self.model, self.source, self.tokenizer, self.seed = model, source, tokenizer, seed
        self.trainer_state = trainer_state
        self.states = {"model": _ModelState(model), "optimizer": optimizers, "lr_scheduler": lr_schedulers}
        if reference is not None:
            self.states["reference"] = _ModelState(reference)
        self.together = Together(timeout_s)
        self.rank, self.world_size = self.together.rank, self.together.world_size
        self.device = next(model.parameters()).device
        self._saved_step = 0
        self._torn_steps: set[int] = set()
        self._failed_saves = 0

    @staticmethod
    def check_folder(checkpoint_cfg: Any, dump_folder: str) -> None:
        """Check at the start that saving and resuming will work. For rank 0, before there is a process group.

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
        found, torn = _candidates(folder, checkpoint_cfg.load_step)
        steps = [_step_of(path) for path in (*found, *torn)]
        if steps and not checkpoint_cfg.resume:
            raise UserError(
                f"{folder} already holds checkpoints of steps {steps}: set [checkpoint] resume = true to continue "
                "them, or another [job] dump_folder for a new run"
            )

    def save(self, step: int, last: bool = False) -> None:
        """Write the checkpoint of `step`, then drop those beyond `[checkpoint] keep_latest_k`.

        If any rank fails, the checkpoints before it stay whole, and every rank goes on: the next save may succeed.
        Saving the step that was saved or loaded last does nothing. A step of an older branch of the run (see
        `load_step`) is replaced.

        Args:
            last: Nothing comes after this step, so a failure is raised.

        Raises:
            StageFailed: On every rank, with `last`.
            RuntimeError: A rank failed inside a collective, or ended. The run cannot go on.
        """
        if step == self._saved_step:
            return
        started = time.monotonic()
        path = self.folder / f"step-{step}"
        unfinished = path.with_name(path.name + ".tmp")
        try:
            self._write(step, unfinished, path)
        except StageFailed as error:
            if self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
            if last:
                raise
            self._failed_saves += 1
            if self.rank == 0:
                logger.error(f"{error}. Training goes on, and the next save is due in {self.cfg.interval} steps")
            return
        self._saved_step = step
        self._torn_steps.discard(step)
        if self.rank == 0:
            self._drop_old()
            logger.info(f"Saved checkpoint {path} in {time.monotonic() - started:.1f} s")

    def metrics(self) -> dict[str, float]:
        return {"checkpoint/failed": self._failed_saves} if self.cfg.enable else {}

    def load_latest(self) -> int:
        """Restore `[checkpoint] load_step`, by default the newest whole checkpoint. Does nothing without `resume`.

        A torn checkpoint is never loaded. Without `load_step` it is named in the log, and the one before is taken: what
        is lost is trained again.

        Weights and optimizer state are resharded if the number of ranks has changed. Random states are then derived
        from seed and step, because not every rank has one.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            UserError: All checkpoints are torn, or that of `load_step` is. It is of another model or optimizer.
        """
        if not (self.cfg.enable and self.cfg.resume):
            return 0
        marker = self._choose()
        if marker is None:
            logger.info(f"No complete checkpoint in {self.folder}: starting at step 0")
            return 0
        path = self._path(marker)
        if "reference" in self.states and "reference" not in marker.states:
            raise UserError(f"checkpoint {path} has no reference model: set [grpo] kl_coef = 0, as when it was written")
        states = self._collect_states()
        try:
            self.together.collectively(
                f"reading {path / 'dcp'}",
                lambda: dcp.load(states, checkpoint_id=path / "dcp", process_group=self.together.group),
            )
            self.together.locally(f"restoring {path}", lambda: self._restore(path, marker, states))
        except StageFailed as error:
            raise UserError(
                f"checkpoint {path} cannot be loaded: it is of another model or optimizer (then restore [model] and "
                f"[optimizer], or set a new [job] dump_folder), or it is torn (then delete {path}). {error}"
            ) from error
        self._saved_step = marker.step
        logger.info(f"Loaded checkpoint {path}")
        return marker.step

    # ------------------------------------------------------------------------------------------------- saving

    def _write(self, step: int, unfinished: Path, path: Path) -> None:
        """Each stage is of one rank's files, or of collectives, so that a rank that fails keeps nobody waiting."""
        together = self.together
        together.locally(f"clearing {unfinished}", lambda: self._clear(unfinished))
        states = self._collect_states()
        together.collectively(
            f"writing {unfinished / 'dcp'}",
            lambda: dcp.save(states, checkpoint_id=unfinished / "dcp", process_group=together.group),
        )
        if self.cfg.export_hf:
            dtype = TORCH_DTYPE_MAP[self.cfg.export_dtype]
            full = together.collectively("gathering the model", lambda: gather_hf(self.model, self.source, dtype))
            together.locally(
                f"writing {unfinished / 'hf'}", lambda: write_hf(full, self.source, unfinished / "hf", self.tokenizer)
            )
        rng_path = unfinished / f"rng-rank-{self.rank}.pt"
        together.locally(f"writing {rng_path}", lambda: self._write_random_states(rng_path))
        together.locally(f"writing {unfinished / 'trainer.json'}", lambda: self._write_trainer_state(unfinished))
        files = together.locally(f"reading back {unfinished}", lambda: measured(unfinished, self.rank))
        written = {name: size_and_sum for of_rank in files for name, size_and_sum in sorted(of_rank.items())}
        together.locally(f"completing {path}", lambda: self._complete(unfinished, path, step, written))

    def _collect_states(self) -> dict[str, Any]:
        """What DCP writes and reads. DCP would collect it itself, but its ranks do not learn of a failure there."""
        states: dict[str, Any] = {}
        self.together.locally(
            "collecting weights and optimizer state",
            lambda: states.update({name: state.state_dict() for name, state in self.states.items()}),
        )
        return states

    def _clear(self, unfinished: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def _write_random_states(self, path: Path) -> None:
        content = io.BytesIO()  # torch.save's own errors do not say what the operating system said
        torch.save(random_states(self.device), content)
        path.write_bytes(content.getvalue())

    def _write_trainer_state(self, unfinished: Path) -> None:
        if self.rank == 0:
            (unfinished / "trainer.json").write_text(json.dumps(self.trainer_state.state_dict()), encoding="utf-8")

    def _complete(self, unfinished: Path, path: Path, step: int, written: dict[str, tuple[int, str]]) -> None:
        if self.rank != 0:
            return
        number = 1 + max((marker.number for marker in markers(self.folder)[0]), default=0)
        sizes = {name: size for name, (size, _) in written.items()}
        sums = {name: of_file for name, (_, of_file) in written.items()}
        Marker(step, self.world_size, time.time(), list(self.states), sizes, number, sums).write(unfinished)
        flush(unfinished / MARKER)
        for folder in (*(entry for entry in unfinished.rglob("*") if entry.is_dir()), unfinished):
            flush(folder)
        if path.exists():  # an older branch of the run, torn or incomplete; a rename cannot replace a folder
            replaced = path.with_name(path.name + ".replaced.tmp")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        unfinished.rename(path)
        flush(self.folder)

    def _drop_old(self) -> None:
        """Torn checkpoints do not count: a whole one must not make room for them."""
        keep = self.cfg.keep_latest_k
        older = [s for s in complete_steps(self.folder) if s not in {self._saved_step, *self._torn_steps}]
        try:
            for step in older[: max(0, len(older) - keep + 1)] if keep else []:
                # Delete the marker first: a folder that is partly deleted is then not a checkpoint.
                (self.folder / f"step-{step}" / MARKER).unlink()
                shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)
        except OSError as error:
            logger.warning(f"an old checkpoint cannot be deleted: {error}")
        for path in self.folder.glob("step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ loading

    def _path(self, marker: Marker) -> Path:
        return self.folder / f"step-{marker.step}"

    def _choose(self) -> Marker | None:
        """The newest whole checkpoint, or `load_step`'s. Every rank checks its share of the bytes."""
        found, torn = self.together.locally(f"looking for checkpoints in {self.folder}", self._look)[0]
        for path, marker in reversed(found.items()):
            check = functools.partial(damages, path, marker, self.rank, self.world_size)
            problems = list(itertools.chain(*self.together.locally(f"checking {path}", check)))
            if not problems:
                for other, what in torn.items() if self.rank == 0 else ():
                    older = _step_of(other) < marker.step
                    say = logger.warning if older else logger.error
                    say(f"checkpoint {other} is torn: {what}. The run continues from {path}. Delete {other}")
                if not marker.checksums:
                    logger.warning(f"{path} has no checksums, so only the sizes of its files were checked")
                return marker
            torn[path] = problems[0]
            self._torn_steps.add(marker.step)
        if torn:
            said = "; ".join(f"checkpoint {path} is torn: {what}" for path, what in torn.items())
            explicit = self.cfg.load_step >= 0
            others = "choose another by [checkpoint] load_step" if explicit else "start in another [job] dump_folder"
            raise UserError(f"{said}. Restore the file from a copy, or {others}")
        return None

    def _look(self) -> tuple[dict[Path, Marker], dict[Path, str]]:
        """On rank 0, `_candidates`."""
        if self.rank != 0:
            return {}, {}
        for path in self.folder.glob("step-*"):
            if not (path / MARKER).is_file():
                logger.warning(f"{path} is incomplete and is not loaded")
        return _candidates(self.folder, self.cfg.load_step)

    def _restore(self, path: Path, marker: Marker, states: dict[str, Any]) -> None:
        for name, state in self.states.items():
            state.load_state_dict(states[name])
        self.trainer_state.load_state_dict(json.loads((path / "trainer.json").read_text(encoding="utf-8")))
        if marker.world_size == self.world_size:  # last, so that nothing draws random numbers in between
            set_random_states(torch.load(path / f"rng-rank-{self.rank}.pt", weights_only=True), self.device)
        else:
            seed_all(self.seed, marker.step)
            logger.warning(
                f"{path} was written by {marker.world_size} ranks and is loaded by {self.world_size}: weights and "
                "optimizer state are exact, random states are derived from the seed"
            )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _candidates(folder: Path, load_step: int) -> tuple[dict[Path, Marker], dict[Path, str]]:
    """Checkpoints that may be loaded: the markers in the order they were written, and what is wrong with unreadable
    ones. All of the folder with `load_step` -1, else that one.
    """
    found, torn = markers(folder)
    by_path = {folder / f"step-{marker.step}": marker for marker in found}
    if load_step < 0:
        return by_path, torn
    path = folder / f"step-{load_step}"
    if path not in by_path and path not in torn:
        raise UserError(
            f"[checkpoint] load_step = {load_step}: {folder} holds complete checkpoints of {complete_steps(folder)}"
        )
    return {path: by_path[path]} if path in by_path else {}, {path: torn[path]} if path in torn else {}
