"""Every TOML key that this project adds to torchtitan's, as dataclasses: name, type, default and why.

torchtitan's ConfigManager merges these into its own `JobConfig` (its `job.custom_config_module` seam): a new
section is added, a section that torchtitan has gets the extra keys. A key that torchtitan has too stands here
because its default suits pre-training and not this trainer; its docstring says why.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Model:
    name: str = ""
    """torchtitan's model, `qwen3` or `llama3`; only read with `model.flavor`. Empty: config.json names the family."""
    flavor: str = ""
    """torchtitan's preset shape. Empty: the shape is that of `model.hf_assets_path`/config.json, so any size works."""
    hf_assets_path: str = ""
    """Hugging Face folder with config.json, tokenizer and weights. Required: prompts need its tokenizer."""
    weights: Literal["hf", "random"] = "hf"
    """`hf` loads safetensors from `model.hf_assets_path`; `random` initialises from `debug.seed`."""


@dataclass
class Optimizer:
    lr: float = 1e-6
    """Learning rate. Policy-gradient steps are noisy: full fine-tuning by RL uses 1e-6, pre-training 8e-4."""
    weight_decay: float = 0.0
    """Weight decay. Pulling a trained model towards zero is not what the reward asks for."""


@dataclass
class LRScheduler:
    warmup_steps: int = 0
    """Steps of linear warm-up. torchtitan's 200 would be longer than many a run of RL."""
    decay_ratio: float = 0.0
    """Share of the steps, at the end, in which the rate decays to `min_lr_factor`. 0: constant, so a run can be
    prolonged."""


@dataclass
class Training:
    steps: int = 100
    """GRPO steps, each one batch of rollouts. RL is at work within tens of steps, so torchtitan's 10000 is no use."""
    tokens_per_microbatch: int = 0
    """Token budget of one packed forward and backward on one data-parallel rank; 0 means `training.seq_len`."""
    kept_logits_mib: int = 2048
    """Logits, in MiB of the compute dtype, that are kept from forward to backward; the others are computed again. A row
    of 16k answer tokens has 4.6 GiB of them at Qwen3's vocabulary. 0 keeps none."""
    reduce_gradients: Literal["auto", "microbatch", "step"] = "auto"
    """When sharded ranks gather parameters and reduce gradients: for every packed row, or once for the rows of an
    optimizer step, which saves traffic and the host's time, and keeps a whole model's weights and gradients on every
    rank meanwhile. `auto` is `step` for models of up to a billion parameters: at 0.6B the host bounds the step."""
    flash_attention: Literal["auto", "FA2", "FA4"] = "auto"
    """Attention kernels in bfloat16 on GPUs: torch's own (`FA2`), or those of `flash-attn-4` (`FA4`), faster on Hopper
    and Blackwell. `auto` takes `FA4` where it is installed and agrees with `FA2` in a trial at the start."""


@dataclass
class Metrics:
    log_freq: int = 1
    """Steps between points in TensorBoard and Weights & Biases. Console and `metrics.jsonl` have every step."""
    enable_tensorboard: bool = True
    """Write TensorBoard files: a reward curve is the first thing to look at."""
    samples_per_step: int = 4
    """Answers written to `samples.jsonl` at each step (0: none)."""


@dataclass
class Checkpoint:
    interval: int = 20
    """Steps between checkpoints; the last step is always saved. torchtitan's 500 is longer than many a run of RL."""
    keep_latest_k: int = 2
    """Checkpoints kept, 0 for all. Each holds weights and AdamW state (12 bytes a parameter) and an export."""
    resume: bool = False
    """Go on from the newest complete checkpoint in `job.dump_folder`/`checkpoint.folder`."""
    export_hf: bool = True
    """Write a Hugging Face folder (weights, config, tokenizer) inside every checkpoint, as `step-N/hf`."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["selective", "full", "memory_budget", "none"] = "full"
    """Recompute activations in the backward pass. `full` fits long packed rows beside a reference model and the
    snapshot; where memory allows, `selective` saves most of the second forward pass, `none` all of it."""
    selective_ac_option: str = "matmul"
    """What `selective` keeps. `matmul`: what attention and every matrix product gave, and computes the rest, which is
    cheap, again. `op`: attention and every second product. A number n: all, but of every n-th block only its input."""


@dataclass
class Comm:
    init_timeout_seconds: int = 1800
    """Longest wait in a collective. Other ranks wait in one while rank 0 starts servers or validates: torchtitan's
    300 s would end a run with long answers."""


@dataclass
class Debug:
    seed: int = 42
    """Seed of weights, data order and sampling. torchtitan picks one by chance, which no run could repeat."""


@dataclass
class Validation:
    prompts: int = 64
    """Held-out prompts asked at each validation."""
    samples_per_prompt: int = 1
    """Sampled answers per prompt for pass@k and mean reward; 1 or more. Greedy is always measured too."""
    temperature: float = 1.0
    """Temperature of the sampled validation answers."""


@dataclass
class Grpo:
    prompts_per_step: int = 32
    """Groups in one step's batch."""
    group_size: int = 8
    """Answers sampled per prompt; advantages are relative within this group."""
    minibatches: int = 1
    """Optimizer steps taken on one batch of rollouts. Over 1, old log-probabilities are computed before the first,
    unless `proximal_logprobs` is `sampler`."""
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline subtracted from a reward: the group's mean (GRPO) or the mean of the others (RLOO)."""
    advantage_std: bool = True
    """Divide by the group's standard deviation (GRPO); false is Dr. GRPO's choice."""
    zero_variance_groups: Literal["keep", "drop", "replace"] = "keep"
    """Groups whose rewards are all equal carry no signal: `keep` counts their tokens in the normaliser, `drop` does
    not, `replace` asks other prompts in their place (DAPO's dynamic sampling)."""
    replace_limit: float = 4.0
    """With `zero_variance_groups = "replace"`, the groups asked for one step are at most this many times
    `prompts_per_step`; then the step also takes groups without a signal, which train nothing."""
    oversampling: float = 0.0
    """Share of groups asked beyond `prompts_per_step`. A step takes those that are complete first; the others serve the
    next step if they are young enough, and are cancelled if not."""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Token ratio with clipping (PPO, GRPO, DAPO), sequence ratio (GSPO) or clipped weights without clipped gradients
    (CISPO)."""
    ratio_clip_min: float = 0.2
    """Lower clip: the ratio is held above 1 - ratio_clip_min. GSPO's paper takes about 3e-4 on both sides; 1.0 leaves
    the lower side open, as CISPO's does."""
    ratio_clip_max: float = 0.2
    """Upper clip: the ratio is held below 1 + ratio_clip_max. DAPO's clip-higher uses 0.28."""
    ratio_clip_c: float = 0.0
    """Dual-clip bound for negative advantages (over 1, usually 3); 0 turns it off."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over tokens (DAPO), over sequences of token means (GRPO), or the sum over a constant length (Dr. GRPO)."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference model, the model at step 0; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference)."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL enters: added to each token's loss, or its sum over the answer taken off the reward."""
    proximal_logprobs: Literal["recompute", "sampler"] = "recompute"
    """What the ratio is clipped against: `recompute` takes the trainer's policy at the start of the step, and
    importance weights correct from the sampler to it (decoupled PPO); `sampler` takes the sampler's probabilities."""
    importance_correction: Literal["none", "truncate", "mask"] = "truncate"
    """Correction for sampler and trainer disagreeing: truncated importance weights, or masking outside the bounds."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether the importance weight is each token's ratio or the product over the sequence."""
    importance_min: float = 0.0
    """Lower bound of the importance weight; `truncate` clamps to it, `mask` drops what is under it."""
    importance_max: float = 2.0
    """Upper bound of the importance weight; `truncate` clamps to it, `mask` drops what is over it."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus taken off the loss."""
    overlong_filter: bool = False
    """Leave answers that hit the length limit out of the loss (DAPO)."""
    overlong_buffer_tokens: int = 0
    """DAPO's soft punishment: the reward falls linearly over this many tokens before the limit; 0 turns it off."""
    overlong_penalty: float = 1.0
    """Largest reduction of the reward by `overlong_buffer_tokens`."""


@dataclass
class AsyncGrpo:
    enabled: bool = False
    """Servers go on answering while the trainer trains. What is trained on was then sampled by older weights, which
    `[grpo] importance_correction` makes up for."""
    max_trajectory_age_steps: int = 1
    """The trainer at version t trains on no token that was sampled by weights older than version t less this."""
    run_ahead: Literal["auto", "full"] = "auto"
    """How far ahead of the trainer groups are asked within that bound: `auto` as far as keeps the trainer from waiting,
    so that answers are no older than need be; `full` as far as the bound allows."""
    in_flight_weight_updates: bool = True
    """Servers take new weights in the middle of answers, whose later tokens then come from newer weights. False has
    each server finish its running answers first, and idle until the longest one is done."""
    recompute_kv_cache_after_weight_updates: bool = True
    """Compute the keys and values of running answers anew under new weights. False keeps those of the old weights,
    which is faster; the sampler's log-probabilities then are those of no single version."""
    late_groups: Literal["wait", "drop"] = "wait"
    """At a step, groups that are not complete and would be too old for the next one: `wait` for them, or `drop` them,
    which favours short answers."""
    order_window: int = 0
    """A step takes complete groups out of this many oldest ones, so that short answers do not crowd out long ones. 0 is
    `[grpo] prompts_per_step` times `max_trajectory_age_steps` + 1, as many as can be under way: a step then waits for
    long answers only when they would become too old. `prompts_per_step` keeps the order of the data."""


@dataclass
class Rollout:
    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Who samples: a server of our own, spawned with the run, or running vLLM or SGLang servers."""
    urls: list[str] = field(default_factory=list)
    """Base addresses of the servers, one per replica. Empty with `embedded`: one is spawned."""
    urls_file: str = ""
    """Text file with one base address a line, in place of `urls`. It is read again when it changes: servers join and
    leave a run under way."""
    min_servers: int = 1
    """The run stops when fewer servers than this are left. The others are tried again and again until they are back."""
    api_key_env: str = ""
    """Name of the environment variable that holds the servers' API key; the key itself is never written or logged."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probabilities use the same."""
    max_answer_tokens: int = 512
    """Longest answer."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer besides the model's own end tokens."""
    environment: str = ""
    """Rollouts of several turns: `module:function` of an `async def rollout(client, prompt)` that returns samples.
    Empty: each prompt is answered once."""
    seeded_requests: Literal["auto", "always", "never"] = "auto"
    """Give each request a seed of its own, from `debug.seed`, so that a run's answers repeat. vLLM is slower then: it
    draws for one sequence after the other. `auto` does so but for vLLM and SGLang with `[async_grpo]`, where arrival
    times decide anyway."""
    max_concurrent_requests: int = 256
    """Requests in flight at one server; each asks for one prompt's whole group, or for what an environment asks. On
    average a third of a large group is running until its longest answer has ended: let servers queue a few times what
    they run at once."""
    request_timeout_seconds: float = 600.0
    """Longest wait for one request."""
    group_timeout_seconds: float = 1200.0
    """Longest time for one group, from its first request to its rewards. Then it is given up, counted, and another
    prompt is asked in its place; a held-out prompt that takes longer ends the run."""
    start_timeout_seconds: float = 300.0
    """Longest wait for a server to be healthy at the start."""
    max_logprob_mismatch: float = 0.2
    """In the first step, before the optimizer's, mean |trainer - sampler| log-probability of the trained tokens above
    this stops the run: the server's logprobs mode, model or weights are not what the trainer takes them for."""
    embedded_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the spawned server runs; `auto` is the trainer's device type. On CUDA: a GPU left over, else rank 0's."""
    embedded_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the spawned server; `auto` is float32 on CPU and bfloat16 on CUDA."""
    embedded_max_sequences: int = 1024
    """Sequences the spawned server decodes at once."""


@dataclass
class WeightSync:
    transport: Literal["auto", "nccl", "gloo", "disk"] = "auto"
    """Process-group backend towards the servers; `auto` is nccl on CUDA, gloo on CPU or to a spawned server on the same
    GPU; for servers of `urls` that share the trainer's GPU set `gloo`.
    `disk` is for servers that can join no group with the trainer: they read each version from `disk_folder`."""
    disk_folder: str = ""
    """With `transport = "disk"`, the folder for the newest version, at the same path for trainer and servers; empty is
    a folder of its own in /dev/shm, for servers on the same machine. Old versions are removed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the published weights; `auto` is what the servers compute in: bfloat16 on CUDA, float32 on CPU."""
    async_weight_update: bool = False
    """Send weights in the background: a publish copies the shards and returns, and the servers get them while the
    trainer goes on. False waits in each step until every server has acknowledged."""
    cadence: Literal["every", "auto"] = "every"
    """With `async_weight_update`, which versions are sent: `every` one (the newest, if several came during a push), or
    `auto`, as few as staleness allows while an update stops the servers for more than a twentieth of the time."""
    straggler_seconds: float = 1.0
    """How long a server may keep the other servers waiting in a push. Then it is dropped from the push and from
    traffic, and fed alone from a copy in host memory."""
    num_buffers: int = 2
    """Buckets in flight at once."""
    buffer_memory_ratio: float = 0.05
    """Share of the device's memory that the buckets in flight may take; with several trainer ranks rank 0 gathers into
    one more."""
    bucket_mib_max: int = 1024
    """Cap on one bucket, in MiB. A tensor larger than this gets a bucket of its own."""
    timeout_seconds: float = 300.0
    """Longest wait for any one phase of a publish; the error names server, phase, version and bytes."""
    verify: bool = True
    """Checksum every bucket at both ends and refuse an update that differs."""


@dataclass
class Offload:
    offload_optimizer_states_for_logprob: bool = False
    """While old and reference log-probabilities are computed, keep the optimizer state in pinned host memory. It comes
    back behind the forward and backward passes; the device memory that it frees is for longer rows in that window."""
    optimizer_states: Literal["device", "host"] = "device"
    """Where the optimizer state lives. `host`: in pinned host memory for good; a step streams it through the device in
    parts, which takes 8 bytes each way per parameter held in float32."""
    reference_weights: Literal["device", "host"] = "device"
    """Where the reference model's weights are between uses. `host`: in pinned host memory; each step brings them in."""


@dataclass
class Data:
    source: Literal["arithmetic", "jsonl", "hf", "reasoning_gym"] = "arithmetic"
    """Built-in sums, a JSONL file, a local Hugging Face dataset folder, or reasoning-gym tasks by name."""
    path: str = ""
    """JSONL file or dataset folder."""
    subset: str = ""
    """Configuration name of a Hugging Face dataset (GSM8K: `main`)."""
    split: str = "train"
    """Split that prompts come from."""
    validation_path: str = ""
    """Held-out JSONL file or folder; empty: `validation_split`, else rows taken from the end of the training data."""
    validation_split: str = ""
    """Held-out split of the same dataset."""
    prompt_column: str = "question"
    """Column with the question: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the reference answer."""
    answer_pattern: str = ""
    """Regular expression whose group is the answer within `answer_column` (GSM8K: `#### (.+)`); empty: the whole."""
    system_prompt: str = ""
    """System message put before each question."""
    prompt_template: str = "{prompt}"
    """Text around the question; `{prompt}` stands for it."""
    chat_template: bool = True
    """Render through the tokenizer's chat template; false sends the text as it is."""
    shuffle: bool = True
    """Shuffle anew each epoch, by `debug.seed`."""
    max_prompt_tokens: int = 512
    """Longest prompt."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What to do with a longer one; the number dropped is reported."""
    tasks: list[str] = field(default_factory=list)
    """reasoning-gym task names."""
    curriculum: str = ""
    """`module:function` that picks prompts by how well they go: called with a prompt and its mean reward when it was
    last asked (None: not yet), it says whether to ask it now."""
    size: int = 10000
    """Number of generated prompts (`arithmetic`, and per `reasoning_gym` task)."""
    arithmetic_max: int = 99
    """Largest operand of `arithmetic`."""
    arithmetic_operators: list[str] = field(default_factory=lambda: ["+"])
    """Operators of `arithmetic`: +, -, *."""


@dataclass
class Reward:
    functions: list[str] = field(default_factory=lambda: ["exact_match"])
    """Built-in names (exact_match, numeric_match, math_verify, reasoning_gym) or `module:function`."""
    weights: list[float] = field(default_factory=list)
    """One weight per function; empty: 1 each."""
    answer_pattern: str = ""
    """Regular expression whose last match's group is the model's final answer (e.g. `#### (.+)`); empty: the whole."""
    workers: int = 2
    """Worker processes that score answers."""
    timeout_seconds: float = 10.0
    """Longest time for one answer and one function; a score that takes longer is 0, counted and shown."""


@dataclass
class Sft:
    steps: int = 0
    """Supervised steps on prompt and reference answer before GRPO; 0: none."""
    batch_size: int = 64
    """Prompt and answer pairs per step."""
    lr: float = 1e-3
    """Learning rate of the warm start, constant; GRPO's optimizer starts fresh after it."""
    target_column: str = ""
    """Column with the text to learn; empty: `data.answer_column` whole."""


@dataclass
class JobConfig:
    """Extension merged into torchtitan's JobConfig."""

    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    validation: Validation = field(default_factory=Validation)
    grpo: Grpo = field(default_factory=Grpo)
    async_grpo: AsyncGrpo = field(default_factory=AsyncGrpo)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    offload: Offload = field(default_factory=Offload)
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    sft: Sft = field(default_factory=Sft)
