"""torchtitan's keys that have no effect here. Setting one is an error, so no key is silently ignored."""

import functools
from typing import Any

from torchtitan.grpo.config.keys import MODULE, Key, keys, label, show

UNSUPPORTED: dict[str, str] = {
    "job.custom_config_module": f"the trainer sets it and torchtitan merges one module: add keys to {MODULE} instead",
    "job.print_config": "--dry_run prints the configuration",
    "job.save_config_file": "config.toml in the run's folder holds the configuration",
    "profiling": "the ledger times each stage; for kernels, run under nsys",
    "metrics.log_freq": "TensorBoard and Weights & Biases get every step",
    "metrics.disable_color_printing": "set the environment variable NO_COLOR",
    "metrics.save_tb_folder": "TensorBoard files are in the folder tb of the run's",
    "metrics.save_for_all_ranks": "rank 0 logs the sums over all ranks",
    "model.converters": "float8 and MX would change the published weights",
    "model.print_after_conversion": "model converters are not supported",
    "model.tokenizer_path": "the tokenizer is read from model.hf_assets_path",
    "optimizer.implementation": "the fused one is the fastest, and leaves out bad steps without a wait",
    "optimizer.early_step_in_backward": "a step sums the gradients of several microbatches and clips them",
    "training.dataset": "prompts come from [data]",
    "training.dataset_path": "prompts come from [data]: use data.path",
    "training.local_batch_size": "training.tokens_per_microbatch splits a batch",
    "training.global_batch_size": "a batch has grpo.prompts_per_step x grpo.group_size answers",
    "training.enable_cpu_offload": "weights are published from device memory",
    "training.gc_": "the trainer collects garbage every 50 steps",
    "training.dataloader": "prompts come from [data]",
    "parallelism.fsdp_reshard_after_forward": 'training.reduce_gradients = "step" keeps gathered weights',
    "parallelism.disable_loss_parallel": "log-probabilities are always computed on vocabulary shards",
    "parallelism.enable_async_tensor_parallel": "packed attention does not compile with it",
    "parallelism.pipeline_parallel_": "only the last stage would have the logits; use FSDP and tensor parallelism",
    "parallelism.module_fqns_per_model_part": "pipeline parallelism is not supported",
    "parallelism.context_parallel_": "packed rows hold many short sequences and are not split",
    "parallelism.expert_tensor_parallel_degree": "an expert is not split",
    "parallelism.expert_parallel_comm_backend": "tokens travel to their experts by all-to-all",
    "checkpoint.enable_ft_dataloader_checkpoints": "torchft is not supported",
    "checkpoint.initial_load_": "a run starts from model.hf_assets_path, or continues with checkpoint.resume",
    "checkpoint.last_save_": "every checkpoint is complete, and checkpoint.export_hf writes its Hugging Face folder",
    "checkpoint.exclude_from_loading": "a resume restores everything",
    "checkpoint.enable_first_step_checkpoint": "use checkpoint.interval = 1",
    "checkpoint.create_seed_checkpoint": 'use model.weights = "random" and debug.seed',
    "checkpoint.load_only": "use checkpoint.enable = false",
    "activation_checkpoint.per_op_sac_": "`selective` recomputes none of what it keeps, except a router's scores",
    "activation_checkpoint.early_stop": "a block is recomputed whole",
    "activation_checkpoint.memory_budget": "use activation_checkpoint.mode",
    "activation_checkpoint.visualize_memory_budget_pareto": "--dry_run estimates the memory",
    "activation_checkpoint.preserve_rng_state": "the models draw no random numbers",
    "activation_checkpoint.determinism_check": "PyTorch's own check is used",
    "activation_checkpoint.debug": "set torch.utils.checkpoint.set_checkpoint_debug_enabled in a script of your own",
    "compile.backend": "packed attention is compiled by Inductor",
    "compile.components": "only the model's blocks are compiled",
    "quantize": "float8 and MX would change the published weights",
    "comm.train_timeout_seconds": "comm.init_timeout_seconds holds for the whole run",
    "comm.trace_buf_size": "NCCL's flight recorder keeps 20000 operations",
    "comm.save_traces_": "NCCL's traces are in the folder comm_traces of the run's",
    "comm.mode": "weight sync needs a real process group",
    "memory_estimation": "use --dry_run",
    "fault_tolerance": "torchft is not supported: resume from a checkpoint",
    "experimental": "nothing reads it here; add keys to torchtitan/grpo/config/job_config.py instead",
    "validation.dataset": "held-out prompts come from [data]: validation_path, validation_split or the last rows",
    "validation.dataset_path": "use data.validation_path",
    "validation.local_batch_size": "use validation.prompts and validation.samples_per_prompt",
    "validation.seq_len": "use rollout.max_answer_tokens",
    "validation.steps": "use validation.prompts",
    "validation.dataloader": "held-out prompts come from [data]",
    "debug.moe_force_load_balance": "experts are those that the router chooses",
}
"""torchtitan's keys without effect, and the reason. A section covers its keys; a final `_` covers a prefix."""


def unsupported_by(path: str) -> str | None:
    """The entry of UNSUPPORTED that covers a key; None for a key that has an effect."""
    for entry in UNSUPPORTED:
        if path == entry or path.startswith(entry if entry.endswith("_") else f"{entry}."):
            return entry
    return None


@functools.cache
def honoured_keys() -> tuple[Key, ...]:
    """Every key that has an effect."""
    return tuple(key for key in keys().values() if unsupported_by(key.path) is None)


def check_unsupported(given: dict[str, Any]) -> list[str]:
    """Refuse keys that would be ignored, unless the value given is the default."""
    messages = []
    for path, value in given.items():
        entry = unsupported_by(path)
        if entry and value != keys()[path].default and (path, value) != ("job.custom_config_module", MODULE):
            messages.append(f"{label(path)} = {show(value)} is not supported: {UNSUPPORTED[entry]}")
    return messages
