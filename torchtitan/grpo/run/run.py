"""What every run has, whatever it trains: GRPO, supervised fine-tuning, or a replay."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.checkpoint.checkpointer import Checkpointer
from torchtitan.grpo.checkpoint.disk import check_disk
from torchtitan.grpo.config.batch import row_tokens
from torchtitan.grpo.config.jobs import Job, check_same_job
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.model.finite import check_finite
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.parallelize import parallel_dims
from torchtitan.grpo.model.source import resolve_and_check
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.collectives import sum_over_ranks
from torchtitan.grpo.process.joining import store_of_this_attempt
from torchtitan.grpo.process.stopping import DONE_S, FAILED_S, closes_within, end_within, leave_process_groups
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.usage import Usage
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.run.broadcast import Broadcaster, patience_s
from torchtitan.grpo.run.ending import Ending
from torchtitan.grpo.run.nodes import Nodes
from torchtitan.grpo.run.policy import Policy
from torchtitan.grpo.run.run_folder import own_folder
from torchtitan.grpo.run.watchdog import Progress, Watchdog
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection, device_module, device_type


class Run:
    """Process group, policy, checkpoints, metrics. Leaving the context releases everything, in reverse order.

    A subclass has `set_up`, which calls `read_model`, `join` and `build` in this order, with its own parts between
    them; and `begin` and `train_step`.

    Attributes:
        job: What the run reads of the configuration.
        step: The step that is under way; 0 before the first.
        ending: How errors take the run to its end.
        data_ranks, data_rank, data_group: Data-parallel ranks, this one's number, and their group if they are several.
    """

    job: ClassVar[Job] = "grpo"

    def __init__(self, config: JobConfig) -> None:
        self.config, self.step = config, 0
        self.is_rank0 = int(os.environ.get("RANK", 0)) == 0
        self.device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type != "cpu" else None)
        self.resources = contextlib.ExitStack()
        self.nodes = self.resources.enter_context(Nodes(config, self.job))
        try:
            self.config = self.nodes.fetch()
            self.set_up()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            end_within(FAILED_S)
            self.resources.__exit__(*error)
            return
        words = f"all steps are trained, and closing takes over {DONE_S:g} s: see the main thread's stack"
        with closes_within(DONE_S, words):
            self.resources.__exit__(*error)

    # ---------------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        self.begin()
        while self.step < self.config.training.steps:
            self.train_step()
        self.finish()

    def set_up(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    def train_step(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """What failed in the last step is raised here, on rank 0 first. The last checkpoint is written."""
        with self.ending.rank0_alone():
            self.drain()
        self.broadcast.barrier()  # the other ranks may serve rank 0 until it is done
        self.ending.check()
        self.checkpointer.report()

    def drain(self) -> None:
        """What the run still owes others. Rank 0's errors end all ranks."""

    def stop(self) -> None:
        """From any thread: no further step is trained, and nothing that can wait is waited for."""

    # ------------------------------------------------------------------------------------------ parts of the loop

    def resume(self) -> int:
        """Load the checkpoint to continue from, if there is one. Returns the step that it was saved at, or 0."""
        self.step = self.ending.trained = self.checkpointer.load_latest()
        if self.step >= self.config.training.steps:
            logger.warning(f"Nothing is left to do: the run ended at step {self.step}. Raise [training] steps to go on")
        return self.step

    def next_step(self) -> None:
        self.step += 1
        self.garbage_collection.run(self.step)

    def report(self, metrics: dict[str, float], times: dict[str, float], fleet: Fleet | None = None) -> None:
        """Write the step to the console, TensorBoard, metrics.jsonl and W&B.

        Args:
            times: Its seconds, from `Ledger.close_step`.
            fleet: Servers whose GPU hours count too.
        """
        metrics |= self.policy.offload.metrics() | self.checkpointer.metrics()
        if self.is_rank0:
            metrics |= self.usage.metrics(metrics, times, fleet)
        self.metrics.log(self.step, metrics | times)

    def save(self) -> None:
        if self.saves:
            self.broadcast.barrier()  # rank 0 may still validate
            self.write_checkpoint(last=self.is_last)

    def write_checkpoint(self, last: bool) -> None:
        """Save this step; `last`: a failure ends the run."""
        with self.ledger.stage("checkpoint"):
            check_finite(self.policy.model, self.step)
            self.checkpointer.save(self.step, last)
            self.policy.offload.settle()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides weights, optimizer, scheduler and random states, see `TrainerState`."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same_job(state, self.job)
        self.step = state["step"]

    @property
    def is_last(self) -> bool:
        return self.step == self.config.training.steps

    @property
    def saves(self) -> bool:
        """Whether this step ends in a checkpoint."""
        return self.config.checkpoint.enable and self._is_due(self.config.checkpoint.interval)

    @property
    def validates(self) -> bool:
        """Whether this step ends with held-out prompts."""
        return self.config.validation.enable and self._is_due(self.config.validation.freq)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.is_last

    def sum(self, sums: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Each summed over the data ranks. Waits for the device."""
        return sum_over_ranks(sums, self.device, self.data_group)

    def own_rows(self, *parts: Sequence[Buffer] | None) -> list[Microbatch]:
        """This rank's of the rows that rank 0 has, `encoded`, on its device."""
        rows = [row for each in parts for row in self.broadcast.rows(each, self.data_rank)]
        return [Microbatch.of(row, self.device) for row in rows]

    # ----------------------------------------------------------------------------------------------- set-up

    def read_model(self, saves: bool = True) -> None:
        """Model folder and tokenizer, and on rank 0 the run's folder. Refuses bad input.

        Args:
            saves: The run will write checkpoints, if the configuration says so: the disk must have room.
        """
        config = self.config
        self.source = resolve_and_check(config)
        vocab_size, assets = self.source.model_args.vocab_size, config.model.hf_assets_path
        self.tokenizer = load_tokenizer(assets, config.data.chat_template_file, vocab_size)
        self.end_token_ids = end_token_ids(self.tokenizer, assets, vocab_size)
        if self.is_rank0:
            self.resources.enter_context(own_folder(config.checkpoint, config.job.dump_folder, saves))
            if saves:
                check_disk(config, self.source)

    def join(self) -> None:
        """The process group of all ranks, the mesh, and what ranks say to one another."""
        config = self.config
        if device_type != "cpu":
            device_module.set_device(self.device)
        with store_of_this_attempt():
            dist_utils.init_distributed(config.comm, base_folder=config.job.dump_folder)
        self.resources.push(leave_process_groups)
        self.config = config = self.nodes.settle()
        self.dims = parallel_dims(config, dist.get_world_size())
        dist_utils.set_determinism(self.dims, self.device, config.debug, [])
        self.data_ranks = self.dims.dp_replicate * self.dims.dp_shard
        data_mesh = self.dims.get_mesh("batch") if self.data_ranks > 1 else None
        self.data_group = data_mesh.get_group() if data_mesh else None
        self.data_rank = data_mesh.get_local_rank() if data_mesh else 0
        self.ledger = Ledger(self.device)
        self.progress = Progress(self.ledger)
        self.broadcast = self.resources.enter_context(Broadcaster(self.progress, patience_s(config)))
        self.ending = Ending(self.broadcast)

    def build(self, link_free: Callable[[], bool] = lambda: True) -> None:
        """Policy, checkpoints and metrics.

        Args:
            link_free: See `Policy`.
        """
        config, dump = self.config, self.config.job.dump_folder
        self.policy = policy = Policy(config, self.source, self.dims, self.device, link_free)
        longest = row_tokens(config)
        self.layout = Layout(
            longest,
            self.data_ranks,
            longest if config.compile.enable else self.dims.tp * self.dims.cp,
            policy.attention_tokens,
        )
        self.checkpointer = Checkpointer(config, policy, self, self.source, self.tokenizer, resolved(config))
        self.resources.push(self.checkpointer.close)
        self.garbage_collection = GarbageCollection(gc_freq=config.training.gc_freq)
        self.metrics = MetricsLogger(config, dump, self.is_rank0, config.training.steps)
        self.resources.callback(self.metrics.close)
        flops, spent = TrainingFlops.of(policy.model), self.metrics.last("cost/gpu_hours")
        self.usage = Usage(config, flops, self.device, self.dims.world_size, spent)

    def watch(self, *parts: Callable[[], str]) -> None:
        """Begin to watch for a standstill. A report asks each of `parts` what it waits for, and rank 0's last word."""
        heard = [] if self.is_rank0 else [self.broadcast.describe]
        self.resources.enter_context(
            Watchdog(self.config.debug, self.progress, [*parts, *heard], self.config.checkpoint.stop_seconds)
        )
