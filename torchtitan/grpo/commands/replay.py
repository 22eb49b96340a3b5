"""Train on the recorded answers of a run, without servers: to debug a loss, or to time a step on real data.

The loop, the losses and the flags are those of grpo_train.py. docs/replay.md says what a replay repeats and what not.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpo_train
from torchtitan.config import JobConfig
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.jobs import of_replay
from torchtitan.grpo.config.load import load_config, take_dry_run
from torchtitan.grpo.config.machine import check_launch
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.losses import check_functions
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.policy.rows import documents, encoded
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.sample_log import SampleLog
from torchtitan.grpo.reporting.step_lines import read_lines
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.rollouts.replay import Replay
from torchtitan.grpo.run.packed import Packed
from torchtitan.grpo.run.rollout_worker import Model, RolloutWorker
from torchtitan.grpo.run.rollouts import Absent, Taken
from torchtitan.grpo.run.run_folder import has_steps
from torchtitan.grpo.run.running import running
from torchtitan.tools.logging import logger

OF_THE_RUN = (
    "parallelism.ranks",
    "ray",
    "rollout.api_key_env",
    "rollout.serve_host",
    "rollout.serve_key_env",
    "distill.api_key_env",
    "reward.secrets",
)
"""Sections and keys of the recorded run that say nothing about a replay: it runs on any number of ranks, without Ray,
and neither asks anybody nor answers."""


class NoSync:
    """In place of weight sync: there is nobody to send weights to."""

    def order_writes_after(self) -> None: ...

    def finished(self) -> list[SyncReport]:
        return []


class Replayed(Absent):
    """Recorded groups in place of rollouts, packed as this run's configuration says.

    Args:
        inputs: What the warm start learns from.
    """

    def __init__(self, replay: Replay, inputs: RolloutWorker) -> None:
        super().__init__(inputs.config)
        self.replay, self.inputs = replay, inputs
        self.groups: dict[int, list[Group]] = {}
        replay.fit(inputs.config, inputs.model.vocab_size, inputs.model.routes)

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        self.ledger, self.inputs.layout = ledger, layout
        self.samples = SampleLog(self.config, self.config.job.dump_folder, metrics, self.inputs.tokenizer)
        self.inputs.resources.callback(self.samples.close)

    def pairs(self) -> list[Buffer]:
        return self.inputs.pairs()[1][0]

    def take(self, step: int) -> Taken:
        with self.ledger.stage("rollout"):
            groups = self.groups[step] = self.replay.take(step - 1)
        with self.ledger.stage("pack"):
            it = Packed.of(groups, step - 1, self.config, self.check, self.inputs.layout)
        parts: list[list[list[Buffer] | None]] = [[encoded(rows_by_rank)] for rows_by_rank in it.minibatches]
        metrics = it.metrics(self.config.async_grpo.max_age)
        return Taken(it.rewards, it.advantages, it.servers, parts, documents(it.minibatches), metrics)

    def is_ready(self) -> bool:
        return True

    def log(self, step: int, advantages: list[list[float]]) -> None:
        self.samples.log(step, self.groups.pop(step), advantages)


class ReplayTrainer(grpo_train.Trainer):
    """A trainer whose answers come from a record. It neither validates nor saves.

    Args:
        run: The folder of the recorded run.
        out: Where metrics and samples go. None: the folder `replay` in the run's, in place of an earlier replay's.
        after: The run's checkpoint to start from, with its optimizer's state. 0: `[model] weights`, as a new run.
    """

    def __init__(self, run: Path, out: Path | None, after: int, config: JobConfig) -> None:
        if out is not None and has_steps(out):
            raise UserError(f"--out {out} already holds a run, whose metrics would be lost: name another folder")
        self.replay = Replay(run, after)
        if config.training.steps <= after:
            raise UserError(
                f"[training] steps = {config.training.steps} ends before the first step after --after {after}"
            )
        super().__init__(of_replay(config, run, out, after))

    def set_up(self) -> None:
        config = self.config
        check_functions(config.grpo, self.device)
        self.read_model(saves=False)
        self.rollouts = Absent(config)
        if self.is_rank0:
            model = Model(self.source.model_args.vocab_size, self.end_token_ids, self.source.routes)
            inputs = RolloutWorker(config, self.tokenizer, model, self.resources)
            self.rollouts = Replayed(self.replay, inputs)
        self.rollouts.check.is_due = False  # a replay may well begin with other weights than those that sampled
        self.join()
        # The run ends with the record, on every rank at the same step, and its schedule stays as it is.
        last = min(config.training.steps, self.broadcast.json(self.replay.last_step))
        self.config = changed(self.config, {"training.steps": last})
        self.build()
        self.rollouts.connect(self.ledger, self.layout, self.metrics, lambda: self.step)
        self.weight_sync = NoSync()  # type: ignore[assignment]
        self.watch()
        if self.is_rank0:
            logger.info(f"{self.replay.describe()}; metrics go to {config.job.dump_folder}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.config = changed(self.config, {"checkpoint.enable": False})  # read, and never written
        self.checkpointer.cfg = self.config.checkpoint

    def publish(self, wait: bool = False) -> None:
        """To nobody."""

    def drain(self) -> None:
        """Nobody is owed anything."""

    def stop(self) -> None:
        """Nothing is under way."""

    @property
    def validates(self) -> bool:
        return False

    def train(self) -> None:
        super().train()
        if self.is_rank0:
            print(timing(Path(self.config.job.dump_folder) / "metrics.jsonl", self.replay.after))


def timing(metrics: Path, after: int) -> str:
    """Seconds of each step after `after` by stage, and their medians, as a table."""
    steps = [line for line in read_lines(metrics) if line.get("step", 0) > after]
    names = [name for name in ("time/step_s", "time/pack_s", "time/logprobs_s", "time/train_s") if name in steps[-1]]
    columns = ["train/answer_tokens", *names]
    rows = [[f"{line['step']}", *(f"{line.get(name, 0.0):.4g}" for name in columns)] for line in steps]
    rows += [["median", *(f"{median(line.get(name, 0.0) for line in steps):.4g}" for name in columns)]]
    titles = ["step", "trained tokens", *(name.removeprefix("time/").replace("_s", " s") for name in names)]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]
    )


def _of_the_run(given: Mapping[str, Any]) -> Iterator[str]:
    """OF_THE_RUN, and the port of its endpoint, which may still be open, unless its environment needs one."""
    yield from OF_THE_RUN
    if given.get("rollout.environment") != "endpoint":
        yield "rollout.serve_port"


def main(arguments: Namespace) -> int:
    """
    Raises:
        UserError: There is no such folder, or a flag asks for no run.
    """
    if not arguments.run.is_dir():  # a flag's value is taken for it if it is left out
        raise UserError(f"torchtitan-grpo replay: {arguments.run} is no folder: name that of a recorded run first")
    if arguments.after < 0:
        raise UserError(f"--after {arguments.after} is no step: name that of a checkpoint, or 0 for the beginning")
    asked, flags = take_dry_run(arguments.flags)
    if asked is not None:
        raise UserError(
            "torchtitan-grpo replay has no --dry_run and no --check: lower --training.steps for a short one"
        )
    check_launch()
    init_log_lines()
    config = load_config(flags, flags_only=_of_the_run)
    with running(config, partial(ReplayTrainer, arguments.run, arguments.out, arguments.after)) as trainer:
        trainer.train()
    return 0
