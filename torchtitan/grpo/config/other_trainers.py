"""The common names of TRL, verl, prime-rl, NeMo-RL and OpenRLHF, for those who come from there.

Messages that refuse a name have its key, and docs/coming_from.md has all of them (scripts/make_config_docs.py).

Where the names are documented:

- TRL: `GRPOConfig` (huggingface.co/docs/trl/grpo_trainer), `ModelConfig` and `ScriptArguments` (.../script_utils), and
  transformers' `TrainingArguments`, which `GRPOConfig` extends.
- verl: verl.readthedocs.io/en/latest/examples/config.html, and the files of verl/trainer/config.
- prime-rl: docs/configuration.md and docs/training.md, and packages/prime-rl-configs.
- NeMo-RL: examples/configs/grpo_math_1B.yaml and docs/guides/grpo.md.
- OpenRLHF: openrlhf/cli/train_ppo_ray.py.

An entry is this project's key, then a note where values differ in meaning: "key: note". It is ": reason" where no key
does the same. A dotted name holds in that section only. A name of several trainers may stand with each, if it means the
same to all.
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
    "activation_offloading": "activation_checkpoint.offload",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "beta": "grpo.kl_coef",
    "bf16": 'training.mixed_precision_param: "bfloat16"',
    "cast_lm_head_to_fp32": 'training.logits_dtype: "float32" for true; float32 by default',
    "dataset_config": "data.subset",
    "dataset_name": "data.path",
    "dataset_test_split": "data.validation_split",
    "dataset_train_split": "data.split",
    "delta": "grpo.ratio_clip_c",
    "epsilon": "grpo.ratio_clip_min: the upper clip is ratio_clip_max",
    "epsilon_high": "grpo.ratio_clip_max",
    "eval_steps": "validation.freq",
    "generation_batch_size": _IN_GROUPS,
    "gradient_accumulation_steps": _PACKED,
    "gradient_checkpointing": "activation_checkpoint.mode",
    "importance_sampling_level": 'grpo.policy_loss: "gspo" for "sequence"',
    "learning_rate": "optimizer.lr",
    "logging_steps": _LOGGED,
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "loss_type": "grpo.loss_aggregation: GSPO and CISPO are values of policy_loss",
    "lr_scheduler_type": "lr_scheduler.decay_type: set decay_ratio too",
    "mask_truncated_completions": "grpo.overlong_filter",
    "max_completion_length": "rollout.max_answer_tokens",
    "max_grad_norm": "training.max_norm",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "training.steps",
    "model": "model.hf_assets_path: a folder or an id of the hub",
    "model_name_or_path": "model.hf_assets_path: a folder or an id of the hub",
    "num_completions_to_print": "metrics.samples_per_step",
    "num_generations": "grpo.group_size",
    "num_iterations": _ONCE,
    "num_train_epochs": _STEPS,
    "optim": "optimizer.name",
    "output_dir": "job.dump_folder",
    "per_device_train_batch_size": _IN_GROUPS,
    "push_to_hub": ": checkpoints hold a Hugging Face folder, see [checkpoint] export_hf",
    "report_to": _LOGGED,
    "resume_from_checkpoint": "checkpoint.resume",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "run_name": _WANDB_NAME,
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "scale_rewards": "grpo.advantage_std",
    "steps_per_generation": "grpo.minibatches: steps_per_generation / gradient_accumulation_steps",
    "sync_ref_model": ": the reference is the model at step 0",
    "temperature": "rollout.temperature",
    "use_peft": "lora.enable",
    "use_vllm": 'rollout.engine: "vllm"',
    "vllm_enable_sleep_mode": "rollout.sleep_while_training",
    "vllm_gpu_memory_utilization": "rollout.memory_share: with colocate",
    "vllm_importance_sampling_cap": "grpo.importance_max",
    "vllm_importance_sampling_correction": "grpo.importance_correction",
    "vllm_mode": 'rollout.colocate: true for "colocate"',
    "vllm_server_base_url": "rollout.urls",
    "vllm_server_host": "rollout.urls",
    "vllm_tensor_parallel_size": "rollout.gpus_per_server",
    "warmup_ratio": "lr_scheduler.warmup_steps: in steps",
}

VERL = {
    "adv_estimator": 'grpo.advantage_baseline: "leave_one_out" for "rloo"',
    "clip_ratio": "grpo.ratio_clip_max: the lower clip is ratio_clip_min",
    "clip_ratio_c": "grpo.ratio_clip_c",
    "clip_ratio_high": "grpo.ratio_clip_max",
    "clip_ratio_low": "grpo.ratio_clip_min",
    "custom_reward_function.name": "reward.functions: module:function",
    "custom_reward_function.path": "reward.functions: module:function",
    "default_local_dir": "job.dump_folder",
    "enable_activation_offload": "activation_checkpoint.offload",
    "enable_gradient_checkpointing": "activation_checkpoint.mode",
    "entropy_coeff": "grpo.entropy_coef",
    "experiment_name": _WANDB_NAME,
    "filter_groups.enable": 'grpo.zero_variance_groups: "replace"',
    "free_cache_engine": "rollout.sleep_while_training",
    "gpu_memory_utilization": "rollout.memory_share: with colocate",
    "grad_clip": "training.max_norm",
    "kl_loss_coef": "grpo.kl_coef",
    "kl_loss_type": "grpo.kl_estimator",
    "logger": _LOGGED,
    "lora_alpha": "lora.alpha",
    "lora_rank": "lora.rank",
    "loss_agg_mode": "grpo.loss_aggregation",
    "lr_warmup_steps": "lr_scheduler.warmup_steps",
    "max_model_len": "training.seq_len",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_answer_tokens",
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
    "resume_mode": "checkpoint.resume",
    "rollout.mode": ": requests to servers are always asynchronous",
    "rollout.n": "grpo.group_size",
    "rollout.name": "rollout.engine",
    "rollout_is": "grpo.importance_level",
    "rollout_is_threshold": "grpo.importance_max",
    "save_freq": "checkpoint.interval",
    "temperature": "rollout.temperature",
    "tensor_model_parallel_size": "rollout.gpus_per_server: the trainer's is [parallelism] tensor_parallel_degree",
    "test_freq": "validation.freq",
    "total_epochs": _STEPS,
    "total_training_steps": "training.steps",
    "train_batch_size": "grpo.prompts_per_step",
    "train_files": "data.path",
    "use_kl_in_reward": 'grpo.kl_placement: "reward"',
    "use_kl_loss": "grpo.kl_coef: over 0",
    "val_files": "data.validation_path",
    "val_kwargs.n": "validation.samples_per_prompt",
    "val_kwargs.temperature": "validation.temperature",
    "val_kwargs.top_p": "validation.top_p",
}

PRIME_RL = {
    "batch_size": "grpo.prompts_per_step: in groups",
    "ckpt.interval": "checkpoint.interval",
    "client.base_url": "rollout.urls",
    "env.id": 'rollout.environment: as in "verifiers:NAME"',
    "eval.interval": "validation.freq",
    "keep_last": "checkpoint.keep_latest_k",
    "mask_ratio_high": 'grpo.importance_max: with importance_correction = "mask"',
    "mask_ratio_low": 'grpo.importance_min: with importance_correction = "mask"',
    "max_async_level": "async_grpo.max_trajectory_age_steps",
    "max_completion_tokens": "rollout.max_answer_tokens",
    "max_concurrent": "rollout.max_concurrent_requests: per server",
    "max_inflight_rollouts": "rollout.max_concurrent_requests: per server",
    "max_new_tokens": "rollout.max_answer_tokens",
    "max_off_policy_steps": "async_grpo.max_trajectory_age_steps",
    "max_steps": "training.steps",
    "max_tokens": "rollout.max_answer_tokens",
    "model.name": "model.hf_assets_path: a folder or an id of the hub",
    "num_infer_gpus": "rollout.replicas: servers, of [rollout] gpus_per_server",
    "num_train_gpus": _RANKS,
    "optim.lr": "optimizer.lr",
    "optim.type": "optimizer.name",
    "output_dir": "job.dump_folder",
    "oversampling_factor": "grpo.oversampling: the extra share, oversampling_factor - 1",
    "rollouts_per_example": "grpo.group_size",
    "scheduler.type": "lr_scheduler.decay_type: set decay_ratio too",
    "temperature": "rollout.temperature",
    "tensor_parallel_size": "rollout.gpus_per_server",
    "weight_broadcast.type": "weight_sync.transport",
}

NEMO_RL = {
    "activation_checkpointing": 'activation_checkpoint.mode: "full" for true',
    "checkpoint_dir": "job.dump_folder",
    "colocated.enabled": "rollout.colocate",
    "context_parallel_size": "parallelism.context_parallel_degree",
    "dtensor_cfg.tensor_parallel_size": "parallelism.tensor_parallel_degree",
    "generation.backend": "rollout.engine",
    "gpu_memory_utilization": "rollout.memory_share: with colocate",
    "in_flight_weight_updates": "async_grpo.in_flight_weight_updates",
    "input_key": "data.prompt_column",
    "keep_top_k": "checkpoint.keep_latest_k: the newest ones; keep_best keeps the best one too",
    "log_dir": "job.dump_folder",
    "logprob_batch_size": ": log-probabilities are computed on the packed rows of [training] tokens_per_microbatch",
    "lr": "optimizer.lr",
    "max_grad_norm": "training.max_norm",
    "max_input_seq_length": "data.max_prompt_tokens",
    "max_new_tokens": "rollout.max_answer_tokens",
    "max_num_epochs": _STEPS,
    "max_num_steps": "training.steps",
    "max_total_sequence_length": "training.seq_len",
    "max_trajectory_age_steps": "async_grpo.max_trajectory_age_steps",
    "max_val_samples": "validation.prompts",
    "metric_name": 'checkpoint.keep_best: as in "validation/greedy_reward"',
    "model_name": "model.hf_assets_path: a folder or an id of the hub",
    "normalize_rewards": "grpo.advantage_std",
    "num_generations_per_prompt": "grpo.group_size",
    "num_nodes": _RANKS,
    "num_prompts_per_step": "grpo.prompts_per_step",
    "output_key": "data.answer_column",
    "overlong_filtering": "grpo.overlong_filter",
    "precision": "training.mixed_precision_param",
    "prompt_file": "data.prompt_template: the text itself",
    "ratio_clip_c": "grpo.ratio_clip_c",
    "ratio_clip_max": "grpo.ratio_clip_max",
    "ratio_clip_min": "grpo.ratio_clip_min",
    "recompute_kv_cache_after_weight_updates": "async_grpo.recompute_kv_cache_after_weight_updates",
    "reference_policy_kl_penalty": "grpo.kl_coef",
    "save_period": "checkpoint.interval",
    "sequence_level_importance_ratios": 'grpo.policy_loss: "gspo" for true',
    "stop_strings": "rollout.stop",
    "system_prompt_file": "data.system_prompt: the text itself",
    "temperature": "rollout.temperature",
    "tensorboard_enabled": "metrics.enable_tensorboard",
    "token_level_loss": 'grpo.loss_aggregation: "token" for true, "sequence" for false',
    "train_data_path": "data.path",
    "train_global_batch_size": "grpo.minibatches: their number, answers of a step / train_global_batch_size",
    "train_mb_tokens": "training.tokens_per_microbatch",
    "train_micro_batch_size": _PACKED,
    "train_split": "data.split",
    "truncated_importance_sampling_ratio": "grpo.importance_max",
    "use_dynamic_sampling": 'grpo.zero_variance_groups: "replace"',
    "use_importance_sampling_correction": 'grpo.importance_correction: "truncate" for true, "none" for false',
    "use_leave_one_out_baseline": 'grpo.advantage_baseline: "leave_one_out" for true',
    "val_data_path": "data.validation_path",
    "val_period": "validation.freq",
    "val_split": "data.validation_split",
    "vllm_cfg.tensor_parallel_size": "rollout.gpus_per_server",
    "wandb_enabled": "metrics.enable_wandb",
}

OTHERS = {
    "actor_learning_rate": "optimizer.lr",
    "advantage_estimator": 'grpo.advantage_baseline: "leave_one_out" for "rloo"',
    "generate_max_len": "rollout.max_answer_tokens",
    "init_kl_coef": "grpo.kl_coef",
    "n_samples_per_prompt": "grpo.group_size",
    "pretrain": "model.hf_assets_path: a folder or an id of the hub",
    "prompt_data": "data.path",
    "prompt_max_len": "data.max_prompt_tokens",
    "remote_rm_url": ": rewards are functions, see [reward] functions",
    "rollout_batch_size": "grpo.prompts_per_step",
    "vllm_num_engines": "rollout.replicas: servers, of [rollout] gpus_per_server",
    "checkpoint.freq": "checkpoint.interval",
    "lr": "optimizer.lr",
    "seed": "debug.seed",
    "validation.interval": "validation.freq",
}

TRAINERS = {"TRL": TRL, "verl": VERL, "prime-rl": PRIME_RL, "NeMo-RL": NEMO_RL, "OpenRLHF and others": OTHERS}
NAMES = {name: entry for names in TRAINERS.values() for name, entry in names.items()}

NOT_THE_POLICY = {
    *("critic", "distill", "eval", "reward", "reward_model", "validation"),
    *("teacher", "teacher_inference", "teacher_model"),
}
"""Sections in which a name means something else: a critic's `model.path` is not the policy's."""


def entry_of(path: str) -> tuple[str, str] | None:
    """(key or "", note) for a name of another trainer, with its section before it or not; None for an unknown name."""
    parts = path.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in NAMES and not NOT_THE_POLICY & set(parts[:start]):
            key, _, note = NAMES[name].partition(":")
            return key, note.strip()
    return None
