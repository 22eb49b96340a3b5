"""Finding the checkpoint to continue from, and restoring it."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.checkpoint.adapters import BASE
from torchtitan.grpo.checkpoint.hyperparameters import kept
from torchtitan.grpo.checkpoint.marker import MARKER, Marker, candidates, damages, is_read_back, step_of
from torchtitan.grpo.checkpoint.random_states import seed_all, set_random_states
from torchtitan.grpo.checkpoint.run_config import RUN_CONFIG, changes, read_run_config
from torchtitan.grpo.checkpoint.states import Trained, collect
from torchtitan.grpo.checkpoint.together import StageFailed, Together
from torchtitan.grpo.checkpoint.trainer_state import TrainerState, read_state
from torchtitan.grpo.errors import UserError
from torchtitan.tools.logging import logger


class Loader:
    """Restores a run from its newest whole checkpoint, or from `[checkpoint] load_step`'s.

    Args:
        folder: Of the checkpoints.
        load_step: `[checkpoint] load_step`; -1 is the newest.
        trainer_state: Every rank restores it by `load_state_dict`.
        run_config, seed: See `Checkpointer`.

    Attributes:
        torn_steps: The steps whose checkpoints were found to be torn.
    """

    def __init__(
        self,
        folder: Path,
        load_step: int,
        together: Together,
        trainer_state: TrainerState,
        run_config: dict[str, Any],
        seed: int,
        device: torch.device,
    ) -> None:
        self.torn_steps: set[int] = set()
        self._damaged: dict[str, str] = {}  # files of the loaded checkpoint
        self._folder, self._load_step, self._together = folder, load_step, together
        self._trainer_state, self._run_config = trainer_state, run_config
        self._seed, self._device = seed, device

    def load(self, states: dict[str, Stateful], policy: Trained) -> int:
        """Restore `states`, which are the policy's, and the trainer's state. Collective.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            UserError: See `Checkpointer.load_latest`.
        """
        marker = self._choose()
        if marker is None:
            logger.info(f"No complete checkpoint in {self._folder}: starting at step 0")
            return 0
        path = self._folder / f"step-{marker.step}"
        if "reference" in states and "reference" not in marker.states:
            raise UserError(f"checkpoint {path} has no reference model: set [grpo] kl_coef = 0, as when it was written")
        if (BASE in states) != (BASE in marker.states):
            holds, key = ("all weights", "false") if BASE in states else ("adapters only", "true")
            raise UserError(f"checkpoint {path} holds {holds}: set [lora] enable = {key}, as when it was written")
        together = self._together
        read = collect(states, together)  # DCP reads into it
        try:
            if BASE in states:  # first: a refusal names keys of [lora], where DCP would name tensors
                base = {BASE: read.pop(BASE)}
                self._read(path, base)
                together.locally(f"comparing with {path}", lambda: states[BASE].load_state_dict(base[BASE]))
            self._read(path, read)
            with kept(policy.optimizers, policy.lr_schedulers):
                together.locally(f"restoring {path}", lambda: self._restore(path, marker, states, read))
        except StageFailed as error:
            raise UserError(
                f"checkpoint {path} cannot be loaded: it is of another model or optimizer (then restore [model] and "
                "[optimizer]), or of an earlier version of this project (then set a new [job] dump_folder), or it is "
                f"torn (then delete {path}). {error}"
            ) from error
        logger.info(f"Loaded checkpoint {path}")
        self._name_changes(path)
        return marker.step

    def _name_changes(self, path: Path) -> None:
        if self._together.rank != 0:
            return
        if RUN_CONFIG in self._damaged or not (path / RUN_CONFIG).is_file():
            return logger.info(f"{path} has no whole {RUN_CONFIG}: changed keys cannot be named")
        for line in changes(read_run_config(path), self._run_config):
            logger.warning(f"Changed since the checkpoint: {line}")

    def _choose(self) -> Marker | None:
        """The newest whole checkpoint, or `load_step`'s. Every rank checks its share of the bytes."""
        together = self._together
        whole, damaged = together.locally(f"looking for checkpoints in {self._folder}", self._look)[0]
        found = {Path(path): Marker(**entries) for path, entries in whole.items()}
        torn = {Path(path): what for path, what in damaged.items()}
        for path, marker in reversed(found.items()):
            check = functools.partial(damages, path, marker, together.rank, together.world_size)
            of_ranks = together.locally(f"checking {path}", check)
            self._damaged = {name: f"{name} {what}" for of_rank in of_ranks for name, what in of_rank.items()}
            torn_by = next((what for name, what in self._damaged.items() if is_read_back(name)), None)
            if torn_by is None:
                for what in self._damaged.values() if together.rank == 0 else ():
                    logger.warning(f"In {path}, {what}. The run does not need it")
                for other, what in torn.items() if together.rank == 0 else ():
                    older = step_of(other) < marker.step
                    say = logger.warning if older else logger.error
                    say(f"checkpoint {other} is torn: {what}. The run continues from {path}. Delete {other}")
                return marker
            torn[path] = torn_by
            self.torn_steps.add(marker.step)
        if torn:
            said = "; ".join(f"checkpoint {path} is torn: {what}" for path, what in torn.items())
            explicit = self._load_step >= 0
            others = "choose another by [checkpoint] load_step" if explicit else "start in another [job] dump_folder"
            raise UserError(f"{said}. Restore the file from a copy, or {others}")
        return None

    def _look(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """On rank 0, `candidates` as JSON values."""
        if self._together.rank != 0:
            return {}, {}
        for path in self._folder.glob("step-*"):
            if not (path / MARKER).is_file():
                logger.warning(f"{path} is incomplete and is not loaded")
        found, torn = candidates(self._folder, self._load_step)
        return {str(path): asdict(marker) for path, marker in found.items()}, {str(p): what for p, what in torn.items()}

    def _read(self, path: Path, states: dict[str, Any]) -> None:
        self._together.collectively(
            f"reading {path / 'dcp'}",
            lambda: dcp.load(states, checkpoint_id=path / "dcp", process_group=self._together.group),
        )

    def _restore(self, path: Path, marker: Marker, states: dict[str, Stateful], read: dict[str, Any]) -> None:
        for name, content in read.items():
            states[name].load_state_dict(content)
        rank, world_size = self._together.rank, self._together.world_size
        self._trainer_state.load_state_dict(read_state(path, marker.files, rank == 0))
        if marker.world_size == world_size:  # last, so that nothing draws random numbers in between
            set_random_states(torch.load(path / f"rng-rank-{rank}.pt", weights_only=True), self._device)
        else:
            seed_all(self._seed, marker.step)
            logger.warning(
                f"{path} was written by {marker.world_size} ranks and is loaded by {world_size}: weights and "
                "optimizer state are exact, random states are derived from the seed"
            )
