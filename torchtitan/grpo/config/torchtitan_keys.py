"""torchtitan's sections: further keys of this project, and keys that need another default, or a range, for RL.

Keys that stay as torchtitan has them have their texts in TORCHTITAN_TEXTS.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.ranges import Needs, Range

TORCHTITAN_TEXTS: dict[str, str] = {
    "job.config_file": "The TOML file, as a flag only.",
    "job.dump_folder": "Folder for metrics, samples, checkpoints and logs of the run.",
    "job.description": "A name for the run, for people.",
    "metrics.enable_wandb": "Log to Weights & Biases. Needs the package wandb.",
    "lr_scheduler.decay_type": "Shape of the decay.",
    "training.dtype": "Type of weights, gradients and optimizer state. float32 keeps the small updates of RL.",
    "training.mixed_precision_param": "Type of weights and activations in forward and backward passes.",
    "parallelism.data_parallel_shard_degree": "Ranks that shard weights, gradients and optimizer state (FSDP2). "
    "-1: all that the other degrees leave.",
    "compile.enable": "Compile the model's blocks. CUDA only.",
    "validation.enable": "Measure pass rates on held-out prompts during the run.",
    "debug.deterministic": "Use deterministic algorithms, which may be slower.",
    "debug.deterministic_warn_only": "Use operations without a deterministic algorithm, with a warning. "
    "FlashAttention 2's backward pass is then one.",
}


@dataclass
class Model:
    hf_assets_path: str = ""
    """Hugging Face folder with config.json, tokenizer and weights, or its id on the hub: `Qwen/Qwen3-0.6B`, or
    `Qwen/Qwen3-0.6B@main` with a revision. Required."""
    weights: Literal["hf", "random"] = "hf"
    """`hf` loads safetensors from `hf_assets_path`. `random` initialises from `debug.seed`."""
    implementation: Literal["auto", "torchtitan", "transformers"] = "auto"
    """Who computes the model (docs/models.md). `torchtitan` is faster, with tensor and expert parallelism;
    `transformers` takes almost any dense causal language model. `auto`: `torchtitan` for models that it knows."""


@dataclass
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Update rule."""
    lr: Annotated[float, Range(above=0, at_most=1)] = 1e-6
    """Learning rate. RL of all weights uses about 1e-6."""
    beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    """Decay rate of the mean gradient."""
    beta2: Annotated[float, Range(at_least=0, below=1)] = 0.95
    """Decay rate of the mean squared gradient."""
    eps: Annotated[float, Range(above=0, at_most=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    """Weight decay."""


@dataclass
class LRScheduler:
    warmup_steps: Annotated[int, Range(at_least=0)] = 0
    """Steps of linear warm-up."""
    total_steps: Annotated[int | None, Range(at_least=1)] = None
    """Length of the schedule. Later steps keep its last rate. None: `training.steps`."""
    decay_ratio: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    """Last share of the run, in which the rate decays. 0 keeps it constant."""
    min_lr_factor: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    """Final rate, as a share of `optimizer.lr`."""


@dataclass
class Training:
    seq_len: Annotated[int, Range(at_least=2, at_most=2**24, why="a prompt and an answer need a token each")] = 2048
    """Longest prompt and answer together, in tokens."""
    max_norm: Annotated[float | int, Range(above=0, why="gradients are scaled down to it")] = 1.0
    """Gradient norm above which gradients are scaled down."""
    steps: Annotated[int, Range(at_least=1)] = 100
    """Steps, each on a batch of rollouts, or in `sft_train.py` of `sft.batch_size` rows."""
    tokens_per_microbatch: Annotated[int, Range(at_least=0)] = 0
    """Tokens of one packed forward and backward pass on a data-parallel rank. 0: `seq_len`."""
    kept_logits_mib: Annotated[int, Range(at_least=0)] = 2048
    """MiB of logits kept for the backward pass; the rest are recomputed. 16k answer tokens of Qwen3 take 9.3 GiB, half
    with `logits_dtype = "model"`."""
    logits_dtype: Literal["float32", "model"] = "float32"
    """Type of the logits. `model` is `mixed_precision_param`: half the memory in bfloat16, but trainer and sampler
    differ by more (docs/metrics.md)."""
    reduce_gradients: Literal["auto", "microbatch", "step"] = "auto"
    """When sharded ranks gather parameters and reduce gradients: per packed row, or per optimizer `step`, which saves
    traffic but keeps all weights and gradients on each rank. `auto`: `step` up to a billion parameters."""
    flash_attention: Literal["auto", "FA2", "FA4"] = "auto"
    """bfloat16 attention on GPUs: torch's (`FA2`), or `flash-attn-4`, faster on Hopper and Blackwell. `auto`: `FA4` if
    it is installed and agrees with `FA2` in a trial."""


@dataclass
class Parallelism:
    ranks: Annotated[int, Range(at_least=0, at_most=65536)] = 0
    """Trainer processes that a dry run plans and that a run must have. 0: any number."""
    data_parallel_replicate_degree: Annotated[int, Range(at_least=0)] = 0
    """Copies of the model; with shards in each, HSDP. 0: one for each node if it fits there by `--dry_run`, else
    one."""
    tensor_parallel_degree: Annotated[int, Range(at_least=1)] = 1
    """Ranks that share each layer."""
    context_parallel_degree: Annotated[int, Range(at_least=1)] = 1
    """Ranks that share each packed row (Ulysses), for documents too long for one GPU. They shard weights too."""
    expert_parallel_degree: Annotated[int, Range(at_least=1)] = 1
    """Of the ranks that shard the model, those that share a layer's experts (docs/moe.md). 1: each gathers all."""


@dataclass
class Metrics:
    enable_tensorboard: bool = True
    """Write TensorBoard files."""
    samples_per_step: Annotated[int, Range(at_least=0)] = 4
    """Answers of each step that `samples.jsonl` gets."""
    prometheus_port: Annotated[int, Range(at_least=0, at_most=65535)] = 0
    """Port on the loopback address where Prometheus reads metrics. 0: none."""


@dataclass
class Checkpoint:
    enable: bool = True
    """Save checkpoints. Without them the trained weights are lost."""
    folder: str = "checkpoint"
    """Folder of checkpoints in `job.dump_folder`."""
    interval: Annotated[int, Range(at_least=1)] = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: Annotated[int, Range(at_least=0)] = 2
    """Checkpoints kept, 0 for all. Each has weights and AdamW state (12 bytes per parameter) and an export."""
    keep_best: Annotated[str, Needs("checkpoint.enable"), Needs("validation.enable")] = ""
    """A validation metric, such as `validation/greedy_reward`: the checkpoint with its highest value is kept too."""
    resume: Annotated[bool | Literal["auto"], Needs("checkpoint.enable")] = False
    """Continue the run in `job.dump_folder` from its newest checkpoint; `auto` begins a new run if there is none. False
    refuses a folder that holds a run."""
    load_step: Annotated[
        int,
        Range(at_least=-1, why="-1 is the newest"),
        Needs("checkpoint.resume", True, why="every start would go back to the step"),
    ] = -1
    """Step to resume from; a torn checkpoint ends the run. -1: the newest whole one."""
    stop_seconds: Annotated[float, Range(at_least=1, at_most=1e6)] = 25.0
    """Longest time from SIGTERM or Ctrl-C to the end, four fifths for the step and its checkpoint. torchrun kills after
    30 s: raise its `--shutdown-timeout` too."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints in the background, from a copy in host memory. Training waits for `async`'s copy, not for that
    of `async_with_pinned_mem`."""
    export_dtype: Literal["float32", "float16", "bfloat16", "none"] = "float32"
    """Type of the weights in the Hugging Face folder of every checkpoint: `step-N/hf`, or with `[lora]`
    `step-N/adapter`, for `peft`. `none`: no such folder."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["selective", "full", "none"] = "full"
    """Recompute activations in the backward pass. `full` needs the least memory; `selective` and `none` are faster."""
    selective_ac_option: str = "matmul"
    """What `selective` keeps: outputs of attention and of every matrix multiplication (`matmul`), or of every second
    one (`op`). A number n keeps all but each n-th block."""
    offload: Annotated[
        bool,
        Needs("activation_checkpoint.mode", "full", why='it moves the inputs of blocks, all that "full" keeps'),
    ] = False
    """Keep the inputs of blocks in pinned host memory until the backward pass, so that longer rows fit."""
    mlp_chunk_tokens: Annotated[
        int,
        Range(at_least=0),
        Needs("activation_checkpoint.mode", "full", why="the backward pass computes each chunk again by itself"),
    ] = 0
    """Feed-forward layers compute so many tokens at a time, so that longer rows fit. Backward computes them once more,
    and bfloat16 gradients are rounded more often (docs/long_context.md). 0: the whole row."""


@dataclass
class Comm:
    init_timeout_seconds: Annotated[int, Range(at_least=1, at_most=1e6)] = 1800
    """Longest wait in a collective, also while rank 0 starts servers or validates."""


@dataclass
class Debug:
    seed: Annotated[int, Range(at_least=0, below=2**32, why="NumPy takes no other")] = 42
    """Seed of weights, data order and sampling."""
    hang_seconds: Annotated[float, Range(at_least=0)] = 3600.0
    """Time without progress (a stage that begins or ends, a scored answer, a bucket of weights) until the log gets a
    report (docs/by_symptom.md). With `ray.enable` the rank then ends, and no step may take longer. 0: never."""
    hang_exit_code: Annotated[int, Range(at_least=0, at_most=255), Needs("debug.hang_seconds")] = 0
    """Exit status after that report, for a launcher that starts the run again; then set `hang_seconds` above
    `rollout.group_timeout_seconds`. 0 lets it go on."""
