"""GRPO training: `python grpo_train.py --job.config_file train_configs/quickstart.toml`.

One class, one loop, read from top to bottom. Rank 0 sends prompts, scores the answers and packs them. Every rank
holds a shard of the model, trains on its rows and takes part in publishing the weights to the servers. The loss is in
`torchtitan/grpo/policy/losses.py`, rewards are in `torchtitan/grpo/rewards/functions.py`.
"""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

import torchtitan_overlay  # noqa: F401  before torchtitan: upstream's own __init__.py needs Triton
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.checkpoint.checkpointer import Checkpointer
from torchtitan.grpo.config.batch import requests_at_once, row_tokens
from torchtitan.grpo.config.jobs import Job, check_same_job
from torchtitan.grpo.config.load import load_config, take_dry_run
from torchtitan.grpo.config.machine import check_launch
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.config.tables import longest_tokens
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.prompts import PromptSource, end_token_ids, load_tokenizer, sft_pairs
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.dry_run.disk import check_disk
from torchtitan.grpo.dry_run.shared_gpu import check_shared_gpu
from torchtitan.grpo.endpoint.server import serve
from torchtitan.grpo.engines.fleet import Server
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.errors import PlainError, refuse
from torchtitan.grpo.host_memory.offloading import Offloading
from torchtitan.grpo.model.lora import without_adapters
from torchtitan.grpo.model.packed import attention_tokens
from torchtitan.grpo.model.parallelize import build_model, parallel_dims
from torchtitan.grpo.model.source import load_hf_weights, resolve_and_check, write_hf_config
from torchtitan.grpo.policy import losses
from torchtitan.grpo.policy.advantages import less_penalties, reward_advantages
from torchtitan.grpo.policy.batch import FixedLogprobs, has_signal, kl_by_sample, shaped_reward, split, training_samples
from torchtitan.grpo.policy.finite import FiniteSteps, check_finite
from torchtitan.grpo.policy.gradients import accumulate_gradients, clip_gradients, reduces_once
from torchtitan.grpo.policy.packing import pack, packing_metrics
from torchtitan.grpo.policy.rows import Microbatch, PackedRow
from torchtitan.grpo.policy.sft import supervised_samples, supervised_steps
from torchtitan.grpo.process.joining import store_of_this_attempt
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.stopping import FAILED_S, StopRequested, end_within, leave_process_groups, run_and_exit
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.sample_log import SampleLog
from torchtitan.grpo.reporting.step_metrics import (
    policy_metrics,
    rollout_metrics,
    server_metrics,
    sum_over_ranks,
    sync_metrics,
    validation_metrics,
)
from torchtitan.grpo.reporting.usage import Usage, highest_peaks
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.rollouts.record import RolloutRecord
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.rollouts.stream import RolloutStream
from torchtitan.grpo.rollouts.teachers.connect import connect_teachers
from torchtitan.grpo.run.broadcast import Broadcaster, patience_s
from torchtitan.grpo.run.nodes import Nodes
from torchtitan.grpo.run.run_folder import own_folder
from torchtitan.grpo.run.running import running
from torchtitan.grpo.run.save_when_stopped import Ending
from torchtitan.grpo.run.watchdog import Progress, Watchdog
from torchtitan.grpo.servers.own import OwnServers
from torchtitan.grpo.weight_sync.published import published_weights
from torchtitan.grpo.weight_sync.sync import WeightSync, wire_dtype
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection, device_module, device_type

LossAndSums = tuple[torch.Tensor, dict[str, torch.Tensor]]
LearnedOnDevice = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Batch:
    """What one step trains on.

    Attributes:
        groups: The answers; empty on ranks other than 0.
        rewards, advantages: By group and sample, on every rank. An answer without a reward is left out.
        servers: That sampled the answers, on every rank; see `SamplerCheck.servers`.
        minibatches: This rank's packed rows of each minibatch, on its device.
        metrics: Of rollouts and packing.
    """

    groups: list[Group]
    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: list[list[Microbatch]]
    metrics: dict[str, float]


class Trainer:
    """Everything a run holds. `train` is the loop; leaving the context releases everything."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.step = 0
        self.packed_ahead: Batch | None = None
        self.seed = config.debug.seed or 0
        self.is_rank0 = int(os.environ.get("RANK", 0)) == 0
        self.resources = contextlib.ExitStack()
        self.nodes = self.resources.enter_context(Nodes(config))
        try:
            # Bad input is refused before a process group or a server exists.
            self._read_inputs()
            self._init_distributed()
            self._start_servers()
            self._build()
            self._connect_servers()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Release servers, workers, files and process groups in reverse order."""
        if error[0] is not None:
            end_within(FAILED_S)
        self.resources.__exit__(*error)

    # ---------------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        self.begin()
        while self.step < self.config.training.steps:
            self.train_step()
        self.finish()

    def begin(self) -> None:
        """Resume, or warm start. Publish the first weights."""
        config = self.config
        self.step = self.ending.trained = self.checkpointer.load_latest()
        if self.step >= config.training.steps:
            logger.warning(f"Nothing is left to do: the run ended at step {self.step}. Raise [training] steps to go on")
        if self.step == 0:
            self.own_servers.sleep()
            self.warm_start()
            if self.reference is not None:
                self.reference.load_state_dict(self.model.state_dict())
        self.offload.settle()
        self.publish(wait=True)
        if self.step == 0:
            self.log(self.validate())

    def train_step(self) -> None:
        """Collect, pack, update, publish, validate, log, save. From `update` on, no failure costs the step."""
        self.step += 1
        self.garbage_collection.run(self.step)
        batch = self.packed_ahead or self.pack(self.collect(self.step), self.step)
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

    def finish(self) -> None:
        """Wait until every server has the last weights, and the last checkpoint is written."""
        with self.ending.rank0_alone():
            if self.is_rank0:
                self.weight_sync.drain()
        self.broadcast.barrier()  # the other ranks' sync threads serve rank 0's pushes until it is done
        self.ending.check()
        self.checkpointer.report()

    def warm_start(self) -> None:
        """`[sft]`: supervised steps on pairs of prompt and reference answer."""
        sft = self.config.sft
        steps = supervised_steps(self.model, self._next_sft_rows, sft, self.config.training.max_norm, self.device)
        for i, loss in enumerate(steps, start=1):
            if i % 20 == 0 or i == sft.steps:
                self.metrics.log(i, self._sum({"loss": loss}), prefix="sft")

    def collect(self, step: int) -> list[Group]:
        """A step's scored groups on rank 0, none elsewhere. With `[async_grpo]` their rollouts began earlier."""
        if not self.is_rank0:
            return []
        with self.ending.rank0_alone():
            with self.ledger.stage("rollout"):
                groups = self.rollouts.take(step - 1)
                self.own_servers.sleep()
            self.ledger.add("reward", self.rollouts.take_scoring_seconds(), out_of="rollout")
            self.record.write(step, groups)
            return groups

    def pack(self, groups: list[Group], step: int) -> Batch:
        """Turn rewards into advantages and answers into packed rows: this rank's rows of each minibatch."""
        grpo, budget, limit = self.config.grpo, self.row_tokens, self.config.rollout.max_answer_tokens
        share = self.config.training.share_prompts
        ahead = step > self.step
        if not ahead:  # ahead, this step's activations may still need the memory
            self.offload.prefetch()
        with self.ledger.stage("pack"):
            with self.ending.rank0_alone():
                shaped = [[shaped_reward(s, grpo, limit) for s in group] for group in groups]
                metrics = rollout_metrics(groups, shaped, step - 1, self.max_age)
                servers = self.sampler_check.servers(groups, step - 1)
            rewards, servers = self.broadcast.json([shaped, servers])
            advantages = reward_advantages(rewards, grpo, self.config.distill)
            minibatches: list[list[Microbatch]] = []
            packed = []
            for part in split(len(advantages), grpo.minibatches):
                rows = None
                if self.is_rank0:
                    with self.ending.rank0_alone():
                        own = [groups[i] for i in part], [advantages[i] for i in part]
                        # The sampler's log-probabilities meet a policy that the first minibatch has changed.
                        compared = servers if not minibatches or grpo.proximal_logprobs == "recompute" else ()
                        numbers = partial(self.sampler_check.numbers, compared)
                        samples = training_samples(*own, step - 1, grpo, limit, numbers, self.config.distill)
                        rows = pack(samples, budget, self.data_ranks, self.row_multiple, self.attention_tokens, share)
                        packed.append(rows)
                minibatches.append([row.to(self.device) for row in self.broadcast.rows(rows, self.data_rank)])
            if packed:
                metrics |= packing_metrics(packed, self.attention_tokens) | {"pack/ahead": float(ahead)}
                metrics |= self.usage.work(packed)
            return Batch(groups, rewards, advantages, servers, minibatches, metrics)

    def pack_ahead(self) -> Batch | None:
        """With `[async_grpo]`: pack the next step's batch while the device trains this one, if its groups are ready.

        Not before a checkpoint, which must hold all groups that were not trained on. Not before a validation: while
        rank 0 validates, the other ranks would wait in the next step's collectives, past NCCL's time limit and with
        the weights that the validation needs.
        """
        last = self.step == self.config.training.steps
        if not self.config.async_grpo.enabled or last or self._saves() or self._validates():
            return None
        with contextlib.suppress(StopRequested):  # this step comes first: the next `collect` stops the run
            with self.ending.rank0_alone():
                is_ready = self.is_rank0 and self.rollouts.is_ready()
            if self.broadcast.json(is_ready):
                return self.pack(self.collect(self.step + 1), self.step + 1)
        return None

    def update(self, batch: Batch) -> LearnedOnDevice:
        """Take one optimizer step per minibatch. Token weights hold the global normaliser: gradients are only summed.

        Returns:
            Sums over this rank's tokens, but for the loss, which is the mean of the steps, and the gradient norm of
            each. They are still on the device: only the first step's check of the sampler waits for it here, `learned`
            waits later.
        """
        config, fixed_logprobs = self.config, self._fixed_logprobs(batch)
        sums: dict[str, torch.Tensor] = {}
        norms: list[torch.Tensor] = []
        counts = self.max_age, len(batch.servers)
        with self.ledger.stage("train"):
            for rows, fixed in zip(batch.minibatches, fixed_logprobs, strict=True):
                self.optimizers.zero_grad()

                def loss_of(index: int, row: Microbatch, fixed: list[FixedLogprobs] = fixed) -> LossAndSums:
                    self.offload.poll()
                    logprobs, entropy, *top_logprobs = self.model(row, config.rollout.temperature)
                    given = *fixed[index], *counts, config.distill.coef, *top_logprobs
                    return losses.row_loss(logprobs, entropy, row, config.grpo, *given, has_moved=bool(norms))

                added = accumulate_gradients(self.model, rows, loss_of, self.reduce_once)
                sums |= {name: sums.get(name, 0) + value for name, value in added.items()}
                if self.sampler_check.is_due and any(batch.servers.values()):
                    self.sampler_check.before_first_step(list(batch.servers), self._sum(sums))
                norms.append(clip_gradients(self.model, config.training.max_norm))
                self.weight_sync.order_writes_after()
                if self.finite_steps.allow(norms[-1]):
                    self.optimizer_step()
            batch.metrics["train/lr"] = next(iter(self.optimizers)).param_groups[0]["lr"]
            self.lr_schedulers.step()
            self.ending.trained = self.step
        return sums | {"loss": sums["loss"] / len(norms)}, torch.stack(norms)

    def optimizer_step(self) -> None:
        self.ending.trained = None  # until the whole step is
        self.offload.step()

    def learned(self, batch: Batch, sums: dict[str, torch.Tensor], norms: torch.Tensor) -> dict[str, float]:
        """Turn what `update` returned into metrics, and check the servers by it. Waits for the device."""
        peaks = self.usage.peaks(self.data_rank, self.data_ranks)
        summed, servers = self._sum(sums | peaks), list(batch.servers)
        own = {"train/grad_norm": norms.mean().item(), "train/grad_norm_max": norms.max().item()}
        own |= self.finite_steps.metrics() | highest_peaks(summed)
        with self.ending.later():
            self.finite_steps.check()
            self.sampler_check.after_step(servers, summed)
        return policy_metrics(summed, servers) | own

    def publish(self, wait: bool = False) -> None:
        """Publish this step's weights to the servers; with `[weight_sync] async_weight_update` in the background."""
        with self.ledger.stage("sync"):
            self.own_servers.make_room(self.optimizers)
            self.weight_sync.publish(self.step, wait)

    def validate(self) -> dict[str, float]:
        """Answer held-out prompts, greedily and sampled, at the first, every `validation.freq`-th and the last step."""
        if not (self.is_rank0 and self._validates()) or self.ending.failure:
            return {}
        with self.ledger.stage("validate"), self.weight_sync.hurry(), self.collector.unless_stopped():
            # `self.step` is the oldest version that may answer: wait for servers that do not have it yet.
            answers = answer_held_out(self.collector, self.held_out, self._sampling(1, 0.0), self.step)
            self.samples.log_validation(self.step, answers)
            check_failures([group for each in answers for group in each.groups], self.config.reward.max_failed_fraction)
            metrics = validation_metrics(answers, self.config.reward)
            self.checkpointer.validated(self.step, metrics)
            return metrics
        return {}

    def log(self, metrics: dict[str, float], batch: Batch | None = None) -> None:
        """Write the step to the console, TensorBoard, metrics.jsonl and W&B, and some answers to samples.jsonl."""
        if self.is_rank0:
            reports = self.weight_sync.finished()
            for report in reports:
                if not (report.waited or report.alone):
                    self.ledger.add("sync", report.seconds["total"], hidden=True)
            metrics |= sync_metrics(reports, self.fleet) | self.rollouts.metrics()
        times = self.ledger.close_step()
        metrics |= self.offload.metrics() | self.checkpointer.metrics()
        if self.is_rank0:
            busy_s = self.collector.take_busy_seconds()
            metrics |= server_metrics(self.fleet, busy_s, reports, times["time/step_s"])
            metrics |= self.usage.metrics(metrics, times, self.fleet)
        self.metrics.log(self.step, metrics | times)
        if batch and self.is_rank0:
            self.samples.log(self.step, batch.groups, batch.advantages)

    def save(self) -> None:
        if self._saves():
            self.broadcast.barrier()  # rank 0 may still validate
            self.write_checkpoint(last=self.step == self.config.training.steps)

    def write_checkpoint(self, last: bool) -> None:
        """Save this step; `last`: a failure ends the run."""
        with self.ledger.stage("checkpoint"):
            check_finite(self.model, self.step)
            self.checkpointer.save(self.step, last)
            self.offload.settle()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides weights, optimizer, scheduler and random states, as JSON values."""
        return {"step": self.step, "rollouts": self.rollouts.state_dict(self.step) if self.is_rank0 else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same_job(state, "grpo")
        self.step = state["step"]
        if self.is_rank0:
            self.rollouts.load_state_dict(state["rollouts"])

    # ------------------------------------------------------------------------------------- parts of a step

    def _saves(self) -> bool:
        """Whether this step ends in a checkpoint."""
        return self.config.checkpoint.enable and self._is_due(self.config.checkpoint.interval)

    def _validates(self) -> bool:
        """Whether this step ends with held-out prompts."""
        return self.config.validation.enable and self._is_due(self.config.validation.freq)

    def _is_due(self, every: int) -> bool:
        """Whether this is an `every`-th step or the last one."""
        return self.step % every == 0 or self.step == self.config.training.steps

    def _sampling(self, n: int, temperature: float) -> SamplingParams:
        rollout, source = self.config.rollout, self.source
        return SamplingParams(
            n,
            temperature,
            rollout.max_answer_tokens,
            (*self.end_token_ids, *rollout.stop_token_ids),
            self.seed,
            stop=tuple(rollout.stop),
            routes=source.routes if temperature else None,  # held-out answers need none
            vocab_size=source.model_args.vocab_size,
        )

    def _fixed_logprobs(self, batch: Batch) -> list[list[FixedLogprobs]]:
        """For each row (old policy's, reference's) log-probabilities, which stay fixed during the step's updates.

        The old policy's are None when the first forward pass gives them anyway: with one minibatch, and without KL in
        the reward.
        """
        grpo, temperature = self.config.grpo, self.config.rollout.temperature
        kl_in_reward = grpo.kl_coef > 0 and grpo.kl_placement == "reward"
        reference = self.reference or without_adapters(self.model)
        needs_old = kl_in_reward or (len(batch.minibatches) > 1 and grpo.proximal_logprobs == "recompute")

        def fixed(row: Microbatch) -> FixedLogprobs:
            self.offload.poll()
            old = self.model(row, temperature)[0] if needs_old else None
            return old, reference(row.without_routes(), temperature)[0] if grpo.kl_coef > 0 else None

        with self.ledger.stage("logprobs"), torch.no_grad():
            with self.offload.logprobs():
                result = [[fixed(row) for row in rows] for rows in batch.minibatches]
            if kl_in_reward:
                self._subtract_kl_from_rewards(batch, result)
        return result

    def _subtract_kl_from_rewards(self, batch: Batch, fixed: list[list[FixedLogprobs]]) -> None:
        """Subtract `kl_coef` times each answer's KL estimate from its reward, and compute the advantages again."""
        grpo = self.config.grpo
        for part, rows, own in zip(split(len(batch.rewards), grpo.minibatches), batch.minibatches, fixed, strict=True):
            rewards = [batch.rewards[i] for i in part]
            kl = kl_by_sample(rows, own, sum(map(len, rewards)), grpo.kl_estimator)
            if self.data_group is not None:
                dist.all_reduce(kl, group=self.data_group)
            rewards = less_penalties(rewards, (grpo.kl_coef * kl).tolist())
            by_group = reward_advantages(rewards, grpo, self.config.distill)
            batch.advantages[part.start : part.stop] = by_group
            advantages = torch.tensor([a for group in by_group for a in group], device=self.device)
            for row in rows:
                row.advantages = advantages[row.samples[row.sample_ids]]

    def _sum(self, sums: dict[str, torch.Tensor]) -> dict[str, Any]:
        return sum_over_ranks(sums, self.device, self.data_group)

    def _next_sft_rows(self) -> list[PackedRow]:
        rows = None
        if self.is_rank0:
            prompts = self.prompts.next(self.config.sft.batch_size)
            column, vocab_size = self.config.sft.target_column, self.source.model_args.vocab_size
            documents = sft_pairs(prompts, self.config.data, column, self.tokenizer, vocab_size)
            rows = pack(supervised_samples(documents), self.row_tokens, self.data_ranks, self.row_multiple)
        return self.broadcast.rows(rows, self.data_rank)

    # ----------------------------------------------------------------------------------------------- set-up

    def _read_inputs(self) -> None:
        config = self.config
        assets = config.model.hf_assets_path
        self.source = resolve_and_check(config)
        vocab_size = self.source.model_args.vocab_size
        self.tokenizer = load_tokenizer(assets, config.data.chat_template_file, vocab_size)
        self.end_token_ids = end_token_ids(self.tokenizer, assets, vocab_size)
        if self.is_rank0:
            self.resources.enter_context(own_folder(config.checkpoint, config.job.dump_folder))
            rewards = RewardRunner(config.reward, config.rollout, config.distill, folder=config.job.dump_folder)
            self.rewards = self.resources.enter_context(rewards)
            self.environments = self.resources.enter_context(loaded_environments(config))
            rows, make = self.environments.rows, partial(PromptSource, vocab_size=vocab_size)
            self.held_out = load_held_out(config, self.tokenizer, make, rows) if config.validation.enable else []
            self.prompts = load_training(config, self.tokenizer, self.held_out, make, rows)
            self.rewards.check(self.prompts.first(2), refuse=not config.rollout.environment)

    def _init_distributed(self) -> None:
        config = self.config
        self.device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type != "cpu" else None)
        if device_type != "cpu":
            device_module.set_device(self.device)
        with store_of_this_attempt():
            dist_utils.init_distributed(config.comm, base_folder=config.job.dump_folder)
        self.resources.push(leave_process_groups)
        self.nodes.settle()
        self.dims = parallel_dims(config, dist.get_world_size())
        dist_utils.set_determinism(self.dims, self.device, config.debug, [])
        self.data_ranks = self.dims.dp_replicate * self.dims.dp_shard
        data_mesh = self.dims.get_mesh("batch") if self.data_ranks > 1 else None
        self.data_group = data_mesh.get_group() if data_mesh else None
        self.data_rank = data_mesh.get_local_rank() if data_mesh else 0
        self.row_tokens = row_tokens(config)
        self.row_multiple = self.row_tokens if config.compile.enable else self.dims.tp
        self.ledger = Ledger(self.device)
        self.progress = Progress(self.ledger)
        self.broadcast = self.resources.enter_context(Broadcaster(self.progress, patience_s(config)))
        self.ending = Ending(self.broadcast)
        self.max_age = config.async_grpo.max_trajectory_age_steps if config.async_grpo.enabled else 0

    def _start_servers(self) -> None:
        """Those of `[rollout] replicas` load while the trainer loads its own weights."""
        trainers_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        check_shared_gpu(self.config, self.device)
        self.own_servers = OwnServers(self.config, self.device, trainers_here)
        self.resources.callback(self.own_servers.close)
        if self.is_rank0:
            check_disk(self.config, self.source)
            self.teachers = connect_teachers(self.config, self.tokenizer, self.source.model_args.vocab_size)
            self.own_servers.start(partial(write_hf_config, self.source, self.tokenizer))

    def _build(self) -> None:
        config = self.config
        self.model = build_model(self.source, config, self.dims, self.device)
        self.reduce_once = reduces_once(config.training.reduce_gradients, self.model)
        # A single rank needs no balancing.
        self.attention_tokens = attention_tokens(self.model) if self.data_ranks > 1 else math.inf
        if config.model.weights == "hf":
            load_hf_weights(self.model, self.source, config.model.hf_assets_path)
        self.optimizers = build_optimizers([self.model], config.optimizer, self.dims)
        self.finite_steps = FiniteSteps(self.optimizers, self.device)
        self.lr_schedulers = build_lr_schedulers(self.optimizers, config.lr_scheduler, config.training.steps)
        self.reference = None  # with [lora] the model without its adapters is used
        if config.grpo.kl_coef > 0 and not config.lora.enable:
            self.reference = build_model(self.source, config, self.dims, self.device, trainable=False)
        self.offload = Offloading(
            config.offload, self.optimizers, self.reference, self.device, lambda: self.weight_sync.idle()
        )
        self.checkpointer = Checkpointer(
            config.checkpoint,
            config.job.dump_folder,
            self.model,
            self.optimizers,
            self.lr_schedulers,
            self,
            source=self.source,
            tokenizer=self.tokenizer,
            merge=config.lora.merge,
            reference=self.reference,
            run_config=resolved(config),
            seed=self.seed,
            timeout_s=config.comm.init_timeout_seconds,
        )
        self.resources.push(self.checkpointer.close)
        self.garbage_collection = GarbageCollection(gc_freq=config.training.gc_freq)
        dump = config.job.dump_folder
        self.metrics = MetricsLogger(config, dump, self.is_rank0, config.training.steps)
        self.resources.callback(self.metrics.close)
        self.record = RolloutRecord(config.rollout, dump, self.ledger)
        self.samples = SampleLog(config, dump, self.metrics, self.tokenizer)
        self.resources.callback(self.samples.close)
        self.usage = Usage(config, self.model, self.dims.world_size, self.metrics.last("cost/gpu_hours"))

    def _connect_servers(self) -> None:
        """Wait for the servers, check that they fit the trainer, form the weight-sync groups."""
        config, rollout = self.config, self.config.rollout
        api_key = os.environ.get(rollout.api_key_env) if rollout.api_key_env else None
        ahead = config.async_grpo
        recomputes = ahead.enabled and ahead.in_flight_weight_updates and ahead.recompute_kv_cache_after_weight_updates
        needs = longest_tokens(config), self.end_token_ids[0], recomputes, self.source.identity

        def make(url: str) -> Server:
            timeouts = config.weight_sync.timeout_seconds, rollout.request_timeout_seconds
            vocab_size, lora = self.source.model_args.vocab_size, config.lora.enable
            server = make_server(rollout.engine, url, api_key, *timeouts, lambda: self.step, vocab_size, lora)
            server.check = lambda: server.control.check(*needs, routes=bool(self.source.routes))
            return server

        if self.is_rank0:
            self.fleet = self.own_servers.fleet(make)
            for server in self.fleet.servers:
                server.control.wait_healthy(rollout.start_timeout_seconds)
                server.check()
            self.collector = Collector(
                self.fleet,
                self.rewards,
                self.tokenizer,
                requests_at_once(rollout),
                rollout.request_timeout_seconds,
                self.environments,
                rollout.group_timeout_seconds,
            )
            self.resources.callback(self.collector.close)
            serve(config, self.collector)
            self.rollouts = RolloutStream(
                self.collector,
                self.prompts,
                self._sampling(config.grpo.group_size, rollout.temperature),
                config.grpo,
                config.async_grpo,
                rollout,
                config.training.steps,
                lambda group: has_signal(group, config.grpo, rollout.max_answer_tokens, config.distill),
                config.reward.max_failed_fraction,
                self.teachers,
                self.row_tokens,
            )
        self.sampler_check = SamplerCheck(config, self.fleet if self.is_rank0 else None)
        sync = self.own_servers.weight_sync
        self.weight_sync = WeightSync(
            published_weights(self.model, self.source, wire_dtype(sync, self.device)),
            sync,
            self.fleet if self.is_rank0 else None,
            self.device,
            max_lag=(self.max_age + 1) // 2,  # answers need the other half to finish in time
            in_flight=ahead.in_flight_weight_updates or not ahead.enabled,
            recompute_kv=ahead.recompute_kv_cache_after_weight_updates,
            drain_timeout_s=rollout.request_timeout_seconds,
        )
        self.resources.callback(self.weight_sync.close)
        self.weight_sync.connect()
        self.metrics.show_stage(self.ledger.now)
        self.progress.watch(lambda: (self.weight_sync.moved, self.rewards.scored if self.is_rank0 else 0))
        parts = [self.fleet.describe, self.collector.describe] if self.is_rank0 else [self.broadcast.describe]
        self.resources.enter_context(Watchdog(config.debug, self.progress, [self.weight_sync.describe, *parts]))


def main(argv: list[str], make: Callable[[JobConfig], Trainer] = Trainer, job: Job = "grpo") -> int:
    try:
        dry_run, argv = take_dry_run(argv)
        check_launch(dry_run is not None)
        init_log_lines()
        config = load_config(argv, dry_run, job)
        if dry_run is not None:
            print(describe(config, dry_run=dry_run, job=job) if os.environ.get("RANK", "0") == "0" else "", end="")
            return 0
        if config.ray.enable:
            from torchtitan.grpo.run.ray.driver import drive  # only now: it imports Ray

            return drive(argv, config, make, job)
        with running(config, make) as trainer:
            trainer.train()
    except PlainError as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
