"""Writing one checkpoint."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import PreTrainedTokenizerBase

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.grpo.checkpoint.export import infinite_in, read_full, read_hf
from torchtitan.grpo.checkpoint.marker import MARKER, Marker, flush, markers, measured
from torchtitan.grpo.checkpoint.parallel_writer import ParallelWriter
from torchtitan.grpo.checkpoint.together import StageFailed, Together
from torchtitan.grpo.checkpoint.trainer_state import TRAINER_STATE
from torchtitan.grpo.host_memory.host_copy import HostCopy
from torchtitan.grpo.model.peft_folder import gather_adapter, write_adapter
from torchtitan.grpo.model.rounded_weights import RoundedLinear, round_exported
from torchtitan.grpo.model.source import ModelSource, gather_hf, write_hf
from torchtitan.tools.logging import logger


@dataclass(frozen=True)
class Taken:
    """What a rank saves of one step, as it was at the end of that step.

    Attributes:
        states: What DCP writes.
        host_copy: It has copied their tensors to the host, so training may go on. None: they are the run's own.
        random_states: The content of this rank's file.
        files: Further files, those in the exports' folders included: name and content. Empty on ranks other than 0.
    """

    step: int
    states: dict[str, Any]
    host_copy: HostCopy | None
    random_states: bytes
    files: dict[str, bytes | memoryview]


def enter_thread(device: torch.device) -> None:
    """Call it first in each thread that writes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread begins with device 0


class Writer:
    """Writes one checkpoint at a time: its files under another name, then the marker; one rename completes it.

    Args:
        config: `[checkpoint] export_dtype` and `[lora] merge` are read.
        model: It is gathered for the export, unless what was taken is on the host.
        source, tokenizer: See `Checkpointer`.
        device: Of the model.

    Attributes:
        exports: Names of the folders for inference in a checkpoint.
    """

    def __init__(
        self,
        config: JobConfig,
        together: Together,
        model: nn.Module,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
    ) -> None:
        self._cfg, self._together = config.checkpoint, together
        self._model, self._source, self._tokenizer = model, source, tokenizer
        self._device = device
        kinds = {"adapter": source.lora is not None, "hf": source.lora is None or config.lora.merge}
        self.exports = [name for name, is_due in kinds.items() if is_due and self._cfg.export_dtype != "none"]

    def write(self, taken: Taken, path: Path) -> None:
        """Write what was taken to the folder `path`, in place of what is there. Collective.

        With `taken.host_copy` any thread may call it: it uses no process group but `Together.group`.

        Raises:
            StageFailed: On every rank. Nothing of the checkpoint is left.
            RuntimeError: A rank failed inside a collective, or ended. The run cannot go on.
        """
        unfinished = path.with_name(path.name + ".tmp")
        try:
            self._write_stages(taken, unfinished, path)
        except StageFailed:
            if self._together.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
            raise

    def _write_stages(self, taken: Taken, unfinished: Path, path: Path) -> None:
        """Each stage is of one rank's files, or of collectives, so that a rank that fails keeps nobody waiting."""
        together = self._together
        together.locally(f"clearing {unfinished}", lambda: self._clear(unfinished))
        if taken.host_copy is not None:
            together.locally("copying weights and optimizer state to the host", taken.host_copy.wait)
        together.collectively(
            f"writing {unfinished / 'dcp'}",
            lambda: dcp.save(
                taken.states,
                storage_writer=ParallelWriter(unfinished / "dcp", lambda: enter_thread(self._device)),
                process_group=together.group,
            ),
        )
        for name in self.exports:
            self._export(taken, unfinished, name)
        rng_path = unfinished / f"rng-rank-{together.rank}.pt"
        together.locally(f"writing {rng_path}", lambda: rng_path.write_bytes(taken.random_states))
        what = f"writing {unfinished / TRAINER_STATE} and the files beside it"
        together.locally(what, lambda: self._write_files(unfinished, taken.files))
        files = together.locally(f"reading back {unfinished}", lambda: measured(unfinished, together.rank))
        written = {name: size_and_sum for of_rank in files for name, size_and_sum in sorted(of_rank.items())}
        together.locally(f"completing {path}", lambda: self._complete(unfinished, path, taken, written))

    def _clear(self, unfinished: Path) -> None:
        if self._together.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def _export(self, taken: Taken, unfinished: Path, name: str) -> None:
        """The Hugging Face folder "hf", or "adapter" for PEFT. A thread reads the weights back: the model's process
        groups are not its own."""
        together, source, dtype = self._together, self._source, TORCH_DTYPE_MAP[self._cfg.export_dtype]
        folder, dcp_folder = unfinished / name, unfinished / "dcp"
        rounds = any(isinstance(layer, RoundedLinear) for layer in self._model.modules())
        # What float16 holds of a weight may be rounded to another one, and what it holds of the largest sets the scale.
        read_as = torch.float32 if rounds and dtype == torch.float16 else dtype

        def gather() -> dict[str, torch.Tensor]:
            return gather_adapter(self._model) if name == "adapter" else gather_hf(self._model, source, read_as)

        def read() -> dict[str, torch.Tensor]:
            model = taken.states["model"]
            return read_full(dcp_folder, model) if name == "adapter" else read_hf(dcp_folder, model, source, read_as)

        def write(full: dict[str, torch.Tensor] | None) -> None:
            if together.rank == 0:
                full = read() if full is None else full
                if name == "adapter":
                    write_adapter(full, source, folder, dtype)
                else:
                    if rounds:
                        round_exported(full, source, dtype)
                    write_hf(full, source, folder, self._tokenizer)
                if dtype == torch.float16 and (names := infinite_in(folder)):
                    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
                    logger.warning(
                        f"checkpoint: weights of step {taken.step} are too large for float16 and infinite in its "
                        f"export {name}: {', '.join(names[:3])}{others}. The checkpoint itself is exact. Set "
                        '[checkpoint] export_dtype = "bfloat16" or "float32"'
                    )

        full = together.collectively(f"gathering for {folder}", gather) if taken.host_copy is None else None
        together.locally(f"writing {folder}", lambda: write(full))

    def _write_files(self, unfinished: Path, files: dict[str, bytes | memoryview]) -> None:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)

    def _complete(self, unfinished: Path, path: Path, taken: Taken, written: dict[str, tuple[int, str]]) -> None:
        if self._together.rank != 0:
            return
        number = 1 + max((marker.number for marker in markers(path.parent)[0]), default=0)
        sizes = {name: size for name, (size, _) in written.items()}
        sums = {name: of_file for name, (_, of_file) in written.items()}
        world_size, states = self._together.world_size, list(taken.states)
        Marker(taken.step, world_size, time.time(), states, sizes, number, sums).write(unfinished)
        flush(unfinished / MARKER)
        for folder in (*(entry for entry in unfinished.rglob("*") if entry.is_dir()), unfinished):
            flush(folder)
        if path.exists():  # an older branch of the run, torn or incomplete; a rename cannot replace a folder
            replaced = path.with_name(path.name + ".replaced.tmp")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        unfinished.rename(path)
        flush(path.parent)
