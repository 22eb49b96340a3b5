"""Supervised fine-tuning: `python sft_train.py --job.config_file train_configs/sft_quickstart.toml`.

The trainer of grpo_train.py without rollouts: rank 0 reads conversations and packs them, every rank trains on its rows.
There are no servers and no rewards. Checkpoints, resuming, stopping and metrics are those of grpo_train.py. The loss is
in `torchtitan/grpo/policy/sft.py`; what is learned of a conversation is in `torchtitan/grpo/data/chat.py`.
"""

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch

import grpo_train
from torchtitan.config import JobConfig
from torchtitan.grpo.config.jobs import check_same_job
from torchtitan.grpo.config.tables import held_out_sets
from torchtitan.grpo.data.conversations import ConversationSource
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.prompts import end_token_ids, load_tokenizer
from torchtitan.grpo.data.samples import Conversation, Prompt
from torchtitan.grpo.dry_run.disk import check_disk
from torchtitan.grpo.model.source import resolve_and_check
from torchtitan.grpo.policy.packing import pack, packing_metrics
from torchtitan.grpo.policy.rows import Microbatch, PackedRow
from torchtitan.grpo.policy.sft import summed, supervised_loss, supervised_samples, supervised_step, token_metrics
from torchtitan.grpo.process.stopping import StopRequested, run_and_exit
from torchtitan.grpo.reporting.console import SFT_FIELDS
from torchtitan.grpo.reporting.usage import highest_peaks
from torchtitan.grpo.run.run_folder import own_folder
from torchtitan.grpo.run.watchdog import Watchdog
from torchtitan.tools.logging import logger


@dataclasses.dataclass
class Batch:
    """What one step trains on.

    Attributes:
        rows: This rank's packed rows, on its device.
        metrics: Of packing and data. Empty on ranks other than 0.
        position: Where the data is after this batch. None on ranks other than 0.
    """

    rows: list[Microbatch]
    metrics: dict[str, float]
    position: dict[str, Any] | None


class NoServers:
    """In place of rollouts and weight sync, which a signal asks to stop."""

    def __init__(self) -> None:
        self.asked_to_stop = threading.Event()

    def stop(self) -> None:
        self.asked_to_stop.set()

    def stop_waiting(self) -> None:
        """Nothing waits for a server."""


class SftTrainer(grpo_train.Trainer):
    """Everything a run holds. Its loop is that of grpo_train.py: begin, train_step until the last, finish."""

    def __init__(self, config: JobConfig) -> None:
        self.ahead: Batch | None = None
        self.position: dict[str, Any] | None = None
        self.held_out_rows: dict[str, list[PackedRow]] = {}
        config.metrics.samples_per_step, config.metrics.validation_samples = 0, False  # nothing is sampled
        super().__init__(config)

    # ---------------------------------------------------------------------------------------------- the loop

    def begin(self) -> None:
        """Resume, or begin with the weights of `[model]`."""
        self.step = self.ending.trained = self.checkpointer.load_latest()
        if self.step >= self.config.training.steps:
            logger.warning(f"Nothing is left to do: the run ended at step {self.step}. Raise [training] steps to go on")
        self.offload.settle()
        if self.config.validation.enable:
            for i, table in enumerate(held_out_sets(self.config)):
                rows = self.rows_by_rank(self.held_out[i].prompts) if self.is_rank0 else None
                self.held_out_rows[table.name] = self.own_rows(rows)
        if self.step == 0:
            self.log(self.validate())

    def train_step(self) -> None:
        """Train on a batch, pack the next one while the device computes, validate, log, save."""
        self.step += 1
        self.garbage_collection.run(self.step)
        self.stop_if_asked()
        batch = self.ahead or self.next_batch()
        sums, grad_norm = self.train_on(batch)
        self.ahead = None
        with contextlib.suppress(StopRequested):  # this step comes first: `stop_if_asked` stops the run
            self.ahead = self.next_batch() if self.step < self.config.training.steps else None
        metrics = batch.metrics | self.token_metrics(sums, grad_norm)
        with self.ending.later():
            self.finite_steps.check()
        metrics |= self.validate()
        with self.ending.later():
            self.log(metrics)
        self.save()

    def finish(self) -> None:
        with self.ending.rank0_alone():
            pass  # what failed in the last step is raised here
        self.broadcast.barrier()
        self.ending.check()
        self.checkpointer.report()

    def stop_if_asked(self) -> None:
        """After a signal or an error, every rank leaves here: before a step, with the one before it to be saved."""
        with self.ending.rank0_alone():
            if self.is_rank0 and self.servers.asked_to_stop.is_set():
                raise StopRequested
        self.broadcast.barrier()

    def next_batch(self) -> Batch:
        """The next `[sft] batch_size` rows of the data, packed: this rank's part of them."""
        rows, metrics, position = None, {}, None
        with self.ledger.stage("pack"):
            if self.is_rank0:
                with self.ending.rank0_alone():
                    rows = self.rows_by_rank(self.conversations.next(self.config.sft.batch_size))
                    position = self.conversations.state_dict()
                    metrics = packing_metrics([rows], self.attention_tokens) | self.usage.work([rows])
                    metrics |= self.conversations.epochs()
            return Batch([row.to(self.device) for row in self.own_rows(rows)], metrics, position)

    def train_on(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """One optimizer step. Returns sums over this rank's tokens and the gradient norm, still on the device."""
        with self.ledger.stage("train"):
            self.optimizers.zero_grad()
            how = self.config.training.max_norm, self.finite_steps, self.optimizer_step, self.reduce_once
            result = supervised_step(self.model, batch.rows, *how)
            batch.metrics["train/lr"] = next(iter(self.optimizers)).param_groups[0]["lr"]
            self.lr_schedulers.step()
        self.position, self.ending.trained = batch.position, self.step
        return result

    def token_metrics(self, sums: dict[str, torch.Tensor], grad_norm: torch.Tensor) -> dict[str, float]:
        """What `train_on` returned as metrics. Waits for the device."""
        of_step = self._sum(sums | self.usage.peaks(self.data_rank, self.data_ranks))
        metrics = {f"train/{name}": value for name, value in token_metrics(of_step).items()}
        metrics |= {"train/answer_tokens": of_step["tokens"], "train/grad_norm": float(grad_norm)}
        return metrics | self.finite_steps.metrics() | highest_peaks(of_step)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and accuracy on held-out rows, at the first, every `validation.freq`-th and the last step."""
        if not self._validates():
            return {}
        with self.ledger.stage("validate"):
            of_sets = {}
            for name, rows in self.held_out_rows.items():
                sums = summed(supervised_loss(self.model, row.to(self.device))[1] for row in rows)
                of_sets[name] = token_metrics(self._sum(sums))
        metrics = {
            f"validation/{name}/{key}": value for name, own in of_sets.items() if name for key, value in own.items()
        }
        for key in next(iter(of_sets.values())):
            metrics[f"validation/{key}"] = fmean(own[key] for own in of_sets.values())
        if self.is_rank0:
            self.checkpointer.validated(self.step, metrics)
        return metrics

    def log(self, metrics: dict[str, float], batch: Any = None) -> None:
        """Write the step to the console, TensorBoard, metrics.jsonl and W&B."""
        times = self.ledger.close_step()
        metrics |= self.offload.metrics() | self.checkpointer.metrics()
        if self.is_rank0:
            metrics |= self.usage.metrics(metrics, times, None)
        self.metrics.log(self.step, metrics | times)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data is that after the last batch trained on, not the one packed ahead."""
        return {"step": self.step, "conversations": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same_job(state, "sft")
        self.step = state["step"]
        if self.is_rank0:
            self.position = state["conversations"]
            self.conversations.load_state_dict(self.position)

    # ----------------------------------------------------------------------------------------- parts of a step

    def rows_by_rank(self, conversations: Sequence[Prompt]) -> list[list[PackedRow]]:
        """On rank 0. The weights of the rows hold the number of trained tokens in all of them."""
        every = (each.documents for each in conversations if isinstance(each, Conversation))
        samples = supervised_samples([document for documents in every for document in documents])
        layout = self.data_ranks, self.row_multiple, self.attention_tokens, self.config.training.share_prompts
        return pack(samples, self.row_tokens, *layout)

    def own_rows(self, rows: list[list[PackedRow]] | None) -> list[PackedRow]:
        return self.broadcast.rows(rows, self.data_rank)

    # ----------------------------------------------------------------------------------------------- set-up

    def _read_inputs(self) -> None:
        self.nodes.job = "sft"
        config, assets = self.config, self.config.model.hf_assets_path
        self.source = resolve_and_check(config)
        vocab_size = self.source.model_args.vocab_size
        self.tokenizer = load_tokenizer(assets, config.data.chat_template_file, vocab_size)
        self.end_token_ids = end_token_ids(self.tokenizer, assets, vocab_size)
        if self.is_rank0:
            self.resources.enter_context(own_folder(config.checkpoint, config.job.dump_folder))
            check_disk(config, self.source)
            own = {"sft": config.sft, "seq_len": config.training.seq_len, "end_ids": self.end_token_ids}
            make = partial(ConversationSource, vocab_size=vocab_size, **own)
            self.held_out = load_held_out(config, self.tokenizer, make) if config.validation.enable else []
            self.conversations = load_training(config, self.tokenizer, self.held_out, make)

    def _start_servers(self) -> None:
        self.servers = NoServers()
        self.rollouts = self.weight_sync = cast(Any, self.servers)

    def _connect_servers(self) -> None:
        self.metrics.show_stage(self.ledger.now, SFT_FIELDS)
        self.resources.enter_context(Watchdog(self.config.debug, self.progress, [self.broadcast.describe]))


def main(argv: list[str]) -> int:
    return grpo_train.main(argv, SftTrainer, "sft")


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
