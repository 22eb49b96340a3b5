"""The model that is trained, and all that changes it or moves its state."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.host_memory.offloading import Offloading
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.lora import without_adapters
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import ModelSource, load_hf_weights
from torchtitan.grpo.policy.finite import FiniteSteps
from torchtitan.grpo.policy.gradients import accumulate_gradients, clip_gradients, reduces_once
from torchtitan.grpo.policy.kl_reward import FixedLogprobs
from torchtitan.grpo.policy.microbatch import Microbatch

LossAndSums = tuple[Tensor, dict[str, Tensor]]
"""A row's share of the step's loss, and detached sums for metrics."""


class Policy:
    """A model on this rank, its reference, optimizers and learning-rate schedule. Nothing here waits for the device.

    One optimizer step:

        sums = policy.gradients(rows, loss_of)
        norm = policy.clip()
        policy.step(norm)           # from here on the weights are new
        policy.end_step()           # after the last one of a batch: the schedule goes on

    Args:
        link_free: Whether the link to the host may be used, see `OptimizerStateOffload`.

    Attributes:
        model: Takes packed rows, see `model.packed.make_packed`.
        reference: The frozen model of `[grpo] kl_coef`. None without it, and with `[lora]`: there it is the model
            without its adapters.
        attention_tokens: See `packing.pack`. Infinity on a single data rank, which needs no balancing.
    """

    def __init__(
        self,
        config: JobConfig,
        source: ModelSource,
        dims: ParallelDims,
        device: torch.device,
        link_free: Callable[[], bool] = lambda: True,
    ) -> None:
        self._config = config
        build = partial(build_model, source, config, dims, device, rounded=config.rollout.quantization != "none")
        self.model = build()
        self.reduce_once = reduces_once(config.training.reduce_gradients, self.model)
        data_ranks = dims.dp_replicate * dims.dp_shard
        self.attention_tokens = TrainingFlops.of(self.model).attention_tokens if data_ranks > 1 else math.inf
        if config.model.weights == "hf":
            load_hf_weights(self.model, source, config.model.hf_assets_path)
        self.optimizers = build_optimizers([self.model], config.optimizer, dims)
        self.finite_steps = FiniteSteps(self.optimizers, device)
        self.lr_schedulers = schedulers(self.optimizers, config.lr_scheduler, config.training.steps)
        self.reference = None
        if config.grpo.kl_coef > 0 and not config.lora.enable:
            self.reference = build(trainable=False)
        inputs = getattr(self.model, "block_inputs", None)
        self.offload = Offloading(config.offload, self.optimizers, self.reference, device, link_free, inputs)

    def keep_reference(self) -> None:
        """From now on the reference is the model as it is."""
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())

    @torch.no_grad()
    def fixed_logprobs(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[list[FixedLogprobs]]:
        """For each row (old policy's, reference's) log-probabilities, which stay fixed during the step's updates.

        The old policy's are None when the first forward pass gives them anyway: with one minibatch, and without KL in
        the reward.
        """
        grpo, temperature = self._config.grpo, self._config.rollout.temperature
        kl_in_reward = grpo.kl_coef > 0 and grpo.kl_placement == "reward"
        needs_old = kl_in_reward or (len(minibatches) > 1 and grpo.proximal_logprobs == "recompute")
        reference = self.reference or without_adapters(self.model)

        def fixed(row: Microbatch) -> FixedLogprobs:
            self.offload.poll()
            old = self.model(row, temperature)[0] if needs_old else None
            return old, reference(row.without_routes(), temperature)[0] if grpo.kl_coef > 0 else None

        with self.offload.logprobs():
            return [[fixed(row) for row in rows] for rows in minibatches]

    def gradients(
        self, rows: Sequence[Microbatch], loss_of: Callable[[int, Microbatch], LossAndSums]
    ) -> dict[str, Tensor]:
        """Of the loss of these rows, in place of those before. Their weights hold the global normaliser, so gradients
        are only summed.

        Args:
            loss_of: Of a row, by its number.

        Returns:
            The sums over the rows.
        """
        self.optimizers.zero_grad()
        return accumulate_gradients(self.model, rows, loss_of, self.reduce_once)

    def clip(self) -> Tensor:
        """Scale gradients down to `[training] max_norm`. Collective. Returns the whole model's norm before."""
        return clip_gradients(self.model, self._config.training.max_norm)

    def step(self, norm: Tensor) -> None:
        """One optimizer step, wherever the optimizer's state is; left out if the norm is not finite."""
        self.finite_steps.guard(norm)
        self.offload.step()

    def end_step(self) -> float:
        """Let the learning-rate schedule go on. Returns the rate of the step that was taken."""
        rate = next(iter(self.optimizers)).param_groups[0]["lr"]
        self.lr_schedulers.step()
        return rate


def schedulers(optimizers: OptimizersContainer, lr_scheduler: Any, steps: int) -> LRSchedulersContainer:
    """Torchtitan's, but steps behind the schedule's last one have its rate: there, its formulas decay on to a rate
    under 0, or rise again."""
    built = build_lr_schedulers(optimizers, lr_scheduler, steps)
    for scheduler in built:
        assert isinstance(scheduler, LambdaLR)  # torchtitan builds no other
        last = (lr_scheduler.total_steps or steps) - 1  # from 0
        scheduler.lr_lambdas = [partial(_held, factor, last) for factor in scheduler.lr_lambdas]
    return built


def _held(factor: Callable[[int], float], last: int, step: int) -> float:
    return factor(min(step, last))
