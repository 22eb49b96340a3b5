"""Supervised fine-tuning: `python sft_train.py --job.config_file train_configs/sft_quickstart.toml`.

Rank 0 reads conversations and packs them, and every rank trains on its rows. There are no rollouts, servers or rewards.
Checkpoints, resuming, stopping and metrics are those of every `Run`. The loss is in `torchtitan/grpo/policy/sft.py`;
what is learned of a conversation is in `torchtitan/grpo/data/chat.py`.
"""

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torchtitan_overlay  # noqa: F401  first: imports are quicker, and torchtitan's own __init__.py needs Triton

import torch

from torchtitan.grpo.config.tables import held_out_sets
from torchtitan.grpo.data.conversations import load_conversations
from torchtitan.grpo.data.overview import overview
from torchtitan.grpo.data.samples import Conversation, Prompt
from torchtitan.grpo.policy.batch import supervised_samples
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import packing_fractions, packing_sums
from torchtitan.grpo.policy.rows import PackedRow, documents, encoded
from torchtitan.grpo.policy.sft import summed, supervised_loss, token_metrics
from torchtitan.grpo.process.stopping import StopRequested, run_and_exit
from torchtitan.grpo.reporting.console import SFT_FIELDS
from torchtitan.grpo.reporting.usage import highest_peaks
from torchtitan.grpo.run.run import Run
from torchtitan.grpo.run.script import run_job
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


class SftTrainer(Run):
    """A run that learns conversations. Its loop is that of grpo_train.py: begin, train_step until the last, finish."""

    job = "sft"
    ahead: Batch | None = None
    position: dict[str, Any] | None = None

    def set_up(self) -> None:
        config = self.config
        self.asked_to_stop = threading.Event()
        self.held_out_rows: dict[str, list[PackedRow]] = {}
        self.read_model()
        if self.is_rank0:
            own = self.tokenizer, self.source.model_args.vocab_size, self.end_token_ids
            self.conversations, self.held_out = load_conversations(config, *own)
            logger.info("\n".join(overview(self.conversations, self.held_out, self.tokenizer)))
        self.join()
        self.build()
        self.metrics.show_fields(SFT_FIELDS)
        self.watch()

    # ---------------------------------------------------------------------------------------------- the loop

    def begin(self) -> None:
        """Resume, or begin with the weights of `[model]`."""
        self.resume()
        self.policy.offload.settle()
        if self.config.validation.enable:
            for i, table in enumerate(held_out_sets(self.config)):
                rows = encoded(self.rows_by_rank(self.held_out[i].prompts)) if self.is_rank0 else None
                self.held_out_rows[table.name] = self.broadcast.rows(rows, self.data_rank)
        if self.step == 0:
            self.log(self.validate())

    def train_step(self) -> None:
        """Train on a batch, pack the next one while the device computes, validate, log, save."""
        self.next_step()
        self.stop_if_asked()
        batch = self.ahead or self.next_batch()
        sums, grad_norm = self.train_on(batch)
        self.ahead = None
        with contextlib.suppress(StopRequested):  # this step comes first: `stop_if_asked` stops the run
            self.ahead = None if self.is_last else self.next_batch()
        metrics = batch.metrics | self.token_metrics(sums, grad_norm)
        with self.ending.later():
            self.policy.finite_steps.check()
        metrics |= self.validate()
        with self.ending.later():
            self.log(metrics)
        self.save()

    def stop(self) -> None:
        self.asked_to_stop.set()

    def stop_if_asked(self) -> None:
        """After a signal or an error, every rank leaves here: before a step, with the one before it to be saved."""
        with self.ending.rank0_alone():
            if self.is_rank0 and self.asked_to_stop.is_set():
                raise StopRequested
        self.broadcast.barrier()

    def next_batch(self) -> Batch:
        """The next `[sft] batch_size` rows of the data, packed: this rank's part of them."""
        parts, metrics, position = None, {}, None
        with self.ledger.stage("pack"):
            if self.is_rank0:
                with self.ending.rank0_alone():
                    rows = self.rows_by_rank(self.conversations.next(self.config.sft.batch_size))
                    position = self.conversations.state_dict()
                    parts = encoded(rows)
                    metrics = packing_fractions(packing_sums([rows], self.layout.attention_tokens))
                    metrics |= self.usage.work(*documents([rows]))
                    metrics |= self.conversations.epochs()
            return Batch(self.own_rows(parts), metrics, position)

    def train_on(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """One optimizer step. Returns sums over this rank's tokens and the gradient norm, still on the device."""
        with self.ledger.stage("train"):
            sums = self.policy.gradients(batch.rows, lambda _, row: supervised_loss(self.policy.model, row))
            norm = self.policy.clip()
            self.ending.trained = None  # until the whole step is
            self.policy.step(norm)
            batch.metrics["train/lr"] = self.policy.end_step()
        self.position, self.ending.trained = batch.position, self.step
        return sums, norm

    def token_metrics(self, sums: dict[str, torch.Tensor], grad_norm: torch.Tensor) -> dict[str, float]:
        """What `train_on` returned as metrics. Waits for the device."""
        of_step = self.sum(sums | self.usage.peaks(self.data_rank, self.data_ranks))
        metrics = {f"train/{name}": value for name, value in token_metrics(of_step).items()}
        metrics |= {"train/answer_tokens": of_step["tokens"], "train/grad_norm": float(grad_norm)}
        return metrics | self.policy.finite_steps.metrics() | highest_peaks(of_step)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and accuracy on held-out rows, at the first, every `validation.freq`-th and the last step."""
        if not self.validates:
            return {}
        with self.ledger.stage("validate"):
            of_sets = {}
            for name, rows in self.held_out_rows.items():
                sums = summed(supervised_loss(self.policy.model, Microbatch.of(row, self.device))[1] for row in rows)
                of_sets[name] = token_metrics(self.sum(sums))
        metrics = {
            f"validation/{name}/{key}": value for name, own in of_sets.items() if name for key, value in own.items()
        }
        for key in next(iter(of_sets.values())):
            metrics[f"validation/{key}"] = fmean(own[key] for own in of_sets.values())
        if self.is_rank0:
            self.checkpointer.validated(self.step, metrics)
        return metrics

    def log(self, metrics: dict[str, float]) -> None:
        self.report(metrics, self.ledger.close_step())

    def state_dict(self) -> dict[str, Any]:
        """The position in the data is that after the last batch trained on, not the one packed ahead."""
        return super().state_dict() | {"conversations": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.is_rank0:
            self.position = state["conversations"]
            self.conversations.load_state_dict(self.position)

    # ----------------------------------------------------------------------------------------- parts of a step

    def rows_by_rank(self, conversations: Sequence[Prompt]) -> list[list[PackedRow]]:
        """On rank 0. The weights of the rows hold the number of trained tokens in all of them."""
        every = (each.documents for each in conversations if isinstance(each, Conversation))
        samples = supervised_samples([document for documents in every for document in documents])
        return self.layout.pack(samples)


def main(argv: list[str]) -> int:
    return run_job(argv, SftTrainer, "sft")


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
