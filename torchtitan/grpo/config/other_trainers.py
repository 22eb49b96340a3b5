"""Names of TRL, verl and prime-rl, for those who come from there.

Where the names are documented:

- TRL: `GRPOConfig` (huggingface.co/docs/trl/grpo_trainer), `ModelConfig` and `ScriptArguments` (.../script_utils), and
  transformers' `TrainingArguments`, which `GRPOConfig` extends.
- verl: verl.readthedocs.io/en/latest/examples/config.html, and the files of verl/trainer/config.
- prime-rl: docs/configuration.md and docs/training.md, and packages/prime-rl-configs. Releases until spring 2026 also
  had `rollouts_per_example`, `max_async_level` and `max_tokens`.

An entry is this project's key, then a note where values differ in meaning: "key: note". It is ": reason" where no key
does the same. A dotted name holds in that section only.
"""

_LOGGED = ": console and metrics.jsonl get every step, [metrics] has switches for TensorBoard and W&B"
_WANDB_NAME = ": the variable WANDB_NAME names the run, or [job] dump_folder"
_ONCE = ": each answer is trained on once; [grpo] minibatches makes several optimizer steps of a batch"
_STEPS = ": the length of a run is [training] steps"
_RANKS = ": torchrun's --nnodes and --nproc-per-node say how many processes train"
_PACKED = "training.tokens_per_microbatch: in tokens, since rows are packed"
_IN_GROUPS = "grpo.prompts_per_step: in groups, over all ranks"
_SERVER_FLAG = ": it is a flag of the servers, see [rollout] server_flags"

TRL = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "beta": "grpo.kl_coef",
    "bf16": 'training.mixed_precision_param: "bfloat16"',
    "cast_lm_head_to_fp32": "",
    "dataset_config": "data.subset",
    "dataset_name": "data.path",
    "dataset_test_split": "data.validation_split",
    "dataset_train_split": "data.split",
    "ddp_timeout": "comm.init_timeout_seconds",
    "deepspeed": ": FSDP2 shards the model, see [parallelism]",
    "delta": "grpo.ratio_clip_c",
    "disable_dropout": "",
    "epsilon": "grpo.ratio_clip_min: the upper clip is ratio_clip_max",
    "epsilon_high": "grpo.ratio_clip_max",
    "eval_steps": "validation.freq",
    "eval_strategy": "validation.enable",
    "generation_batch_size": _IN_GROUPS,
    "gradient_accumulation_steps": _PACKED,
    "gradient_checkpointing": "activation_checkpoint.mode",
    "importance_sampling_level": 'grpo.policy_loss: "gspo" for "sequence"',
    "learning_rate": "optimizer.lr",
    "log_completions": "metrics.samples_per_step",
    "logging_dir": ": it is a folder in [job] dump_folder",
    "logging_steps": _LOGGED,
    "lora_alpha": "lora.alpha",
    "lora_dropout": ": with dropout, log-probabilities would be another model's than the one that is exported",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "loss_type": "grpo.loss_aggregation: GSPO and CISPO are values of policy_loss",
    "lr_scheduler_type": "lr_scheduler.decay_type: set decay_ratio too",
    "mask_truncated_completions": "grpo.overlong_filter",
    "max_completion_length": "rollout.max_answer_tokens",
    "max_grad_norm": "training.max_norm",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "training.steps",
    "max_tool_calling_iterations": ": an environment decides, see [rollout] environment",
    "metric_for_best_model": "checkpoint.keep_best",
    "model": "model.hf_assets_path: a local folder",
    "model_name": "model.hf_assets_path: a local folder",
    "model_name_or_path": "model.hf_assets_path: a local folder",
    "multi_objective_aggregation": ": rewards are summed by [reward] weights",
    "num_completions_to_print": "metrics.samples_per_step",
    "num_generations": "grpo.group_size",
    "num_generations_eval": "validation.samples_per_prompt",
    "num_iterations": _ONCE,
    "num_train_epochs": _STEPS,
    "off_policy_mask_threshold": "",
    "optim": "optimizer.name",
    "output_dir": "job.dump_folder",
    "per_device_eval_batch_size": "validation.prompts: in prompts, over all ranks",
    "per_device_train_batch_size": _IN_GROUPS,
    "push_to_hub": ": checkpoints hold a Hugging Face folder, see [checkpoint] export_hf",
    "ref_model_mixup_alpha": ": the reference is the model at step 0",
    "ref_model_sync_steps": ": the reference is the model at step 0",
    "remove_unused_columns": ": reward functions get all columns of a row",
    "report_to": _LOGGED,
    "resume_from_checkpoint": "checkpoint.resume",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "run_name": _WANDB_NAME,
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "scale_rewards": "grpo.advantage_std",
    "shuffle_dataset": "data.shuffle",
    "steps_per_generation": "grpo.minibatches: steps_per_generation / gradient_accumulation_steps",
    "sync_ref_model": ": the reference is the model at step 0",
    "temperature": "rollout.temperature",
    "top_entropy_quantile": "",
    "use_liger_kernel": "",
    "use_peft": "lora.enable",
    "use_vllm": 'rollout.engine: "vllm"',
    "vllm_enable_sleep_mode": "rollout.sleep_while_training",
    "vllm_gpu_memory_utilization": "rollout.memory_share: with colocate",
    "vllm_group_port": ": free ports are taken",
    "vllm_importance_sampling_cap": "grpo.importance_max",
    "vllm_importance_sampling_correction": "grpo.importance_correction",
    "vllm_importance_sampling_mode": "grpo.importance_correction: token or sequence is importance_level",
    "vllm_max_model_length": "training.seq_len",
    "vllm_mode": 'rollout.colocate: true for "colocate"',
    "vllm_server_base_url": "rollout.urls",
    "vllm_server_host": "rollout.urls",
    "vllm_server_port": "rollout.urls",
    "vllm_server_timeout": "rollout.start_timeout_seconds",
    "vllm_tensor_parallel_size": "rollout.gpus_per_server",
    "warmup_ratio": "lr_scheduler.warmup_steps: in steps",
}

VERL = {
    "actor.shuffle": ": [grpo] minibatches keep the batch's order",
    "adv_estimator": 'grpo.advantage_baseline: "leave_one_out" for "rloo"',
    "clip_ratio": "grpo.ratio_clip_max: the lower clip is ratio_clip_min",
    "clip_ratio_c": "grpo.ratio_clip_c",
    "clip_ratio_high": "grpo.ratio_clip_max",
    "clip_ratio_low": "grpo.ratio_clip_min",
    "critic_warmup": ": GRPO has no critic",
    "custom_reward_function.name": "reward.functions: module:function",
    "custom_reward_function.path": "reward.functions: module:function",
    "default_local_dir": "job.dump_folder",
    "enable_gradient_checkpointing": "activation_checkpoint.mode",
    "enforce_eager": _SERVER_FLAG,
    "entropy_coeff": "grpo.entropy_coef",
    "experiment_name": _WANDB_NAME,
    "filter_groups.enable": 'grpo.zero_variance_groups: "replace"',
    "filter_overlong_prompts": ": prompts over [data] max_prompt_tokens are always left out",
    "free_cache_engine": "rollout.sleep_while_training",
    "gpu_memory_utilization": "rollout.memory_share: with colocate",
    "grad_clip": "training.max_norm",
    "kl_loss_coef": "grpo.kl_coef",
    "kl_loss_type": "grpo.kl_estimator",
    "kl_penalty": "grpo.kl_estimator",
    "logger": _LOGGED,
    "lora_rank": "lora.rank",
    "loss_agg_mode": "grpo.loss_aggregation",
    "loss_mode": "grpo.policy_loss",
    "lr_warmup_steps": "lr_scheduler.warmup_steps",
    "lr_warmup_steps_ratio": "lr_scheduler.warmup_steps: in steps",
    "max_actor_ckpt_to_keep": "checkpoint.keep_latest_k",
    "max_model_len": "training.seq_len",
    "max_num_batched_tokens": _SERVER_FLAG,
    "max_num_seqs": _SERVER_FLAG,
    "max_response_length": "rollout.max_answer_tokens",
    "megatron.tensor_model_parallel_size": "parallelism.tensor_parallel_degree",
    "model.path": "model.hf_assets_path",
    "n_gpus_per_node": _RANKS,
    "nnodes": _RANKS,
    "norm_adv_by_std_in_grpo": "grpo.advantage_std",
    "optimizer_offload": 'offload.optimizer_states: "host"',
    "overlong_buffer.len": "grpo.overlong_buffer_tokens",
    "overlong_buffer.penalty_factor": "grpo.overlong_penalty",
    "ppo_epochs": _ONCE,
    "ppo_max_token_len_per_gpu": "training.tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": _PACKED,
    "ppo_mini_batch_size": "grpo.minibatches: their number, train_batch_size / ppo_mini_batch_size",
    "project_name": ": the environment variable WANDB_PROJECT",
    "prompt_key": "data.prompt_column",
    "ref.fsdp_config.param_offload": 'offload.reference_weights: "host"',
    "response_length": "rollout.max_answer_tokens",
    "resume_mode": "checkpoint.resume",
    "reward_manager": "",
    "rollout.mode": ": requests to servers are always asynchronous",
    "rollout.n": "grpo.group_size",
    "rollout.name": "rollout.engine",
    "rollout_is": "grpo.importance_level",
    "rollout_is_threshold": "grpo.importance_max",
    "rollout_n": "grpo.group_size",
    "save_freq": "checkpoint.interval",
    "tensor_model_parallel_size": "rollout.gpus_per_server: the trainer's is [parallelism] tensor_parallel_degree",
    "test_freq": "validation.freq",
    "total_epochs": _STEPS,
    "total_training_steps": "training.steps",
    "train_batch_size": "grpo.prompts_per_step",
    "train_files": "data.path",
    "ulysses_sequence_parallel_size": ": packed rows are not split over ranks",
    "use_dynamic_bsz": ": rows are always packed by their tokens",
    "use_kl_in_reward": 'grpo.kl_placement: "reward"',
    "use_kl_loss": "grpo.kl_coef: over 0",
    "use_remove_padding": ": rows are packed and never padded",
    "val_before_train": ": a run begins with a validation",
    "val_files": "data.validation_path",
    "val_kwargs.n": "validation.samples_per_prompt",
    "val_kwargs.temperature": "validation.temperature",
    "val_kwargs.top_p": "validation.top_p",
}

PRIME_RL = {
    "ac.mode": "activation_checkpoint.mode",
    "adv_tau": "",
    "batch_size": "grpo.prompts_per_step: in groups",
    "bench": "",
    "ckpt.interval": "checkpoint.interval",
    "client.base_url": "rollout.urls",
    "dist_timeout_seconds": "comm.init_timeout_seconds",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "env.id": 'rollout.environment: as in "verifiers:NAME"',
    "ep": "parallelism.expert_parallel_degree",
    "eval.interval": "validation.freq",
    "eval.rollouts_per_example": "validation.samples_per_prompt",
    "filter_zero_advantages": "grpo.zero_variance_groups",
    "keep_last": "checkpoint.keep_latest_k",
    "kl_tau": "",
    "mask_ratio_high": 'grpo.importance_max: with importance_correction = "mask"',
    "mask_ratio_low": 'grpo.importance_min: with importance_correction = "mask"',
    "max_async_level": "async_grpo.max_trajectory_age_steps",
    "max_completion_tokens": "rollout.max_answer_tokens",
    "max_concurrent": "rollout.max_concurrent_requests: per server",
    "max_inflight": "rollout.max_concurrent_requests: per server",
    "max_inflight_rollouts": "rollout.max_concurrent_requests: per server",
    "max_new_tokens": "rollout.max_answer_tokens",
    "max_off_policy_steps": "async_grpo.max_trajectory_age_steps",
    "max_tokens": "rollout.max_answer_tokens",
    "model.name": "model.hf_assets_path: a local folder",
    "num_examples": "validation.prompts",
    "num_infer_gpus": "rollout.replicas: servers, of [rollout] gpus_per_server",
    "num_train_gpus": _RANKS,
    "optim.lr": "optimizer.lr",
    "optim.type": "optimizer.name",
    "optim_cpu_offload": 'offload.optimizer_states: "host"',
    "oversampling_factor": "grpo.oversampling: the extra share, oversampling_factor - 1",
    "parallel.tp": "rollout.gpus_per_server",
    "ratio_type": "grpo.importance_level",
    "reduce_dtype": "training.mixed_precision_reduce",
    "reshard_after_forward": 'training.reduce_gradients: "step" keeps gathered weights',
    "resume_step": "checkpoint.load_step",
    "rollouts_per_example": "grpo.group_size",
    "scheduler.type": "lr_scheduler.decay_type: set decay_ratio too",
    "strict_async_level": "",
    "tensor_parallel_size": "rollout.gpus_per_server",
    "token_batch_size": "",
    "wandb.group": ": the variable WANDB_RUN_GROUP names it, or the configuration file",
    "wandb.name": _WANDB_NAME,
    "wandb.project": ": the environment variable WANDB_PROJECT",
    "weight_broadcast.type": "weight_sync.transport",
}

_COMMON = {
    "checkpoint.freq": "checkpoint.interval",
    "epochs": _STEPS,
    "lr": "optimizer.lr",
    "n_rollouts": "grpo.group_size",
    "seed": "debug.seed",
    "validation.interval": "validation.freq",
}
NAMES = TRL | VERL | PRIME_RL | _COMMON

_EVALUATION = "validation", "for held-out answers see [validation] in docs/configuration.md"
_REWARD = "reward", "rewards are functions, see [reward] functions"
_TEACHER = "distill", "teachers are servers, see [distill] teacher_urls"
PARTS = {
    "critic": ("", "GRPO has no critic"),
    **dict.fromkeys(("eval", "evaluation", "val", "val_kwargs", "validation"), _EVALUATION),
    **dict.fromkeys(("reward", "reward_manager", "reward_model"), _REWARD),
    **dict.fromkeys(("distill", "distillation", "teacher", "teacher_inference", "teacher_model"), _TEACHER),
}
"""Sections of what is not the policy: their section here, "" for none, and what to say of keys that it does not have.

A name of NAMES means something else in them: a critic's `model.path` is not the policy's.
"""


def part_of(path: str) -> tuple[str, str] | None:
    """The entry of PARTS that holds for a name, the innermost one; None in other sections."""
    return next((PARTS[name] for name in reversed(path.split(".")) if name in PARTS), None)


def entry_of(path: str) -> tuple[str, str] | None:
    """(key or "", note) for a name of another trainer, with its section before it or not; None for an unknown name."""
    own, reason = part_of(path) or (None, "")
    parts = path.split(".")
    for start in range(len(parts)):
        if (name := ".".join(parts[start:])) in NAMES:
            key, _, note = NAMES[name].partition(":")
            if own is None or (own and not key) or key.startswith(f"{own}."):
                return key, note.strip() or ("" if key else reason)
            return "", reason
    return None
