"""Names of other trainers, and misspelt ones: each gets the right key or none, never another one."""

import re

import pytest

from torchtitan.grpo.config.earlier import GONE
from torchtitan.grpo.config.hints import unknown_flag, unknown_name
from torchtitan.grpo.config.keys import keys, table_keys
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.other_trainers import NAMES, TRAINERS
from torchtitan.grpo.config.unsupported import honoured_keys, unsupported_by
from torchtitan.grpo.errors import UserError

NONE = ""
# What their documentation says they do, which other_trainers.toml names.
TRL = {
    "activation_offloading": "activation_checkpoint.offload",
    "beta": "grpo.kl_coef",
    "bf16": "training.mixed_precision_param",
    "delta": "grpo.ratio_clip_c",  # the bound on the ratio of negative advantages
    "epsilon": "grpo.ratio_clip_min",
    "epsilon_high": "grpo.ratio_clip_max",
    "eval_steps": "validation.freq",
    "generation_batch_size": "grpo.prompts_per_step",
    "gradient_checkpointing": "activation_checkpoint.mode",
    "importance_sampling_level": "grpo.policy_loss",
    "learning_rate": "optimizer.lr",
    "logging_steps": NONE,
    "loss_type": "grpo.loss_aggregation",
    "mask_truncated_completions": "grpo.overlong_filter",
    "max_completion_length": "rollout.max_answer_tokens",
    "max_grad_norm": "training.max_norm",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "training.steps",
    "num_generations": "grpo.group_size",
    "num_iterations": NONE,
    "num_train_epochs": NONE,
    "report_to": NONE,
    "reward_weights": "reward.weights",
    "save_total_limit": "checkpoint.keep_latest_k",
    "scale_rewards": "grpo.advantage_std",
    "steps_per_generation": "grpo.minibatches",
    "sync_ref_model": NONE,
    "top_entropy_quantile": NONE,
    "use_bias_correction_kl": NONE,
    "vllm_gpu_memory_utilization": "rollout.memory_share",
    "vllm_importance_sampling_cap": "grpo.importance_max",
    "vllm_importance_sampling_correction": "grpo.importance_correction",
    "vllm_mode": "rollout.colocate",
    "vllm_tensor_parallel_size": "rollout.gpus_per_server",
    "warmup_ratio": "lr_scheduler.warmup_steps",
    "activation_checkpointing": "activation_checkpoint.mode",
    "attn_implementation": "training.flash_attention",
    "data_seed": "debug.seed",
    "entropy_coef": "grpo.entropy_coef",
    "entropy_coef_max": NONE,
    "eval_dataset": "data.validation_path",
    "eval_on_start": NONE,
    "fsdp": "parallelism.data_parallel_shard_degree",
    "log_completions": NONE,
    "lora_dropout": NONE,
    "metric_for_best_model": "checkpoint.keep_best",
    "num_generations_eval": "validation.samples_per_prompt",
    "off_policy_mask_threshold": NONE,
    "torch_compile": "compile.enable",
    "train_dataset": "data.path",
    "use_adaptive_entropy": NONE,
    "vllm_importance_sampling_clip_max": "grpo.importance_max",
    "vllm_importance_sampling_mode": "grpo.importance_correction",
    "vllm_server_port": "rollout.urls",
    "vllm_server_timeout": "rollout.start_timeout_seconds",
}
VERL = {
    "adv_estimator": "grpo.advantage_baseline",
    "clip_ratio_c": "grpo.ratio_clip_c",
    "clip_ratio_high": "grpo.ratio_clip_max",
    "enable_activation_offload": "activation_checkpoint.offload",
    "entropy_coeff": "grpo.entropy_coef",
    "experiment_name": NONE,
    "free_cache_engine": "rollout.sleep_while_training",
    "gpu_memory_utilization": "rollout.memory_share",
    "grad_clip": "training.max_norm",
    "kl_loss_coef": "grpo.kl_coef",
    "log_prob_micro_batch_size_per_gpu": NONE,
    "log_val_generations": NONE,
    "logger": NONE,
    "loss_agg_mode": "grpo.loss_aggregation",
    "max_response_length": "rollout.max_answer_tokens",
    "n_gpus_per_node": NONE,
    "norm_adv_by_std_in_grpo": "grpo.advantage_std",
    "ppo_epochs": NONE,
    "ppo_max_token_len_per_gpu": "training.tokens_per_microbatch",
    "ppo_mini_batch_size": "grpo.minibatches",
    "prompt_key": "data.prompt_column",
    "rollout_is_threshold": "grpo.importance_max",
    "save_freq": "checkpoint.interval",
    "tensor_model_parallel_size": "rollout.gpus_per_server",
    "total_epochs": NONE,
    "train_batch_size": "grpo.prompts_per_step",
    "train_files": "data.path",
    "truncation": NONE,
    "use_kl_in_reward": "grpo.kl_placement",
    "val_before_train": NONE,
    "bypass_mode": "grpo.proximal_logprobs",
    "enable_prefix_caching": NONE,
    "gen_batch_size": NONE,
    "kl_penalty": "grpo.kl_estimator",
    "max_actor_ckpt_to_keep": "checkpoint.keep_latest_k",
    "rollout_rs": "grpo.importance_correction",
    "ulysses_sequence_parallel_size": "parallelism.context_parallel_degree",
    "use_dynamic_bsz": NONE,
    "val_max_samples": "validation.prompts",
}
PRIME_RL = {
    "batch_size": "grpo.prompts_per_step",
    "dppo_mask_high": NONE,
    "keep_last": "checkpoint.keep_latest_k",
    "kl_tau": NONE,
    "mask_ratio_high": "grpo.importance_max",
    "max_async_level": "async_grpo.max_trajectory_age_steps",
    "max_completion_tokens": "rollout.max_answer_tokens",
    "max_inflight_rollouts": "rollout.max_concurrent_requests",
    "max_off_policy_steps": "async_grpo.max_trajectory_age_steps",
    "num_train_workers": NONE,
    "oversampling_factor": "grpo.oversampling",
    "rollouts_per_example": "grpo.group_size",
    "sampling": NONE,
    "strict_async_level": NONE,
    "token_batch_size": NONE,
    "weight_broadcast": NONE,
    "enable_router_replay": "grpo.routing_replay",
    "filter_zero_advantages": "grpo.zero_variance_groups",
    "optim_cpu_offload": "offload.optimizer_states",
    "num_infer_replicas": "rollout.replicas",
}
OTHERS = {
    "training.epochs": NONE,
    "validation.local_batch_sise": NONE,  # like a key without effect
    "profiling.enable_profilin": NONE,
    "grpo.enable": NONE,  # a key of many sections
    "actor_rollout_ref.rollout.n": "grpo.group_size",
    "orchestrator.ckpt.interval": "checkpoint.interval",
    "group_sise": "grpo.group_size",
    "rolout.engine": "rollout.engine",
    "dry_runn": "dry_run",
}
# As users write them, with their sections: what each does there decides.
WITH_SECTIONS = {
    "model": "model.hf_assets_path",
    "type": NONE,
    "seed": "debug.seed",
    "critic": NONE,
    "reward_model": NONE,
    "training_args.learning_rate": "optimizer.lr",
    "training_args.num_train_epochs": NONE,
    "training_args.seed": "debug.seed",
    "script_args.dataset_name": "data.path",
    "model_args.model_name_or_path": "model.hf_assets_path",
    "model_init_kwargs.dtype": NONE,
    "generation_kwargs.temperature": "rollout.temperature",
    "generation_kwargs.seed": "debug.seed",
    "actor_rollout_ref.model.path": "model.hf_assets_path",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "lr_scheduler.warmup_steps",
    "actor_rollout_ref.actor.shuffle": NONE,
    "actor_rollout_ref.actor.strategy": NONE,
    "actor_rollout_ref.actor.checkpoint.save_contents": NONE,
    "actor_rollout_ref.actor.fsdp_config.param_offload": NONE,
    "actor_rollout_ref.rollout.mode": NONE,
    "actor_rollout_ref.rollout.dtype": NONE,
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.load_format": NONE,
    "actor_rollout_ref.rollout.agent.num_workers": NONE,
    "actor_rollout_ref.rollout.multi_turn.enable": NONE,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": NONE,
    "actor_rollout_ref.rollout.val_kwargs.temperature": "validation.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": NONE,
    "algorithm.kl_ctrl.kl_coef": "grpo.kl_coef",
    "algorithm.kl_ctrl.type": NONE,
    "algorithm.gamma": NONE,
    "critic.model.path": NONE,
    "critic.optim.lr": NONE,
    "critic.optim.weight_decay": NONE,
    "critic.ppo_epochs": NONE,
    "critic.checkpoint.interval": NONE,
    "reward_model.enable": NONE,
    "reward_model.model.path": NONE,
    "reward.reward_model.model.path": NONE,
    "reward.reward_model.rollout.temperature": NONE,
    "reward.model.path": NONE,
    "data.seed": "debug.seed",
    "data.image_key": NONE,
    "data.val_batch_size": NONE,
    "data.trust_remote_code": NONE,
    "trainer.device": NONE,
    "trainer.val_only": NONE,
    "trainer.resume_from_path": NONE,
    "global_profiler.steps": NONE,
    "global_profiler.tool": NONE,
    "rollout.mode": NONE,
    "trainer.optim.type": "optimizer.name",
    "trainer.optim.max_norm": "training.max_norm",
    "trainer.scheduler.type": "lr_scheduler.decay_type",
    "trainer.scheduler.warmup_steps": "lr_scheduler.warmup_steps",
    "trainer.scheduler.decay_steps": NONE,
    "trainer.model.seq_len": "training.seq_len",
    "trainer.model.impl": NONE,
    "trainer.loss.type": NONE,
    "trainer.log.level": NONE,
    "trainer.weight_broadcast.type": "weight_sync.transport",
    "weight_broadcast.type": "weight_sync.transport",
    "trainer.wandb.name": NONE,
    "checkpoint.freq": "checkpoint.interval",
    "inference.server.port": NONE,
    "inference.model.dtype": NONE,
    "inference.model.max_model_len": "training.seq_len",
    "orchestrator.sampling.temperature": "rollout.temperature",
    "orchestrator.eval.interval": "validation.freq",
    "orchestrator.eval.sampling.temperature": "validation.temperature",
    "orchestrator.eval.group_size": "validation.samples_per_prompt",
    "orchestrator.eval.sampling.max_tokens": NONE,
    "orchestrator.eval.env.id": NONE,
    "orchestrator.teacher.model.name": NONE,
    "orchestrator.teacher_model.client.base_url": NONE,
    "teacher_inference.model.name": NONE,
    "eval.temperature": NONE,
    "validation.batch_size": NONE,
    "validation.interval": "validation.freq",
    "distill.model.path": NONE,
    "validation.top_k": NONE,
    "actor_rollout_ref.rollout.val_kwargs.top_k": NONE,
    "reward.reward_model.rollout.top_p": NONE,
    "reward.custom_reward_function.path": "reward.functions",
    "actor_rollout_ref.actor.qat.group_size": NONE,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "grpo.policy_loss",
    "actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.tensor_parallel_size": NONE,
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": NONE,
    "actor_rollout_ref.ref.fsdp_config.param_offload": "offload.reference_weights",
    "actor_rollout_ref.rollout.trace.experiment_name": NONE,
    "actor_rollout_ref.model.lora.rank": "lora.rank",
    "algorithm.rollout_correction.loss_type": NONE,
    "distillation.distillation_loss.clip_ratio": NONE,
    "sandbox_fusion.max_concurrent": NONE,
    "trainer.model.cp": "parallelism.context_parallel_degree",
    "trainer.model.lora.alpha": "lora.alpha",
    "trainer.tokenizer.chat_template": "data.chat_template_file",
    "trainer.data.fake.batch_size": NONE,
    "trainer.ckpt.output_dir": "checkpoint.folder",
    "orchestrator.algo.sampling.source.api_key_var": NONE,
    "orchestrator.concurrency.max_inflight": "rollout.max_concurrent_requests",
    "policy.megatron_cfg.tensor_model_parallel_size": "parallelism.tensor_parallel_degree",
    "policy.generation.vllm_cfg.precision": "weight_sync.dtype",
    "policy.generation_batch_size": NONE,
    "policy.draft.model_name": NONE,
    "policy.dtensor_cfg.lora_cfg.dim": "lora.rank",
    "grpo.async_grpo.enabled": "async_grpo.enabled",
    "loss_fn.ratio_clip_min": "grpo.ratio_clip_min",
    "loss_fn.truncated_importance_sampling_ratio_min": "grpo.importance_min",
}
MISSPELT = {
    "grpo.groupsize": "grpo.group_size",
    "grpo.replicas": "rollout.replicas",
    "rollot.temperature": "rollout.temperature",
    "rollout.temprature": "rollout.temperature",
    "optimiser.lr": "optimizer.lr",
    "optimizer.weightdecay": "optimizer.weight_decay",
    "trainning.steps": "training.steps",
    "training.seqlen": "training.seq_len",
    "validation.frq": "validation.freq",
    "vaidation.temperature": "validation.temperature",
    "sf.lr": "sft.lr",
    "rollot.temprature": "rollout.temperature",
    "data_path": "data.path",
    "validaton.freq": "validation.freq",
    "lora.rnk": "lora.rank",
    "chekpoint.intervall": "checkpoint.interval",
    "data.pth": "data.path",
    "data.messages_colum": "data.messages_column",
    "reward.answer_column": NONE,
    "rewards.functions": "reward.functions",
    "reward.timeout_second": "reward.timeout_seconds",
    "async_grpo.enable": "async_grpo.enabled",
    "distil.teacher_urls": "distill.teacher_urls",
}
OPENRLHF = {
    "init_kl_coef": "grpo.kl_coef",
    "n_samples_per_prompt": "grpo.group_size",
    "remote_rm_url": NONE,
    "rollout_batch_size": "grpo.prompts_per_step",
}
FLAGS = {f"grpo.{name}": key for table in (TRL, VERL, PRIME_RL, OPENRLHF) for name, key in table.items()}
FLAGS |= OTHERS | WITH_SECTIONS | MISSPELT


@pytest.mark.parametrize("flag", FLAGS)
def test_a_name_of_another_trainer_gets_its_key_or_none(flag):
    said = unknown_flag(f"--{flag}")
    assert re.findall(r"did you mean --([\w.]+)", said) == [FLAGS[flag]] * bool(FLAGS[flag]), said
    assert FLAGS[flag] or "no key is like it: " in said


def test_the_names_are_many_and_theirs_alone():
    assert len(TRL) >= 55 and len(VERL) >= 39 and len(PRIME_RL) >= 20
    honoured = {key.path for key in honoured_keys()}
    assert {entry.partition(":")[0] for entry in NAMES.values()} - {""} <= honoured


def test_a_name_of_several_trainers_means_the_same_to_all():
    differ = {name for names in TRAINERS.values() for name, entry in names.items() if NAMES[name] != entry}
    assert not differ


def test_a_key_without_effect_is_never_suggested():
    for path in filter(unsupported_by, keys()):
        for flag in (f"--{path}s", f"--{path.rpartition('.')[2]}", f"--x{path}"):
            assert f"--{path}?" not in unknown_flag(flag)


SECTIONS = {
    "verl": (
        "[actor_rollout_ref.rollout]\nn = 8\nname = 'vllm'\nmode = 'async'\n[actor_rollout_ref.actor.optim]\nlr = 1e-6",
        "[actor_rollout_ref]: it is another trainer's",
        "rollout.n is [grpo] group_size",
        "rollout.name is [rollout] engine",
        "actor.optim.lr is [optimizer] lr",
    ),
    "prime-rl": (
        "[orchestrator]\nbatch_size = 64\nrollouts_per_example = 8\n[orchestrator.sampling]\nmax_tokens = 9\n"
        "[ckpt]\ninterval = 5",
        "batch_size is [grpo] prompts_per_step (in groups)",
        "rollouts_per_example is [grpo] group_size",
        "sampling.max_tokens is [rollout] max_answer_tokens",
        "[ckpt]",
        "interval is [checkpoint] interval",
    ),
    "prime-rl: a list": ("[[orchestrator.env]]\nid = 'wordle'", "env.id is [rollout] environment"),
    "a section like ours": ("[trainer]\nmax_steps = 5", "max_steps is [training] steps"),
    "inside ours": ("[rollout.val_kwargs]\nn = 4", "n is [validation] samples_per_prompt"),
    "TRL: no sections": ("num_generations = 8", "num_generations outside any section", "[grpo] group_size?"),
    "ours in two sections": (
        "steps = 8",
        "unknown key steps outside any section: did you mean [training] steps or [sft]",
    ),
    "verl: a reward model": (
        "[reward_model.model]\npath = 'm'",
        "unknown section [reward_model]: did you mean [reward]?",
    ),
    "verl: only what sampling can have": (
        "[actor_rollout_ref.rollout]\nn = 8\ntop_p = 0.9\ntop_k = 20\nmode = 'async'",
        "and here rollout.n is [grpo] group_size",
    ),
    "ours, misspelt": ("[trainning]\nsteps = 5", "did you mean [training]?"),
    "one without effect": ("[profilin]\nenable_profiling = true", "docs/configuration.md lists all sections"),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_keys_in_another_trainers_section_are_told(name, tmp_path):
    text, *words = SECTIONS[name]
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(["--job.config_file", str(tmp_path / "run.toml"), "--model.hf_assets_path", "m"])
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_verls_way_to_set_a_key_is_told():
    words = ["actor_rollout_ref.rollout.n=8", "grpo.group_size=8", "training.dataset=c4"]
    with pytest.raises(UserError) as caught:
        load_config(["--model.hf_assets_path", "m", *words])
    assert re.findall(r"': (.*)", str(caught.value)) == [
        "did you mean --grpo.group_size?",
        "did you mean --grpo.group_size?",
        "prompts come from [data]",
    ]


@pytest.mark.parametrize("path", GONE)
def test_a_key_of_an_earlier_version_is_refused_with_what_to_do_instead(path):
    section, _, name = path.rpartition(".")
    assert path not in keys() and name not in table_keys("validation.sets")
    for said in (unknown_name(section, name, 1), unknown_flag(f"--{path}")):
        assert name in said and "of an earlier version: " in said and said.endswith(GONE[path])
