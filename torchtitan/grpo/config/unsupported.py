"""torchtitan's keys that have no effect here. Setting one is an error, so no key is silently ignored."""

import functools
from typing import Any

from torchtitan.grpo.config.keys import MODULE, Key, keys, label, show

_HELD_OUT = "held-out prompts come from data.validation_path, data.validation_split or the last rows"
UNSUPPORTED: dict[str, str] = {
    "job.custom_config_module": f"add keys to {MODULE} instead",
    "job.print_config": "--dry_run prints the configuration",
    "job.save_config_file": "the run's folder has config.toml",
    "profiling": "the ledger times each stage; for kernels, run under nsys",
    "metrics.log_freq": "TensorBoard and Weights & Biases get every step",
    "metrics.disable_color_printing": "log lines have no colours",
    "metrics.save_tb_folder": "TensorBoard files are in the run's folder tb",
    "model.converters": "float8 and MX would change the published weights",
    "model.name": "the model is that of model.hf_assets_path, by its folder or its id on the hub; leave it out",
    "model.flavor": "the shape is that of config.json in model.hf_assets_path; leave it out",
    "model.tokenizer_path": "the tokenizer is read from model.hf_assets_path",
    "training.dataset": "prompts come from [data]",
    "training.local_batch_size": "use training.tokens_per_microbatch",
    "training.global_batch_size": "a batch has grpo.prompts_per_step x grpo.group_size answers",
    "training.enable_cpu_offload": "weights are published from device memory",
    "training.mixed_precision_reduce": "gradients are summed over ranks in float32",
    "parallelism.fsdp_reshard_after_forward": 'training.reduce_gradients = "step" keeps gathered weights',
    "parallelism.enable_async_tensor_parallel": "packed attention does not compile with it",
    "parallelism.pipeline_parallel_": "use FSDP and tensor parallelism",
    "parallelism.context_parallel_load_balancer": "attention is split by heads, and no keys travel in a ring",
    "parallelism.context_parallel_rotate_method": "attention is split by heads, and no keys travel in a ring",
    "checkpoint.initial_load_": "use model.hf_assets_path, or checkpoint.resume",
    "checkpoint.last_save_": "every checkpoint is complete; see checkpoint.export_dtype",
    "checkpoint.create_seed_checkpoint": 'use model.weights = "random" and debug.seed',
    "activation_checkpoint.memory_budget": "use activation_checkpoint.mode",
    "quantize": "float8 and MX would change the published weights",
    "comm.train_timeout_seconds": "use comm.init_timeout_seconds",
    "memory_estimation": "use --dry_run",
    "fault_tolerance": "torchft is not supported: resume from a checkpoint",
    "validation.dataset": _HELD_OUT,
    "validation.dataset_path": _HELD_OUT,
    "validation.local_batch_size": "use validation.prompts and samples_per_prompt",
    "validation.steps": "use validation.prompts and samples_per_prompt",
}
"""Why some of torchtitan's keys have no effect. A section covers its keys; a final `_` covers a prefix."""
_EXAMPLE = (
    "model.name",
    "model.flavor",
    "training.dataset",
    "training.local_batch_size",
    "validation.dataset",
    "validation.local_batch_size",
)
"""Their defaults describe torchtitan's example run, and no run of this project."""


def unsupported_by(path: str) -> str:
    """Why one of torchtitan's keys has no effect; "" for any other."""
    if path not in keys() or keys()[path].doc:
        return ""
    covering = (e for e in UNSUPPORTED if path == e or path.startswith(e if e.endswith("_") else f"{e}."))
    return next((UNSUPPORTED[entry] for entry in covering), "this trainer has no use for it: leave it out")


@functools.cache
def honoured_keys() -> tuple[Key, ...]:
    """Every key that has an effect: those that have a text."""
    return tuple(key for key in keys().values() if key.doc)


def check_unsupported(given: dict[str, Any]) -> list[str]:
    """Refuse keys that would be ignored, unless the given value is torchtitan's default and is true here, too."""
    messages = []
    for path, value in given.items():
        why = unsupported_by(path)
        is_so = value == keys()[path].default and path not in _EXAMPLE
        if why and not is_so and (path, value) != ("job.custom_config_module", MODULE):
            messages.append(f"{label(path)} = {show(value)} is not supported: {why}")
    return messages
