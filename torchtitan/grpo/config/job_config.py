"""Every TOML key of this project: name, type, range, default and meaning.

torchtitan's ConfigManager merges these dataclasses into its own `JobConfig` (its `job.custom_config_module` seam).
A new section is added. A section that torchtitan has gets the extra keys.

The string below a field becomes its text in docs/configuration.md and in `--help`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo.config.ranges import ImportPath, Needs, Range
from torchtitan.grpo.config.torchtitan_keys import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Debug,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Training,
)
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.sources.table import SOURCES
from torchtitan.grpo.weight_wire.transports import TRANSPORTS

ROW_KEYS = {"source", "path", "subset", "split", "source_args"}
"""Keys of [data] that say which rows there are."""
NO_ENVIRONMENT = "none"
"""The `environment` of a held-out set whose prompts get one answer, in a run that has an environment."""
TOP_K_MAX = 1024
"""vLLM and SGLang have room for the ids of 2,048 and 4,096 tokens at a position, equally likely ones included."""
_TOP_K = "servers tell the tokens that they kept, and top_k bounds how many"
_OTHER_ENGINE = Needs(
    "rollout.engine",
    *(name for name, command in COMMANDS.items() if not command.bundled),
    why="an embedded one has one device",
)
_CORRECTS = Needs("grpo.importance_correction", "truncate", "mask")
_QUANTIZES = Needs("rollout.engine", *(name for name, command in COMMANDS.items() if command.quantizes))
TEMPLATE_OWN = {"messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template"}
"""What `chat_template_kwargs` may not name: the trainer sets it."""


def _read_by(name: str) -> Needs:
    """The sources that read this key of [data]."""
    return Needs("data.source", *(source for source, row in SOURCES.items() if name in row.keys))


@dataclass
class MixtureSource:
    """A `[[data.mixture]]` table: its own keys, and any of [data] for its rows (`keys.table_keys`).

    Attributes:
        data: [data] with the table's keys in place of its own.
        given: The table as the user wrote it.
    """

    name: str = ""
    """The source's name in metrics and samples. Required."""
    weight: Annotated[float, Range(above=0, why="leave the table out for none")] = 1.0
    """Its share of the prompts, relative to the other weights."""
    functions: list[str] = field(default_factory=list)
    """Those of `[reward] functions` that score its rows. Empty: all."""
    data: "Data" = field(default_factory=lambda: Data())
    given: dict[str, Any] = field(default_factory=dict)


@dataclass
class HeldOutSet:
    """A `[[validation.sets]]` table: its own keys, and any of [data] for its rows (`keys.table_keys`).

    Attributes:
        data: The keys of the source with the set's name, else [data], with the table's keys in place of its own.
        given: The table as the user wrote it.
    """

    name: str = ""
    """Its name in metrics: that of a `[[data.mixture]]` source takes the rows that this source holds out. Required."""
    prompts: Annotated[int, Range(at_least=1, at_most=2**20)] = 0
    """Its prompts: the first of its rows, or all if there are fewer."""
    samples_per_prompt: Annotated[int, Range(at_least=1, at_most=2**16)] = 0
    """Sampled answers per prompt."""
    temperature: Annotated[float, Range(at_least=0.01, at_most=100, why="greedy answers are measured too")] = 0.0
    """Their temperature."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 0.0
    """Their top-p."""
    max_answer_tokens: Annotated[int, Range(at_least=1)] = 0
    """Longest answer; it may exceed what training samples."""
    functions: list[str] = field(default_factory=list)
    """Those of `[reward] functions` that score its answers. Empty: those of the source with its name, else all."""
    environment: str = ""
    """An environment of its own, as in [rollout] but not `endpoint`, or `none` (docs/evaluation.md)."""
    environment_args: dict = field(default_factory=dict)
    """Its arguments."""
    data: "Data" = field(default_factory=lambda: Data())
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def own_rows(self) -> bool:
        """Whether the table says where its rows are. Otherwise they are what its source holds out."""
        return bool(self.given.keys() & ROW_KEYS)

    @property
    def rows_environment(self) -> str:
        """Whose rows `source = "environment"` are: the set's name if those of its own environment, else ""."""
        return self.name if self.own_rows and self.environment else ""


@dataclass
class Validation:
    freq: Annotated[int, Range(at_least=1)] = 10
    """Steps between validations."""
    prompts: Annotated[int, Range(at_least=1, at_most=2**20)] = 64
    """Held-out prompts per validation."""
    samples_per_prompt: Annotated[int, Range(at_least=1, at_most=2**16)] = 1
    """Sampled answers per prompt, for pass@k and mean reward, besides a greedy one."""
    temperature: Annotated[float, Range(at_least=0.01, at_most=100, why="greedy answers are measured too")] = 1.0
    """Temperature of the sampled answers."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Top-p of the sampled answers."""
    sets: list[HeldOutSet] = field(default_factory=list)
    """Held-out sets, as `[[validation.sets]]` tables. Empty: one for each training source."""


@dataclass
class Grpo:
    prompts_per_step: Annotated[int, Range(at_least=1, at_most=2**20)] = 32
    """Groups in one step's batch."""
    group_size: Annotated[int, Range(at_least=2, at_most=2**16, why="an advantage compares a group's answers")] = 8
    """Answers per prompt, which advantages compare."""
    minibatches: Annotated[int, Range(at_least=1)] = 1
    """Optimizer steps per batch of rollouts. Above 1, old log-probabilities are computed first, unless
    `proximal_logprobs` is `sampler`."""
    advantage_baseline: Literal["mean", "leave_one_out"] | ImportPath = "mean"
    """What a reward is compared with: the group's mean (GRPO), that of the other answers (RLOO), or your function
    (docs/from_python.md)."""
    advantage_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO). Dr. GRPO sets false."""
    zero_variance_groups: Literal["keep", "drop", "replace"] = "keep"
    """Groups of equal rewards, after a length penalty and before any KL. `keep` counts their tokens in the loss's mean,
    `drop` leaves them out, `replace` samples other prompts (DAPO), up to four times a step's groups."""
    oversampling: Annotated[float, Range(at_least=0)] = 0.0
    """Extra groups in flight, as a share of `prompts_per_step`. A step takes the first to finish; the rest serve the
    next step if young enough, or are cancelled."""
    policy_loss: Literal["ppo", "gspo", "cispo"] | ImportPath = "ppo"
    """Clipped token ratio (PPO, GRPO, DAPO), clipped sequence ratio (GSPO), clipped weights with all gradients kept
    (CISPO), or your function (docs/from_python.md)."""
    ratio_clip_min: Annotated[float, Range(above=0, at_most=1, why="ratios are held above 1 - ratio_clip_min")] = 0.2
    """Ratios stay above 1 minus this. GSPO's paper uses about 3e-4 on both sides; 1.0 leaves this side open, as CISPO
    does."""
    ratio_clip_max: Annotated[float, Range(above=0, why="ratios are held below 1 + ratio_clip_max")] = 0.2
    """Ratios stay below 1 plus this. DAPO's clip-higher uses 0.28."""
    ratio_clip_c: Annotated[float, Range(at_least=0), Needs("grpo.policy_loss", "ppo")] = 0.0
    """Dual-clip bound for negative advantages: above 1, usually 3. 0: off."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over tokens (DAPO), mean of each sequence's mean (GRPO), or sum over a constant length (Dr. GRPO)."""
    kl_coef: Annotated[float, Range(at_least=0)] = 0.0
    """Weight of the KL divergence to the model at step 0. 0 loads no reference."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Needs("grpo.kl_coef")] = "k3"
    """Schulman's estimators of KL(policy || reference). `k3` is unbiased and never negative."""
    kl_placement: Annotated[Literal["loss", "reward"], Needs("grpo.kl_coef")] = "loss"
    """Add the KL to each token's loss, or subtract its sum over the answer from the reward."""
    proximal_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the clipped ratio: the trainer's policy at the start of the step, with importance weights for the
    sampler (decoupled PPO), or the sampler's own probabilities."""
    importance_correction: Literal["none", "truncate", "mask"] = "truncate"
    """Where the sampler's probabilities differ: truncate importance weights, or mask those out of bounds."""
    importance_level: Annotated[Literal["token", "sequence"], _CORRECTS] = "token"
    """Importance weight of a token: its own ratio, or the product over the sequence."""
    importance_min: Annotated[float, Range(at_least=0), _CORRECTS] = 0.0
    """Lower bound of the weight: `truncate` clamps to it, `mask` drops what is below."""
    importance_max: Annotated[float, Range(above=0), _CORRECTS] = 2.0
    """Upper bound of the weight, likewise."""
    score_centering: Annotated[int, Range(at_least=0, at_most=128)] = 0
    """K: take from each token's gradient its mean under the sampler, over the sampler's K likeliest tokens and all
    others as one (arXiv 2609.20807, docs/async.md). vLLM names up to 20, its `--max-logprobs`. 0: off."""
    routing_replay: bool = False
    """For mixtures of experts: train each token through the experts that the sampler chose (R3, arXiv 2510.11370).
    Servers must tell them (docs/routing_replay.md)."""
    entropy_coef: Annotated[float, Range(at_least=0)] = 0.0
    """Weight of the entropy bonus, subtracted from the loss."""
    overlong_filter: bool = False
    """Leave answers that hit the length limit out of the loss (DAPO)."""
    overlong_buffer_tokens: Annotated[int, Range(at_least=0)] = 0
    """DAPO's soft penalty: over this many tokens before the limit the reward falls linearly. 0: off."""
    overlong_penalty: Annotated[
        float, Range(at_least=0, why="it is subtracted from the reward"), Needs("grpo.overlong_buffer_tokens")
    ] = 1.0
    """Largest reduction of the reward."""


@dataclass
class AsyncGrpo:
    enabled: bool = False
    """Sample the next steps while the trainer trains, from older weights (docs/async.md)."""
    max_trajectory_age_steps: Annotated[
        int, Range(at_least=1, why="0 is what sync mode has"), Needs("async_grpo.enabled")
    ] = 1
    """Largest age of a trained token, in weight versions."""
    run_ahead: Annotated[Literal["auto", "full"], Needs("async_grpo.enabled")] = "auto"
    """How far ahead to sample. `full`: up to the age limit. `auto`: as far as keeps the trainer busy and long answers
    in time."""
    in_flight_weight_updates: Annotated[bool, Needs("async_grpo.enabled")] = True
    """Update weights in the middle of answers. False lets running answers finish first."""
    recompute_kv_cache_after_weight_updates: Annotated[
        bool,
        Needs("async_grpo.enabled"),
        Needs("async_grpo.in_flight_weight_updates", why="else no answer is running when weights change"),
    ] = False
    """Recompute keys and values of running answers after an update. Each token's log-probability is then of one
    version, but updates take longer. False keeps the old ones."""
    late_groups: Annotated[Literal["wait", "drop"], Needs("async_grpo.enabled")] = "wait"
    """Groups that would be too old for the next step. Dropping biases training toward short answers."""
    order_window: Annotated[int, Range(at_least=0), Needs("async_grpo.enabled")] = 0
    """A step takes finished groups from this many oldest. 0: all in flight; `prompts_per_step` keeps the data's
    order."""

    @property
    def max_age(self) -> int:
        """Largest age of a trained token, in weight versions behind the trainer: 0 in sync mode."""
        return self.max_trajectory_age_steps if self.enabled else 0

    @property
    def keeps_kv(self) -> bool:
        """Whether answers run on through an update with their old keys and values."""
        return self.enabled and self.in_flight_weight_updates and not self.recompute_kv_cache_after_weight_updates


@dataclass
class Rollout:
    engine: Annotated[str, tuple(COMMANDS)] = "embedded"
    """Inference server (docs/engines.md). `embedded` is a small one of this project, for CPUs."""
    replicas: Annotated[int, Range(at_least=0, at_most=256)] = 0
    """Servers that the run starts and keeps alive, instead of `urls` (docs/servers.md). 0: `urls`; with `embedded` and
    no `urls` 1."""
    colocate: bool = False
    """Start a vLLM or embedded server on the GPU of each trainer process, on one machine (docs/colocate.md)."""
    memory_share: Annotated[float, Range(above=0, below=1), Needs("rollout.colocate")] = 0.3
    """The server's share of the GPU's memory (vLLM's `--gpu-memory-utilization`). The trainer is held to the rest."""
    sleep_while_training: Annotated[bool, Needs("rollout.colocate")] = False
    """The server gives up its memory while the trainer trains. For sync runs of all weights."""
    gpus_per_server: Annotated[int, Range(at_least=1, at_most=64), Needs("rollout.replicas"), _OTHER_ENGINE] = 1
    """GPUs of each server (tensor parallelism)."""
    server_flags: Annotated[list[str], Needs("rollout.replicas")] = field(default_factory=list)
    """Further flags of the servers, one word each, as in `["--gpu-memory-utilization", "0.8"]`."""
    quantization: Annotated[Literal["none", "fp8"], _QUANTIZES] = "none"
    """`fp8`: servers hold the linear layers of each version in FP8, those of `urls` by their own flags, and the trainer
    rounds its weights likewise (docs/engines.md)."""
    urls: list[str] = field(default_factory=list)
    """Base addresses of running servers."""
    urls_file: str = ""
    """Text file with one base address per line, instead of `urls`; read again when it changes."""
    min_servers: Annotated[int, Range(at_least=1)] = 1
    """The run stops when fewer are left. Lost ones are retried until they return."""
    api_key_env: str = ""
    """Environment variable with the servers' API key, which is never written or logged (docs/engines.md)."""
    temperature: Annotated[float, Range(at_least=0.01, at_most=100, why="vLLM raises lower ones to 0.01")] = 1.0
    """Sampling temperature, also of the trainer's log-probabilities."""
    top_k: Annotated[int, Range(at_least=0, at_most=TOP_K_MAX)] = 0
    """Sample from so many of the most likely tokens, 2 or more, and train on probabilities among these (DeepSeek-V3.2,
    arXiv 2512.02556). Held-out answers have it too. Servers must tell the kept tokens: docs/engines.md. 0: all."""
    top_p: Annotated[float, Range(above=0, at_most=1), Needs("rollout.top_k", why=_TOP_K)] = 1.0
    """Top-p among the tokens of `top_k`. Held-out answers have `validation.top_p`."""
    min_p: Annotated[float, Range(at_least=0, below=1), Needs("rollout.top_k", why=_TOP_K)] = 0.0
    """Keep tokens of at least this share of the most likely one's probability, in held-out answers too."""
    max_answer_tokens: Annotated[int, Range(at_least=1)] = 512
    """Longest answer."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer, besides the model's own end tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, such as `</answer>`. The answer keeps the token that completes one."""
    record_gib: Annotated[float, Range(at_least=0, at_most=1e6)] = 0.0
    """Keep what each step is trained on (docs/replay.md), in up to this many GiB of files, oldest removed first.
    0: nothing."""
    environment: str = ""
    """Multi-turn rollouts (docs/environments.md): `verifiers:NAME`, `openenv:URL`, or your own `module:function` or
    `module:Class`. `endpoint`: a harness outside plays them. Empty: one answer per prompt."""
    environment_args: Annotated[dict, Needs("rollout.environment")] = field(default_factory=dict)
    """Arguments of `environment`."""
    environment_concurrency: Annotated[int, Range(at_least=0)] = 0
    """Groups that the environment works on at once, or samples if it plays each by itself. 0: all that are asked."""
    serve_port: Annotated[int, Range(at_least=0, at_most=65535)] = 0
    """Port of the run's OpenAI-compatible endpoint (docs/endpoint.md). 0: none."""
    serve_host: Annotated[str, Needs("rollout.serve_port")] = "127.0.0.1"
    """Address of the endpoint. Beyond this machine, as with `0.0.0.0`, it needs `serve_key_env`."""
    serve_key_env: Annotated[str, Needs("rollout.serve_port")] = ""
    """Environment variable with the API key that the endpoint asks for."""
    seeded_requests: Literal["auto", "always", "never"] = "auto"
    """Seed training requests from `debug.seed`, so that answers repeat; vLLM is slower with seeds. `auto`: not for vLLM
    and SGLang with `[async_grpo]`."""
    max_concurrent_requests: Annotated[int, Range(at_least=0)] = 0
    """Requests in flight per server, each for a group or an environment's turn. 0: 256 groups, or 512 turns
    (docs/performance.md)."""
    processes: Annotated[int, Range(at_least=0, at_most=64)] = 0
    """Processes that share rollouts (docs/processes.md). 0: one for every 32 `urls` or `replicas`."""
    request_timeout_seconds: Annotated[float, Range(above=0, at_most=1e6)] = 600.0
    """Longest wait for one request, and for a teacher's scores of a group (docs/distillation.md)."""
    group_timeout_seconds: Annotated[float, Range(above=0, at_most=1e6)] = 1200.0
    """Longest time from a group's first request to its rewards, and longest outage of an environment or of rewards. A
    late training group is replaced by another prompt; a late held-out prompt ends the run."""
    start_timeout_seconds: Annotated[float, Range(above=0, at_most=1e6)] = 300.0
    """Longest wait for a server to be healthy, at each start. With `ray.enable` also for room in the cluster."""
    max_logprob_mismatch: Annotated[float, Range(above=0)] = 0.2
    """Largest mean |trainer - sampler| log-probability of a server, over tokens of the trained version
    (docs/metrics.md). Above it the server is fed again, or the run stops if there is no other."""

    @property
    def lease_seconds(self) -> float:
        """How long an episode of a harness may be without a model call. Its third one still fits a group's limit."""
        return self.group_timeout_seconds / 4


@dataclass
class WeightSync:
    transport: Annotated[str, ("auto", *TRANSPORTS)] = "auto"
    """How weights reach the servers (docs/weight_sync.md). `auto`: nccl on CUDA; gloo on CPU or to a server on rank 0's
    GPU; ipc with `rollout.colocate`, and nccl to servers on other ranks' GPUs; disk for adapters to SGLang."""
    disk_folder: Annotated[str, Needs("weight_sync.transport", "disk")] = ""
    """Folder for the newest version, at one path for trainer and servers; runs may share it. Empty: /dev/shm, for
    servers on this machine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of published weights. `auto` is the servers' own: bfloat16 on CUDA, float32 on CPU."""
    async_weight_update: bool = False
    """Send weights in the background, from one more copy of a rank's shards (docs/weight_sync.md). False waits in each
    step for every server."""
    straggler_seconds: Annotated[float, Range(above=0, at_most=1e6)] = 1.0
    """How long one server may delay the others in a push. Then it leaves traffic, and catches up alone."""
    buffer_memory_ratio: Annotated[float, Range(above=0, at_most=1)] = 0.05
    """Share of device memory for the two buckets in flight, of a GiB each at most; a larger tensor gets one of its own.
    With several trainer ranks, rank 0 gathers into one more."""
    timeout_seconds: Annotated[float, Range(above=0, at_most=1e6)] = 300.0
    """Longest wait for one phase of a publish."""


@dataclass
class Lora:
    enable: bool = False
    """Train low-rank adapters beside frozen weights (docs/lora.md)."""
    rank: Annotated[int, Range(at_least=1, at_most=512, why="vLLM serves none above"), Needs("lora.enable")] = 16
    """Rank of each update. 16 trains about 1 % of a small model's parameters."""
    alpha: Annotated[float, Range(above=0), Needs("lora.enable")] = 32.0
    """The update is `alpha / rank` times the product of the two matrices."""
    target_modules: Annotated[list[str], Needs("lora.enable")] = field(default_factory=lambda: ["all-linear"])
    """Adapted layers by Hugging Face's names, such as `q_proj`. `all-linear`: all of the blocks."""
    merge: Annotated[
        bool,
        Needs("lora.enable"),
        Needs("checkpoint.enable"),
        Needs("checkpoint.export_dtype", "float32", "float16", "bfloat16", why="the merged model is an export"),
    ] = False
    """Also export the whole model as `step-N/hf`, with adapters merged in float32."""


@dataclass
class Offload:
    offload_optimizer_states_for_logprob: bool = False
    """Keep the optimizer state in pinned host memory during old and reference log-probabilities."""
    optimizer_states: Literal["device", "host"] = "device"
    """`host` keeps the optimizer state in pinned memory and streams it through the device each step: 8 bytes each way
    per parameter in float32."""
    reference_weights: Annotated[Literal["device", "host"], Needs("grpo.kl_coef", why="else there is no reference")] = (
        "device"
    )
    """Where the reference model waits between uses; `host` is pinned memory, copied in each step."""


@dataclass
class Data:
    source: Annotated[str, tuple(SOURCES)] = "arithmetic"
    """Where rows come from (docs/data.md)."""
    source_args: Annotated[dict, _read_by("source_args")] = field(default_factory=dict)
    """Arguments for the source (docs/data.md), as in `{ max = 39 }` for `arithmetic`."""
    path: Annotated[str, _read_by("path")] = ""
    """JSONL file, or with `source = "hf"` a dataset folder or its id on the hub: `openai/gsm8k`, or `openai/gsm8k@main`
    with a revision."""
    subset: Annotated[str, _read_by("subset")] = ""
    """Configuration name of a Hugging Face dataset (GSM8K: `main`)."""
    split: Annotated[str, _read_by("split")] = "train"
    """Split of the training prompts."""
    validation_path: Annotated[str, _read_by("validation_path")] = ""
    """Held-out JSONL file, folder or id. Empty: `validation_split`, else the last rows of the training data."""
    validation_split: Annotated[str, _read_by("validation_split")] = ""
    """Held-out split of the same dataset."""
    prompt_column: str = "question"
    """Column with the question: text, or a list of chat messages."""
    messages_column: Annotated[
        str, _read_by("messages_column"), Needs("data.chat_template", why="it renders a conversation")
    ] = ""
    """Column with whole conversations as chat messages, for `sft_train.py`. Empty: pairs of `prompt_column` and
    `sft.target_column`."""
    tools_column: Annotated[str, _read_by("tools_column"), Needs("data.messages_column")] = ""
    """Column with a conversation's tools, for the chat template: a list of JSON schemas, or its text."""
    answer_column: str = "answer"
    """Column with the reference answer."""
    answer_pattern: str = ""
    """Regular expression whose one group is the answer in `answer_column` (GSM8K: `#### (.+)`). Empty: all of it."""
    system_prompt: Annotated[str, Needs("data.chat_template", why="without it, put the text into prompt_template")] = ""
    """System message before each question."""
    prompt_template: str = "{prompt}"
    """Text around the question, which replaces `{prompt}`."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template. False sends plain text."""
    chat_template_file: Annotated[str, Needs("data.chat_template")] = ""
    """Jinja file in place of the tokenizer's chat template, in exports too."""
    chat_template_kwargs: Annotated[dict, Needs("data.chat_template")] = field(default_factory=dict)
    """What the chat template gets besides the messages. `{ enable_thinking = false }` turns off Qwen3's thinking."""
    shuffle: bool = True
    """Shuffle each epoch differently, by `debug.seed`."""
    max_prompt_tokens: Annotated[int, Range(at_least=1)] = 512
    """Longest prompt; longer rows are left out. `sft_train.py` limits prompt and answer together, by
    `training.seq_len`."""
    curriculum: str = ""
    """`module:function` that says whether to ask a prompt now. It gets the prompt and its last mean reward, or None."""
    reward_column: str = ""
    """Column that names a row's own reward functions, one or a list, all of them in `[reward] functions`."""
    mixture: list[MixtureSource] = field(default_factory=list)
    """Sources with weights, as `[[data.mixture]]` tables. Empty: [data] alone."""

    @property
    def tasks(self) -> list[str]:
        """The source's tasks if there are several, each with metrics of its own."""
        tasks = self.source_args.get("tasks")
        return [str(task) for task in tasks] if isinstance(tasks, list) and len(tasks) > 1 else []

    @property
    def question_column(self) -> str:
        """The column by which training rows and held-out rows are compared."""
        return self.messages_column or self.prompt_column


@dataclass
class Reward:
    functions: list[str] = field(default_factory=lambda: ["exact_match"])
    """Built-in names (exact_match, numeric_match, math_verify, reasoning_gym) or `module:function` (docs/rewards.md).
    Empty: `rollout.environment` gives rewards; answers with a reward from it are not scored."""
    weights: list[float] = field(default_factory=list)
    """One weight per function. Empty: 1 each."""
    answer_pattern: str = ""
    """Regular expression whose one group, in its last match, is the final answer for built-in functions (`#### (.+)`).
    Empty: the whole text."""
    workers: Annotated[int, Range(at_least=1, at_most=1024)] = 2
    """Worker processes that score answers. `exact_match` alone, without a pattern, needs none."""
    timeout_seconds: Annotated[float, Range(above=0, at_most=1e6)] = 10.0
    """Longest time for one function on one answer, after which the score has failed. A group's function has as much for
    each answer."""
    max_failed_fraction: Annotated[float, Range(at_least=0, at_most=1)] = 0.5
    """Largest share of a step's or validation's answers whose scores or environment failed, before the run ends. An
    outage may last `rollout.group_timeout_seconds` first, or one validation."""
    secrets: list[str] = field(default_factory=list)
    """Environment variables with keys that the functions need, as for an LLM judge. Others whose names hold KEY, TOKEN,
    SECRET, PASSWORD or the like are kept from worker processes."""


@dataclass
class Distill:
    teacher_urls: list[str] = field(default_factory=list)
    """Servers of a teacher that scores each sampled token (docs/distillation.md). `name=http://host:port` is for the
    `[[data.mixture]]` source of that name, others are for all further prompts. Empty: off."""
    engine: Annotated[str, tuple(COMMANDS), Needs("distill.teacher_urls")] = "embedded"
    """What the teachers' servers are. `vllm` and `sglang` need `rollout.temperature` 1; `embedded` scores at any."""
    mode: Annotated[Literal["only", "add"], Needs("distill.teacher_urls")] = "only"
    """`only`: train on the teacher's term alone; `reward.functions` may be empty. `add`: add it to the reward's
    advantage, or to the loss."""
    coef: Annotated[
        float, Range(above=0, why="leave teacher_urls out for no teacher"), Needs("distill.teacher_urls")
    ] = 1.0
    """Weight of the teacher's term: without `top_k` an advantage, the token's log-probability by the teacher less that
    by the sampler."""
    top_k: Annotated[int, Range(at_least=0, at_most=128), Needs("distill.teacher_urls")] = 0
    """0: an advantage of the sampled token. K: a loss, the forward KL divergence over the teacher's K likeliest tokens
    and all others as one. vLLM gives up to 20, its `--max-logprobs`."""
    api_key_env: Annotated[str, Needs("distill.teacher_urls")] = ""
    """Environment variable that holds the API key of the teachers' servers."""


@dataclass
class Sft:
    steps: Annotated[int, Range(at_least=0)] = 0
    """Supervised steps on prompts and reference answers before GRPO. `sft_train.py` takes `training.steps`."""
    batch_size: Annotated[int, Range(at_least=1, at_most=2**20)] = 64
    """Pairs of prompt and answer, or conversations, per step."""
    lr: Annotated[float, Range(above=0, at_most=1)] = 1e-3
    """Constant learning rate of these steps; GRPO's optimizer starts fresh. `sft_train.py` takes `optimizer.lr`."""
    target_column: str = ""
    """Column with the text to learn. Empty: all of `data.answer_column`."""
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's turns of `data.messages_column` `sft_train.py` learns."""


@dataclass
class Ray:
    enable: Annotated[bool, Needs("debug.hang_seconds", why="a rank that hangs is ended after it")] = False
    """Run every trainer process as a Ray actor: start the script once, without torchrun (docs/ray.md). Needs the `ray`
    package."""
    address: Annotated[str, Needs("ray.enable")] = ""
    """Cluster to join: `auto` or `host:port`. Empty: one on this machine's loopback address, for this run."""
    ranks: Annotated[int, Range(at_least=0, at_most=65536), Needs("ray.enable")] = 0
    """Trainer processes. 0: one for each GPU that no server of `rollout.replicas` takes. Without GPUs they train on
    CPUs."""
    cpus_per_rank: Annotated[int, Range(at_least=1, at_most=1024), Needs("ray.enable")] = 1
    """Cores that Ray reserves for each rank, and OMP_NUM_THREADS unless it is set where you start."""
    dispatch: Annotated[Literal["loop", "compiled", "remote"], Needs("ray.enable")] = "loop"
    """Who calls each step: each rank, as under torchrun (`loop`), or the driver, through one Compiled Graph on each
    node or by remote calls."""
    expose_servers: Annotated[bool, Needs("ray.enable"), Needs("rollout.replicas")] = False
    """Let servers of `rollout.replicas` be on other nodes than rank 0's, at their node's address. Whoever reaches one
    can replace its weights: name a key in `rollout.api_key_env`."""
    max_restarts: Annotated[int, Range(at_least=0, at_most=1000), Needs("ray.enable")] = 3
    """Times that a run whose rank failed, died or hung starts again from its newest checkpoint; never with
    `[checkpoint] enable = false`."""


@dataclass
class JobConfig:
    """Merged into torchtitan's JobConfig."""

    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
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
    lora: Lora = field(default_factory=Lora)
    offload: Offload = field(default_factory=Offload)
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    distill: Distill = field(default_factory=Distill)
    sft: Sft = field(default_factory=Sft)
    ray: Ray = field(default_factory=Ray)
