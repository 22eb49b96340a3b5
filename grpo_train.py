"""GRPO training: `python grpo_train.py --job.config_file train_configs/quickstart.toml`.

One class, one loop, read from top to bottom. Every rank holds a shard of the model, trains on its rows and takes part
in publishing the weights to the servers. A child process of rank 0 has the rollouts: it sends prompts, scores the
answers and packs them (docs/processes.md).

A step, and what runs meanwhile:

    take      rank 0 waits for the step's groups, as packed rows. The others wait for theirs
    pack      each rank gets its rows from rank 0, and moves them to its device
    update    log-probabilities, loss, backward and optimizer, which the device has before it a whole step long
    publish   copies the new weights on a stream of its own; a thread sends them to the servers while the next step
              trains. The next optimizer step waits for the copy, on the device; nothing waits for a server
    ahead     with [async_grpo]: take and pack the next step, while the device still computes this one
    learned   waits for the device: metrics, and whether sampler and trainer agree
    validate, log, save

With [async_grpo] the servers answer the prompts of later steps all the time, at most `max_trajectory_age_steps` ahead.
Without it, `take` requests the groups of its step.

The loss is in `torchtitan/grpo/policy/losses.py`, rewards are in `torchtitan/grpo/rewards/functions.py`. The three
objects of the loop are in `torchtitan/grpo/run/`: `Run`, the base of `Trainer`; `Policy`; and `Rollouts`.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchtitan_overlay  # noqa: F401  first: imports are quicker, and torchtitan's own __init__.py needs Triton

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.dry_run.shared_gpu import check_shared_gpu
from torchtitan.grpo.policy import losses
from torchtitan.grpo.policy.kl_reward import FixedLogprobs, subtract_kl
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.sft import supervised_steps
from torchtitan.grpo.process.stopping import StopRequested, run_and_exit
from torchtitan.grpo.reporting.step_metrics import policy_metrics
from torchtitan.grpo.reporting.usage import highest_peaks
from torchtitan.grpo.run.explanation import Explanation
from torchtitan.grpo.run.policy import LossAndSums
from torchtitan.grpo.run.rollouts import Absent, Rollouts
from torchtitan.grpo.run.run import Run
from torchtitan.grpo.run.script import run_job
from torchtitan.grpo.servers.own import OwnServers
from torchtitan.grpo.weight_sync.published import published_weights
from torchtitan.grpo.weight_sync.sync import WeightSync, wire_dtype

LearnedOnDevice = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass
class Batch:
    """What one step trains on.

    Attributes:
        rewards: By group and sample, on every rank. An answer without a reward is left out.
        advantages: The same, on rank 0.
        servers: That sampled the answers, on every rank; see `SamplerCheck.servers`.
        minibatches: This rank's packed rows of each minibatch, on its device.
        metrics: Of rollouts and packing, on rank 0.
    """

    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: list[list[Microbatch]]
    metrics: dict[str, float]


class Trainer(Run):
    """A run that trains with GRPO. `train` is the loop: begin, train_step until the last one, finish."""

    packed_ahead: Batch | None = None

    def set_up(self) -> None:
        """In this order, so that bad input is refused before a process group or a server exists."""
        self.rollouts = Rollouts(self.config, self.resources) if self.is_rank0 else Absent(self.config)
        losses.check_functions(self.config.grpo, self.device)
        self.read_model()
        self.rollouts.prepare(self.source, self.tokenizer, self.end_token_ids)
        self.join()
        self.start_servers()
        self.build(link_free=lambda: self.weight_sync.idle())
        self.connect_servers()

    # ---------------------------------------------------------------------------------------------- the loop

    def begin(self) -> None:
        """Resume, or warm start. Publish the first weights."""
        if self.resume() == 0:
            with self.ending.rank0_alone():
                self.rollouts.sleep()
            self.broadcast.barrier()
            self.rollouts.take_memory()
            self.warm_start()
            self.policy.keep_reference()
        self.policy.offload.settle()
        self.publish(wait=True)
        if self.step == 0:
            self.log(self.validate())
        else:  # these weights are of no step: the next line is about its own
            self.weight_sync.finished()
            self.ledger.close_step()

    def train_step(self) -> None:
        """Collect, pack, update, publish, validate, log, save. From `update` on, no failure costs the step."""
        self.next_step()
        batch = self.packed_ahead or self.pack(self.step)
        on_device = self.update(batch)
        with self.ending.later():
            self.publish()
        self.packed_ahead = self.pack_ahead()
        metrics = batch.metrics | self.learned(batch, *on_device)
        with self.ending.later():
            metrics |= self.validate()
        with self.ending.later():
            self.log(metrics, batch)
        self.save()

    def drain(self) -> None:
        """Wait until every server has the last weights. The other ranks' sync threads serve rank 0's pushes."""
        if self.is_rank0:
            self.weight_sync.drain()

    def stop(self) -> None:
        self.weight_sync.stop_waiting()
        self.rollouts.stop()

    def warm_start(self) -> None:
        """`[sft]`: supervised steps on pairs of prompt and reference answer."""
        sft, model, max_norm = self.config.sft, self.policy.model, self.config.training.max_norm
        steps = supervised_steps(model, lambda: self.own_rows(self.rollouts.pairs()), sft, max_norm, self.device)
        for i, loss in enumerate(steps, start=1):
            if i % 20 == 0 or i == sft.steps:
                self.metrics.log(i, self.sum({"sft/loss": loss}), axis="sft/step")

    # ------------------------------------------------------------------------------------------ parts of a step

    def pack(self, step: int) -> Batch:
        """A step's scored groups as packed rows: this rank's rows of each minibatch."""
        ahead = step > self.step
        with self.ending.rank0_alone():
            taken = self.rollouts.take(step)
        with self.ledger.stage("pack"):
            rewards, servers = self.broadcast.json([taken.rewards, taken.servers])
            self.rollouts.take_memory()
            if not ahead:  # ahead, this step's activations may still need the memory
                self.policy.offload.prefetch()
            minibatches = [self.own_rows(*shares) for shares in taken.minibatches]
            metrics = taken.metrics | {"pack/ahead": float(ahead)}
            metrics |= self.usage.work(*taken.documents) if taken.documents else {}
        return Batch(rewards, taken.advantages, servers, minibatches, metrics)

    def pack_ahead(self) -> Batch | None:
        """With `[async_grpo]`: pack the next step's batch while the device trains this one, if its groups are ready.

        Not before a checkpoint, which must hold all groups that were not trained on. Not before a validation: while
        rank 0 validates, the other ranks would wait in the next step's collectives, past NCCL's time limit and with
        the weights that the validation needs.
        """
        if not self.config.async_grpo.enabled or self.is_last or self.saves or self.validates:
            return None
        with contextlib.suppress(StopRequested):  # this step comes first: the next `pack` stops the run
            with self.ending.rank0_alone():
                is_ready = self.rollouts.is_ready()
            if self.broadcast.json(is_ready):
                return self.pack(self.step + 1)
        return None

    def update(self, batch: Batch) -> LearnedOnDevice:
        """Take one optimizer step per minibatch.

        Returns:
            Sums over this rank's tokens, but for the loss, which is the mean of the steps, and the gradient norm of
            each. They are still on the device: only the first step's check of the sampler waits for it here, `learned`
            waits later.
        """
        policy, fixed_logprobs = self.policy, self.fixed_logprobs(batch)
        sums: dict[str, torch.Tensor] = {}
        norms: list[torch.Tensor] = []
        with self.ledger.stage("train"):
            for rows, fixed in zip(batch.minibatches, fixed_logprobs, strict=True):
                added = policy.gradients(rows, self.loss_of(fixed, batch, has_moved=bool(norms)))
                sums |= {name: sums.get(name, 0) + value for name, value in added.items()}
                if self.rollouts.check.is_due and any(batch.servers.values()):
                    self.rollouts.check.before_first_step(list(batch.servers), self.sum(sums))
                norms.append(policy.clip())
                self.weight_sync.order_writes_after()
                self.ending.trained = None  # until the whole step is
                policy.step(norms[-1])
            batch.metrics["train/lr"] = policy.end_step()
            self.ending.trained = self.step
        return sums | {"loss": sums["loss"] / len(norms)}, torch.stack(norms)

    def fixed_logprobs(self, batch: Batch) -> list[list[FixedLogprobs]]:
        """Of the old policy and the reference, see `Policy.fixed_logprobs`. A KL in the reward is subtracted here."""
        grpo = self.config.grpo
        with self.ledger.stage("logprobs"):
            fixed = self.policy.fixed_logprobs(batch.minibatches)
            if grpo.kl_coef > 0 and grpo.kl_placement == "reward":
                given = batch.minibatches, fixed, grpo, self.config.distill, self.data_group
                batch.advantages = subtract_kl(batch.rewards, *given)
        return fixed

    def loss_of(
        self, fixed: list[FixedLogprobs], batch: Batch, has_moved: bool
    ) -> Callable[[int, Microbatch], LossAndSums]:
        """The loss of a minibatch's row, by its number and the row. `has_moved`: the step has had an optimizer step."""
        config = self.config

        def loss(index: int, row: Microbatch) -> LossAndSums:
            self.policy.offload.poll()
            logprobs, entropy, *top_logprobs = self.policy.model(row, config.rollout.temperature)
            old, reference = fixed[index]
            return losses.row_loss(
                logprobs,
                entropy,
                row,
                config.grpo,
                old_logprobs=old,
                reference_logprobs=reference,
                max_age=config.async_grpo.max_age,
                num_servers=len(batch.servers),
                distill_coef=config.distill.coef,
                top_logprobs=next(iter(top_logprobs), None),
                has_moved=has_moved,
                rounded=config.rollout.quantization != "none",
            )

        return loss

    def learned(self, batch: Batch, sums: dict[str, torch.Tensor], norms: torch.Tensor) -> dict[str, float]:
        """Turn what `update` returned into metrics, and check the servers by it. Waits for the device."""
        peaks = self.usage.peaks(self.data_rank, self.data_ranks)
        summed, servers = self.sum(sums | peaks), list(batch.servers)
        own = {"train/grad_norm": norms.mean().item(), "train/grad_norm_max": norms.max().item()}
        own |= self.policy.finite_steps.metrics() | highest_peaks(summed)
        with self.ending.later():
            self.policy.finite_steps.check()
            has_rewards = all(reward is not None for group in batch.rewards for reward in group)
            self.rollouts.check.after_step(servers, summed, has_rewards)
        return policy_metrics(summed, servers) | own

    def publish(self, wait: bool = False) -> None:
        """Publish this step's weights to the servers; with `[weight_sync] async_weight_update` in the background."""
        with self.ledger.stage("sync"):
            self.own_servers.make_room(self.policy.optimizers)
            self.weight_sync.publish(self.step, wait)

    def validate(self) -> dict[str, float]:
        """Answer held-out prompts, greedily and sampled, at the first, every `validation.freq`-th and the last step."""
        if not (self.is_rank0 and self.validates) or self.ending.failure:
            return {}
        with self.ledger.stage("validate"):
            metrics = self.rollouts.validate(self.step)
        if metrics:
            self.checkpointer.validated(self.step, metrics)
        return metrics

    def log(self, metrics: dict[str, float], batch: Batch | None = None) -> None:
        """Write the step to the console, TensorBoard, metrics.jsonl and W&B, and some answers to samples.jsonl."""
        reports = self.weight_sync.finished()
        for report in reports:
            if not (report.waited or report.alone):
                self.ledger.hide("sync", report.seconds["total"])
        times = self.ledger.close_step()
        metrics |= self.rollouts.metrics(reports, times["time/step_s"])
        self.report(metrics, times, self.rollouts.fleet)
        if batch:
            self.rollouts.log(self.step, batch.advantages)

    # ----------------------------------------------------------------------------------------- state and set-up

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rollouts": self.rollouts.state_dict(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rollouts.load_state_dict(state["rollouts"])

    def start_servers(self) -> None:
        """Those that the run starts: they load while the trainer loads its own weights."""
        trainers_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.broadcast.ranks))
        check_shared_gpu(self.config, self.device, self.broadcast.ranks)
        self.own_servers = OwnServers(self.config, self.device, trainers_here, self.broadcast.meet)
        self.resources.callback(self.own_servers.close)
        self.rollouts.start(self.own_servers)

    def connect_servers(self) -> None:
        """Wait for the servers, check that they fit the trainer, form the weight-sync groups."""
        ahead, sync, rollouts = self.config.async_grpo, self.own_servers.weight_sync, self.rollouts
        rollouts.connect(self.ledger, self.layout, self.metrics, lambda: self.step)
        self.weight_sync = WeightSync(
            published_weights(self.policy.model, self.source, wire_dtype(sync, self.device)),
            sync,
            rollouts.fleet,
            self.device,
            in_flight=ahead.in_flight_weight_updates or not ahead.enabled,
            recompute_kv=not ahead.keeps_kv,
            drain_timeout_s=self.config.rollout.request_timeout_seconds,
            on_another_gpu=self.own_servers.on_another_gpu,
        )
        self.resources.callback(self.weight_sync.close)
        self.weight_sync.connect()
        rollouts.check.explain = Explanation(self)
        self.progress.watch(lambda: (self.weight_sync.moved, rollouts.progress()))
        self.watch(self.weight_sync.describe, rollouts.describe)


def main(argv: list[str], make: Callable[[JobConfig], Run] = Trainer) -> int:
    return run_job(argv, make, "grpo")


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
