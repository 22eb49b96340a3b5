"""Saving a run and continuing it."""

import concurrent.futures
import copy
import io
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.best import VALIDATION, best_of
from torchtitan.grpo.checkpoint.loading import Loader
from torchtitan.grpo.checkpoint.marker import MARKER, complete_steps, step_of
from torchtitan.grpo.checkpoint.model_card import CARD, model_card
from torchtitan.grpo.checkpoint.random_states import random_states
from torchtitan.grpo.checkpoint.run_config import RUN_CONFIG
from torchtitan.grpo.checkpoint.states import Trained, collect, states_of
from torchtitan.grpo.checkpoint.together import StageFailed, Together
from torchtitan.grpo.checkpoint.trainer_state import TrainerState, files_of
from torchtitan.grpo.checkpoint.writing import Taken, Writer, enter_thread
from torchtitan.grpo.config.jobs import job_of
from torchtitan.grpo.host_memory.host_copy import HostCopy
from torchtitan.grpo.model.source import ModelSource
from torchtitan.grpo.process.random_numbers import seed_python
from torchtitan.tools.logging import logger

_LEFT_S = 30.0
"""After an error, longest wait for the checkpoint that is being written. `stopping.FAILED_S` is for all that closes."""


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that a thread writes.

    Attributes:
        taken_s: Host seconds of `save`, of which it waited `waited_s` for the save before.
        written: The seconds of writing, or what the thread raised.
    """

    step: int
    taken_s: float
    waited_s: float
    written: concurrent.futures.Future[float]


class Checkpointer:
    """Saves and restores a run. `save` and `load_latest` are collective over the default process group.

    With `[checkpoint] async_mode`, `save` copies what a checkpoint holds, and a thread of each rank writes it. That
    thread uses one process group, `Together.group`, which nothing else uses meanwhile: one save at a time.

    Args:
        config: Random states are derived from `[debug] seed` if the number of ranks has changed. With `[lora] merge`
            the whole model is exported, too. Ranks wait for one that writes for `[comm] init_timeout_seconds`.
        policy: Its reference model is saved too: after a warm start, only the checkpoint has its weights.
        trainer_state: Rank 0 saves its `state_dict`; every rank restores it by `load_state_dict`.
        source, tokenizer: Used for the export. Only rank 0 uses the tokenizer. With `source.lora` the model's adapters
            are saved, not its frozen weights.
        run_config: `config.resolved.resolved`: saved with each checkpoint, and compared with it at a resume.
    """

    def __init__(
        self,
        config: JobConfig,
        policy: Trained,
        trainer_state: TrainerState,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase | None,
        run_config: dict[str, Any],
    ) -> None:
        self.cfg = cfg = config.checkpoint
        self.folder = Path(config.job.dump_folder) / cfg.folder
        self.seed, self.timeout_s = config.debug.seed or 0, config.comm.init_timeout_seconds
        self.trainer_state, self.run_config = trainer_state, run_config
        self.policy, self.states = policy, states_of(policy, source.lora)
        self.together = Together(self.timeout_s)
        self.rank, self.device = self.together.rank, next(policy.model.parameters()).device
        self.loader = Loader(
            self.folder, cfg.load_step, self.together, trainer_state, self.run_config, self.seed, self.device
        )
        self._saved_step = 0
        self._failed_saves = 0
        self._validated: tuple[int, dict[str, float]] = (0, {})
        self._measured: dict[str, float] = {}
        self._pending: _Pending | None = None
        self._copy: HostCopy | None = None
        if cfg.async_mode != "disabled":
            self._copy = HostCopy(self.device, pinned=cfg.async_mode == "async_with_pinned_mem")
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint-writer", enter_thread, (self.device,))
            tokenizer = copy.deepcopy(tokenizer)  # fast tokenizers refuse two threads at once
            for optimizer in policy.optimizers:
                optimizer.register_step_pre_hook(lambda *_: self._copy.order_writes_after())
        self.writer = Writer(config, self.together, policy.model, source, tokenizer, self.device)

    def save(self, step: int, last: bool = False) -> None:
        """Write the checkpoint of `step`, then drop those beyond `[checkpoint] keep_latest_k`.

        With `async_mode` a thread writes it, and the tensors may change as soon as this returns: the optimizers' next
        steps are ordered after the copy. A save waits for the one before it.

        If any rank fails, the checkpoints before it stay whole, and every rank goes on: the next save may succeed.
        Saving the step that was saved or loaded last does nothing. A step of an older branch of the run (see
        `load_step`) is replaced.

        Args:
            last: Nothing comes after this step: a failure is raised, and no thread is needed.

        Raises:
            StageFailed: On every rank, with `last`.
            RuntimeError: A rank failed inside a collective, or ended. The run cannot go on.
        """
        started = time.monotonic()
        self.finish()
        waited_s = time.monotonic() - started
        if step == self._saved_step:
            return
        try:
            taken = self._take(step, None if last else self._copy)
            if taken.host_copy is not None:
                written = self._thread.submit(self._write, taken)
                self._pending = _Pending(step, time.monotonic() - started, waited_s, written)
                return
            write_s = self._write(taken)
        except StageFailed as error:
            if last:
                error.add_note(self._what_is_saved())
                raise
            self._report_failure(error)
        else:
            self._report_saved(step, time.monotonic() - started, waited_s, write_s)

    def finish(self) -> None:
        """Wait until the checkpoint that a thread writes is complete, or has failed.

        Raises:
            RuntimeError: As `save`; or it takes longer than `[comm] init_timeout_seconds`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        concurrent.futures.wait([pending.written], self.timeout_s)
        if not pending.written.done():
            raise RuntimeError(
                f"checkpoint: rank {self.rank} waited {self.timeout_s:g} s ([comm] init_timeout_seconds) for its "
                f"thread that writes {self._folder_of(pending.step)}"
            )
        try:
            write_s = pending.written.result()
        except StageFailed as error:
            self._report_failure(error)
        else:
            self._report_saved(pending.step, pending.taken_s, pending.waited_s, write_s)

    def close(self, error: type[BaseException] | None = None, *_: object) -> None:
        """With the arguments of `__exit__`. After an error, let a checkpoint that is being written become complete, for
        some seconds; a signal does not wait.
        """
        if self._pending is None or error is None or issubclass(error, SystemExit):
            return
        pending, self._pending = self._pending, None
        concurrent.futures.wait([pending.written], _LEFT_S)
        in_time = pending.written.done()
        failure = pending.written.exception() if in_time else f"not complete {_LEFT_S:g} s after the error"
        if self.rank == 0 and failure:
            logger.error(f"{self._folder_of(pending.step)} is not saved: {failure}")

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """On rank 0, before a save: the validation of this step, by which `[checkpoint] keep_best` chooses.

        Without that metric, as when rewards fail, the step's checkpoint is not the best.
        """
        self._validated = step, metrics

    def newest(self) -> Path | None:
        """The newest complete checkpoint of the folder."""
        return next(reversed(self._whole()), None)

    def report(self) -> None:
        """On rank 0, at the end: log where the newest and the best checkpoint are."""
        if self.rank != 0 or not self.cfg.enable:
            return
        if newest := self.newest():
            exports = [str(newest / name) for name in ("hf", "adapter") if (newest / name).is_dir()]
            export = f"; for inference: {' and '.join(exports)}" if exports else ""
            logger.info(f"Newest checkpoint: {newest}{export}")
        if best := best_of(self._whole(), self.cfg.keep_best):
            logger.info(f"Best checkpoint by {self.cfg.keep_best}: {best[0]}, {best[1]:.4g}")

    def metrics(self) -> dict[str, float]:
        """Call it each step, on every rank. Seconds of a save come once, after it is complete.

        Raises:
            RuntimeError: As `save`, if that happened in the thread.
        """
        if not self.cfg.enable:
            return {}
        if self._pending is not None and self._pending.written.done():
            self.finish()
        measured, self._measured = self._measured, {}
        return {"checkpoint/failed": self._failed_saves} | measured

    def load_latest(self) -> int:
        """Restore `[checkpoint] load_step`, by default the newest whole checkpoint. Without `resume` it only logs where
        checkpoints go.

        Learning rate and other settings of the optimizer and its schedule stay those of the configuration. The log
        names each key whose value has changed, and which value holds. Without a checkpoint, Python's and NumPy's random
        generators are seeded.

        A torn checkpoint is never loaded. Without `load_step` it is named in the log, and the one before is taken: what
        is lost is trained again.

        Weights and optimizer state are resharded if the number of ranks has changed. Random states are then derived
        from seed and step, because not every rank has one.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            UserError: All checkpoints are torn, or that of `load_step` is. It is of another model or optimizer.
        """
        self.finish()
        step = 0
        if self.cfg.enable and self.cfg.resume:
            step = self.loader.load(self.states, self.policy)
        if step:
            self._saved_step = step
        else:  # torch's generators are seeded already: weights may have been drawn
            seed_python(self.seed)
        if self.rank == 0:
            self._announce()
        return step

    # ------------------------------------------------------------------------------------------------- saving

    def _report_saved(self, step: int, taken_s: float, waited_s: float, write_s: float) -> None:
        self._saved_step = step
        on_device_s = self._copy.take_waited_s() if self._copy is not None else 0.0
        self._measured = {
            "checkpoint/exposed_s": taken_s + on_device_s,
            "checkpoint/waited_s": waited_s,
            "checkpoint/write_s": write_s,
        }

    def _report_failure(self, error: StageFailed) -> None:
        self._failed_saves += 1
        if self.rank == 0:
            due = f"the next save is due in {self.cfg.interval} steps. {self._what_is_saved()}"
            logger.error(f"{error}. Training goes on, and {due}")

    def _what_is_saved(self) -> str:
        newest = self.newest()
        return f"The newest checkpoint is {newest}" if newest else "Nothing is saved: there is no checkpoint"

    def _take(self, step: int, host_copy: HostCopy | None) -> Taken:
        """Everything that is written of this step."""
        content = io.BytesIO()
        files: dict[str, bytes | memoryview] = {}

        def rest() -> None:
            torch.save(random_states(self.device), content)
            if self.rank == 0:
                state = self.trainer_state.state_dict()
                files.update(files_of(state))
                files[RUN_CONFIG] = json.dumps(self.run_config, indent=1).encode()
                held_out = self._validated[1] if self._validated[0] == step else {}
                if held_out:
                    files[VALIDATION] = json.dumps(held_out).encode()
                for kind in self.writer.exports:
                    card = model_card(kind, step, job_of(state), self.run_config, held_out)
                    files[f"{kind}/{CARD}"] = card.encode(errors="backslashreplace")

        states = collect(self.states, self.together, host_copy)
        self.together.locally("collecting random states and the trainer's state", rest)
        return Taken(step, states, host_copy, content.getvalue(), files)

    def _write(self, taken: Taken) -> float:
        """Write a checkpoint, drop older ones, and say so.

        Returns:
            Seconds.
        """
        started, path = time.monotonic(), self._folder_of(taken.step)
        self.writer.write(taken, path)
        write_s = time.monotonic() - started
        self.loader.torn_steps.discard(taken.step)
        if self.rank == 0:
            self._drop_old(taken.step)
            logger.info(f"Saved checkpoint {path} in {write_s:.1f} s")
        return write_s

    def _drop_old(self, saved: int) -> None:
        """What cannot be deleted stays: the new checkpoint is complete."""
        keep = self.cfg.keep_latest_k
        try:
            older = [path for path in self._whole() if step_of(path) != saved]
            best = best_of(self._whole(), self.cfg.keep_best)
            for path in older[: max(0, len(older) - keep + 1)] if keep else []:
                if best and path == best[0]:
                    continue
                # Delete the marker first: a folder that is partly deleted is then not a checkpoint.
                (path / MARKER).unlink()
                shutil.rmtree(path, ignore_errors=True)
            for path in self.folder.glob("step-*.tmp"):
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            logger.warning(f"an old checkpoint cannot be deleted: {error}")

    def _whole(self) -> list[Path]:
        """The checkpoints, in the order they were written. Torn ones do not count: a whole one must not make room for
        them."""
        steps = [step for step in complete_steps(self.folder) if step not in self.loader.torn_steps]
        return [self._folder_of(step) for step in steps]

    def _announce(self) -> None:
        cfg = self.cfg
        if not cfg.enable:
            logger.warning("No checkpoints ([checkpoint] enable = false): the trained weights are lost at the end")
            return
        kept = f"the newest {cfg.keep_latest_k}" if cfg.keep_latest_k else "all"
        best = f" and the best by {cfg.keep_best}" if cfg.keep_best and cfg.keep_latest_k else ""
        every = f"every {cfg.interval} steps and at the end"
        logger.info(f"Checkpoints go to {self.folder}, {every}; {kept}{best} are kept")
        found = best_of(self._whole(), cfg.keep_best)
        if found and step_of(found[0]) > self._saved_step:
            logger.warning(
                f"{found[0]} is the best by {cfg.keep_best} ({found[1]:.4g}), and of a later step than "
                f"{self._saved_step}: this run's own checkpoint of that step takes its place. Copy it to keep it"
            )

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"
