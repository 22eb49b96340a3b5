"""Names of other trainers, and misspelt ones: each gets the right key or none, never another one."""

import re

import pytest

from torchtitan.grpo.config.hints import unknown_flag
from torchtitan.grpo.config.keys import keys
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.other_trainers import NAMES
from torchtitan.grpo.config.unsupported import honoured_keys, unsupported_by
from torchtitan.grpo.errors import UserError

NONE = ""
# What their documentation says they do, which other_trainers.py names.
TRL = {
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
}
VERL = {
    "adv_estimator": "grpo.advantage_baseline",
    "clip_ratio_c": "grpo.ratio_clip_c",
    "clip_ratio_high": "grpo.ratio_clip_max",
    "entropy_coeff": "grpo.entropy_coef",
    "experiment_name": "metrics.wandb_name",
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
}
OTHERS = {
    "training.epochs": NONE,
    "validation.local_batch_sise": NONE,  # like a key without effect
    "profiling.enable_profilin": NONE,
    "grpo.enable": NONE,  # a key of many sections
    "actor_rollout_ref.rollout.n": "grpo.group_size",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallelism.tensor_parallel_degree",
    "orchestrator.ckpt.interval": "checkpoint.interval",
    "group_sise": "grpo.group_size",
    "rolout.engine": "rollout.engine",
    "dry_runn": "dry_run",
}
FLAGS = {f"grpo.{name}": key for table in (TRL, VERL, PRIME_RL) for name, key in table.items()} | OTHERS


@pytest.mark.parametrize("flag", FLAGS)
def test_a_name_of_another_trainer_gets_its_key_or_none(flag):
    said = unknown_flag(f"--{flag}")
    assert re.findall(r"did you mean --([\w.]+)", said) == [FLAGS[flag]] * bool(FLAGS[flag]), said
    assert FLAGS[flag] or "no key is like it: " in said


def test_the_names_are_many_and_theirs_alone():
    assert len(TRL) >= 27 and len(VERL) >= 21 and len(PRIME_RL) >= 13
    honoured = {key.path for key in honoured_keys()}
    assert {entry.partition(":")[0] for entry in NAMES.values()} - {""} <= honoured


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
        "the other 1",
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
