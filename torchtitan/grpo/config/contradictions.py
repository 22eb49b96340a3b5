"""What keys must satisfy together.

Each check yields all its messages, so that a user corrects a file once. A message names the key, its value, what is
allowed and what to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from torchtitan.grpo.config.batch import ranks_of_a_row, row_tokens
from torchtitan.grpo.config.data_contradictions import (
    check_data,
    check_reward,
    check_sft,
    check_tables,
    check_warm_start,
)
from torchtitan.grpo.config.distill_contradictions import check_distill
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.keys import keys, shortened, show, unread
from torchtitan.grpo.config.server_contradictions import (
    check_adapters,
    check_quantization,
    check_routing_replay,
    check_servers,
    check_weight_sync,
)
from torchtitan.grpo.config.share import needs_one_process
from torchtitan.grpo.config.tables import validation_metric_names
from torchtitan.grpo.errors import did_you_mean

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


def check_contradictions(config: JobConfig, job: Job = "grpo") -> list[str]:
    """Check the keys against one another. Each value is of its type and in its range already."""
    of_both = (
        _check_unread,
        _check_batch,
        _check_offload,
        _check_torchtitan,
        _check_lora,
        check_data,
        check_tables,
        _check_ray,
    )
    of_grpo = (
        _check_lora_job,
        _check_lengths,
        _check_losses,
        _check_score_centering,
        check_servers,
        check_weight_sync,
        check_adapters,
        check_routing_replay,
        check_quantization,
        _check_async,
        _check_processes,
        check_reward,
        check_distill,
        check_warm_start,
    )
    checks = (*of_both, partial(_check_keep_best, job=job), *((check_sft,) if job == "sft" else of_grpo))
    return list(dict.fromkeys(message for check in checks for message in check(config)))


def _check_unread(config: JobConfig) -> Iterator[str]:
    """Keys without others that they need. With `[[data.mixture]]`, each table is checked in place of [data]."""
    checked = (key for key in keys().values() if key.section != "data" or not config.data.mixture)
    return unread(lambda path: attrgetter(path)(config), checked)


def _check_batch(config: JobConfig) -> Iterator[str]:
    grpo, training = config.grpo, config.training
    if grpo.prompts_per_step % grpo.minibatches:
        yield (
            f"[grpo] minibatches = {grpo.minibatches} does not divide [grpo] prompts_per_step = "
            f"{grpo.prompts_per_step}: each optimizer step takes the same number of groups, so set minibatches = "
            f"{_nearest_divisor(grpo.prompts_per_step, grpo.minibatches)}, or change prompts_per_step"
        )
    if 0 < training.tokens_per_microbatch < training.seq_len:
        yield (
            f"[training] tokens_per_microbatch = {training.tokens_per_microbatch} is under [training] seq_len = "
            f"{training.seq_len}: the longest sample must fit one microbatch, so raise it, or set 0 for seq_len"
        )
    row, ranks = row_tokens(config), ranks_of_a_row(config)
    tensor, context = config.parallelism.tensor_parallel_degree, config.parallelism.context_parallel_degree
    if tensor > 1 and context > 1:
        yield (
            f"[parallelism] context_parallel_degree = {context} with tensor_parallel_degree = {tensor}: both split the "
            "heads. Set one of them to 1; context parallelism shards the weights, too"
        )
    elif row % ranks:
        key = "tokens_per_microbatch" if training.tokens_per_microbatch else "seq_len"
        which = "tensor" if tensor > 1 else "context"
        yield (
            f"[training] {key} = {row} is not a multiple of [parallelism] {which}_parallel_degree = {ranks}: those "
            f"ranks split each packed row evenly, so set {-(-row // ranks) * ranks}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min([*small, *(number // d for d in small)], key=lambda divisor: abs(divisor - wanted))


def _check_lengths(config: JobConfig) -> Iterator[str]:
    prompt, answer, longest = config.data.max_prompt_tokens, config.rollout.max_answer_tokens, config.training.seq_len
    if prompt + answer > longest:
        yield (
            f"[training] seq_len = {longest} is under [data] max_prompt_tokens + [rollout] max_answer_tokens = "
            f"{prompt} + {answer} = {prompt + answer}: raise it, or lower one of the two"
        )
    if config.grpo.overlong_buffer_tokens >= answer:
        yield (
            f"[grpo] overlong_buffer_tokens = {config.grpo.overlong_buffer_tokens} must be under [rollout] "
            f"max_answer_tokens = {answer}: the reward falls over that many tokens before the limit"
        )


def _check_losses(config: JobConfig) -> Iterator[str]:
    grpo = config.grpo
    if 0 < grpo.ratio_clip_c <= 1:
        yield f"[grpo] ratio_clip_c = {grpo.ratio_clip_c} must be 0 (off) or over 1, usually 3"
    elif 0 < grpo.ratio_clip_c <= 1 + grpo.ratio_clip_max:
        yield (
            f"[grpo] ratio_clip_c = {grpo.ratio_clip_c} must be over 1 + [grpo] ratio_clip_max = "
            f"{1 + grpo.ratio_clip_max:g}: it bounds ratios that the upper clip does not; usually 3"
        )
    if grpo.kl_coef and grpo.kl_estimator == "k1" and grpo.kl_placement == "loss":
        yield (
            '[grpo] kl_estimator = "k1" with kl_placement = "loss" has an expected gradient of zero, so it has no '
            'effect: use kl_placement = "reward", or k2 or k3'
        )
    if grpo.importance_correction != "none" and not grpo.importance_min <= 1 <= grpo.importance_max:
        yield (
            f"[grpo] importance_min = {grpo.importance_min} and [grpo] importance_max = {grpo.importance_max} must "
            "have 1 between them: it is the weight of a token on which sampler and trainer agree"
        )
    if grpo.proximal_logprobs == "sampler" and grpo.importance_correction != "none":
        yield (
            '[grpo] proximal_logprobs = "sampler" with importance_correction = '
            f"{show(grpo.importance_correction)} would correct twice: the ratio holds the sampler already, so set "
            'importance_correction = "none"'
        )


def _check_score_centering(config: JobConfig) -> Iterator[str]:
    """The sampler's mean of a token's gradient is known if that depends on this token's probabilities alone."""
    grpo, key = config.grpo, f"[grpo] score_centering = {config.grpo.score_centering}"
    if not grpo.score_centering:
        return
    if grpo.policy_loss not in ("ppo", "cispo"):
        yield (
            f"{key} with policy_loss = {show(grpo.policy_loss)}: it is there for losses of single tokens; set "
            'policy_loss = "ppo" or "cispo", or score_centering = 0'
        )
    if grpo.importance_level == "sequence" and grpo.importance_correction != "none":
        yield f'{key} with importance_level = "sequence": what weighs a token is its whole answer; set "token"'
    if grpo.minibatches > 1 and grpo.proximal_logprobs == "recompute":
        yield (
            f'{key} with minibatches = {grpo.minibatches} and proximal_logprobs = "recompute": the policy at the start '
            "of the step is known for sampled tokens only; set minibatches = 1"
        )
    if grpo.policy_loss == "ppo" and grpo.proximal_logprobs == "sampler":
        yield (
            f'{key} with proximal_logprobs = "sampler": weights that are whole ratios leave nothing to center; set '
            '"recompute", or policy_loss = "cispo"'
        )
    if config.rollout.top_k:
        yield (
            f"{key} with [rollout] top_k = {config.rollout.top_k}: servers name likeliest tokens among all, and the "
            "policy's probabilities would be among the kept ones; leave one of them out"
        )
    if config.distill.teacher_urls:
        yield f"{key} with [distill] teacher_urls: a teacher judges each token by itself; leave one of them out"


def _check_offload(config: JobConfig) -> Iterator[str]:
    offload, grpo = config.offload, config.grpo
    window = "[offload] offload_optimizer_states_for_logprob = true"
    if offload.offload_optimizer_states_for_logprob and offload.optimizer_states == "host":
        yield f'{window} with optimizer_states = "host": the state is on the host already, so leave one of them out'
    if offload.offload_optimizer_states_for_logprob and not (
        grpo.kl_coef or (grpo.minibatches > 1 and grpo.proximal_logprobs == "recompute")
    ):
        yield (
            f"{window} has no window: without [grpo] kl_coef, and with one minibatch or proximal_logprobs = "
            '"sampler", no log-probabilities are computed before the update; leave it out, or use '
            '[offload] optimizer_states = "host"'
        )


def _check_lora(config: JobConfig) -> Iterator[str]:
    lora, checkpoint = config.lora, config.checkpoint
    if not lora.enable:
        return
    if not lora.target_modules or len(set(lora.target_modules)) < len(lora.target_modules):
        yield f'[lora] target_modules = {show(lora.target_modules)} must name layers, each once, as in ["all-linear"]'
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        yield f'[lora] target_modules = {show(lora.target_modules)}: "all-linear" names all layers, so it stands alone'
    exports = checkpoint.enable and checkpoint.export_dtype != "none"
    if lora.merge and checkpoint.async_mode != "disabled":
        yield (
            f"[lora] merge = true with [checkpoint] async_mode = {show(checkpoint.async_mode)}: the thread that writes "
            'has no frozen weights, so set async_mode = "disabled", or merge the exported adapter later'
        )
    if config.model.weights == "random" and exports and not lora.merge:
        yield (
            '[model] weights = "random" with [lora] would export adapters of weights that are saved nowhere: set '
            '[lora] merge = true, or [checkpoint] export_dtype = "none"'
        )


def _check_lora_job(config: JobConfig) -> Iterator[str]:
    if not config.lora.enable:
        return
    if config.model.weights == "random":
        yield (
            '[lora] enable = true with [model] weights = "random": servers get adapters only, and load the frozen '
            'weights from [model] hf_assets_path; set weights = "hf"'
        )
    if config.offload.reference_weights == "host":
        yield (
            '[offload] reference_weights = "host" with [lora]: the reference is the model without its adapters and '
            "has no weights of its own; leave it out"
        )
    if config.sft.steps and config.grpo.kl_coef:
        yield (
            f"[sft] steps = {config.sft.steps} with [lora] and [grpo] kl_coef: the warm start trains the adapters, and "
            "the reference is the model without them; set kl_coef = 0, or leave the warm start out"
        )


def _check_torchtitan(config: JobConfig) -> Iterator[str]:
    if not config.model.hf_assets_path:
        yield (
            "[model] hf_assets_path is missing: give the Hugging Face folder with config.json, tokenizer and weights, "
            "or its id on the hub"
        )
    if config.training.flash_attention == "FA4" and config.training.mixed_precision_param == "float32":
        yield (
            '[training] flash_attention = "FA4" computes in bfloat16, and mixed_precision_param is "float32": set '
            'mixed_precision_param = "bfloat16", or flash_attention = "auto"'
        )
    shard = config.parallelism.data_parallel_shard_degree
    if shard != -1 and shard < 1:
        yield f"[parallelism] data_parallel_shard_degree = {shard} must be at least 1, or -1 for all remaining ranks"
    option = config.activation_checkpoint.selective_ac_option
    if option not in ("op", "matmul") and not re.fullmatch("[1-9][0-9]{0,8}", option):
        yield (
            f'[activation_checkpoint] selective_ac_option = {show(option)} must be "matmul", "op" or a layer interval '
            'like "2"'
        )


def _check_keep_best(config: JobConfig, job: Job) -> Iterator[str]:
    checkpoint, validation = config.checkpoint, config.validation
    if not (checkpoint.keep_best and validation.enable):
        return
    best, known = f"[checkpoint] keep_best = {show(checkpoint.keep_best)}", validation_metric_names(config, job)
    if checkpoint.keep_best not in known:
        names = shortened(", ".join(known))
        yield f"{best} is no metric of this validation{did_you_mean(checkpoint.keep_best, known)}: it has {names}"
    if checkpoint.interval % validation.freq:
        yield (
            f"{best} compares checkpoints by their validation: set [checkpoint] interval = {checkpoint.interval} to a "
            f"multiple of [validation] freq = {validation.freq}"
        )


def _check_async(config: JobConfig) -> Iterator[str]:
    ahead, prompts = config.async_grpo, config.grpo.prompts_per_step
    if ahead.max_trajectory_age_steps > 1 and not ahead.in_flight_weight_updates:
        yield (
            f"[async_grpo] max_trajectory_age_steps = {ahead.max_trajectory_age_steps} needs in_flight_weight_updates "
            "= true: without it every update waits for running answers, so a higher age only ages them; set "
            "in_flight_weight_updates = true, or max_trajectory_age_steps = 1"
        )
    if 0 < ahead.order_window < prompts:
        yield (
            f"[async_grpo] order_window = {ahead.order_window} is under [grpo] prompts_per_step = {prompts}: a step "
            "takes that many groups from it, so raise it, or set 0 for as many as the age allows"
        )


def _check_processes(config: JobConfig) -> Iterator[str]:
    processes, prompts, minibatches = config.rollout.processes, config.grpo.prompts_per_step, config.grpo.minibatches
    if processes < 2:
        return
    key = f"[rollout] processes = {processes}"
    if prompts % processes:
        yield f"{key} does not divide [grpo] prompts_per_step = {prompts}, which they share: change one"
    elif prompts % (processes * minibatches):
        yield (
            f"{key} times [grpo] minibatches = {minibatches} does not divide prompts_per_step = {prompts}: each "
            "process has a part of each minibatch, so change one"
        )
    if config.async_grpo.order_window % processes:
        window = config.async_grpo.order_window
        yield f"{key} does not divide [async_grpo] order_window = {window}, which they share: change one"
    for why in needs_one_process(config):
        yield f"{key}, and {why}: leave one of them out"


def _check_ray(config: JobConfig) -> Iterator[str]:
    ray = config.ray
    if ray.address.startswith("ray://"):
        yield (
            f"[ray] address = {show(ray.address)} is Ray Client's, which has no Compiled Graphs: run the script on a "
            'node of the cluster with "auto" or "host:port" (port 6379 as a rule)'
        )
