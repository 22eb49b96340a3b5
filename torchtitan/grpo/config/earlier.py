"""Keys of earlier versions, and what a user writes today in their place."""

_MIN_P = "use [validation] top_p, or one of the set's own; [rollout] min_p is for training too"
GONE = {
    "checkpoint.export_hf": 'for no export write [checkpoint] export_dtype = "none"; else leave it out',
    "data.arithmetic_max": "write [data] source_args = { max = 39 }",
    "data.arithmetic_operators": 'write [data] source_args = { operators = ["+"] }',
    "data.arithmetic_question": 'write [data] source_args = { question = "{left}{operator}{right}=" }',
    "data.overlong_prompts": "longer prompts are left out, and the log names the first; leave it out",
    "data.size": "write [data] source_args = { size = 500 }",
    "data.tasks": 'write [data] source_args = { tasks = ["chain_sum"] }',
    "distill.timeout_seconds": "[rollout] request_timeout_seconds is the limit",
    "grpo.clip_old_tokens": "asynchronous runs always clip them, since all learned better so; leave it out",
    "grpo.replace_limit": "a step asks for four times [grpo] prompts_per_step groups at most; leave it out",
    "lora.dropout": "it had to be 0; leave it out",
    "metrics.validation_samples": "every held-out answer is written; leave it out",
    "metrics.wandb_group": "set the environment variable WANDB_RUN_GROUP",
    "metrics.wandb_name": "set the environment variable WANDB_NAME",
    "ray.start_timeout_seconds": "[rollout] start_timeout_seconds is the limit",
    "ray.step_timeout_seconds": "[debug] hang_seconds is the limit",
    "ray.warmup_tokens": "ranks are warmed up by their longest row; leave it out",
    "rollout.embedded_device": "the server is on a GPU if the trainer is: for another device start one by hand (python "
    "-m torchtitan.grpo.engines.embedded --device cpu), and name its address in [rollout] urls",
    "rollout.embedded_dtype": 'it is a flag of the server, as in [rollout] server_flags = ["--dtype", "float32"]',
    "rollout.embedded_max_sequences": "it is a flag of the server, as in [rollout] server_flags = "
    '["--max-sequences", "1024"]',
    "rollout.episode_lease_seconds": "a quarter of [rollout] group_timeout_seconds is the limit",
    "rollout.server_python": "set the environment variable VLLM_PYTHON or SGLANG_PYTHON",
    "training.share_prompts": "a row has a group's prompt once, which no result shows; leave it out",
    "validation.min_p": _MIN_P,
    "validation.sets.min_p": _MIN_P,
    "weight_sync.bucket_mib_max": "set [weight_sync] buffer_memory_ratio: two buckets share it, of a GiB each at most",
    "weight_sync.cadence": "leave it out: each version is sent, or the newest that is waiting",
    "weight_sync.num_snapshots": "leave it out: there are two with async_weight_update, and one without",
    "weight_sync.num_buffers": "leave it out: two buckets are in flight",
    "weight_sync.verify": "every bucket has a checksum; leave it out",
}
"""By path: what to do instead."""
