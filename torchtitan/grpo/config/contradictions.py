"""What keys must satisfy together.

Each check yields all its messages, so that a user corrects a file once. A message names the key, its value, what is
allowed and what to change.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator

from torchtitan.config import JobConfig
from torchtitan.grpo.config.batch import row_tokens
from torchtitan.grpo.config.job_config import Data, HeldOutSet
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.keys import LARGEST, keys, label, show
from torchtitan.grpo.config.tables import titled_tables, training_sources
from torchtitan.grpo.config.urls import url_problem
from torchtitan.grpo.errors import did_you_mean
from torchtitan.grpo.server_commands import OWN_FLAGS

BUILT_IN = ("exact_match", "numeric_match", "math_verify", "reasoning_gym")
"""Reward functions without a module: those of `rewards/functions.py`."""
_INSTEAD = {
    "api-key": "ps shows it to everyone; name its variable in [rollout] api_key_env",
    **dict.fromkeys(("tensor-parallel", "tp", "-tp"), "set [rollout] gpus_per_server"),
}
"""What to write in place of a server's flag."""
_STOP_STRINGS_MAX = 32
"""SGLang takes no more for one request."""


def check_contradictions(config: JobConfig, job: Job = "grpo") -> list[str]:
    """Check the keys against one another. Each value is of its type and in its range already."""
    of_both = (
        _check_batch,
        _check_offload,
        _check_torchtitan,
        _check_checkpoint,
        _check_data,
        _check_tables,
        _check_ray,
    )
    of_grpo = (
        _check_lengths,
        _check_losses,
        _check_servers,
        _check_weight_sync,
        _check_async,
        _check_reward,
        _check_warm_start,
    )
    checks = (*of_both, *((_check_sft,) if job == "sft" else of_grpo))
    return list(dict.fromkeys(message for check in checks for message in check(config)))


def _check_batch(config: JobConfig) -> Iterator[str]:
    grpo, training = config.grpo, config.training
    if grpo.prompts_per_step % grpo.minibatches:
        yield (
            f"[grpo] minibatches = {grpo.minibatches} does not divide [grpo] prompts_per_step = "
            f"{grpo.prompts_per_step}: each optimizer step takes the same number of groups, so set minibatches = "
            f"{_nearest_divisor(grpo.prompts_per_step, grpo.minibatches)}, or change prompts_per_step"
        )
    if 0 < training.tokens_per_microbatch < training.seq_len:
        yield (
            f"[training] tokens_per_microbatch = {training.tokens_per_microbatch} is under [training] seq_len = "
            f"{training.seq_len}: the longest sample must fit one microbatch, so raise it, or set 0 for seq_len"
        )
    row, tensor = row_tokens(config), config.parallelism.tensor_parallel_degree
    if row % tensor:
        key = "tokens_per_microbatch" if training.tokens_per_microbatch else "seq_len"
        yield (
            f"[training] {key} = {row} is not a multiple of [parallelism] tensor_parallel_degree = {tensor}: those "
            f"ranks split each packed row evenly, so set {-(-row // tensor) * tensor}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min([*small, *(number // d for d in small)], key=lambda divisor: abs(divisor - wanted))


def _check_lengths(config: JobConfig) -> Iterator[str]:
    prompt, answer, longest = config.data.max_prompt_tokens, config.rollout.max_answer_tokens, config.training.seq_len
    if prompt + answer > longest:
        yield (
            f"[training] seq_len = {longest} is under [data] max_prompt_tokens + [rollout] max_answer_tokens = "
            f"{prompt} + {answer} = {prompt + answer}: raise it, or lower one of the two"
        )
    if config.grpo.overlong_buffer_tokens >= answer:
        yield (
            f"[grpo] overlong_buffer_tokens = {config.grpo.overlong_buffer_tokens} must be under [rollout] "
            f"max_answer_tokens = {answer}: the reward falls over that many tokens before the limit"
        )


def _check_losses(config: JobConfig) -> Iterator[str]:
    grpo = config.grpo
    if 0 < grpo.ratio_clip_c <= 1:
        yield f"[grpo] ratio_clip_c = {grpo.ratio_clip_c} must be 0 (off) or over 1, usually 3"
    elif 0 < grpo.ratio_clip_c <= 1 + grpo.ratio_clip_max:
        yield (
            f"[grpo] ratio_clip_c = {grpo.ratio_clip_c} must be over 1 + [grpo] ratio_clip_max = "
            f"{1 + grpo.ratio_clip_max:g}: it bounds ratios that the upper clip does not; usually 3"
        )
    if grpo.ratio_clip_c and grpo.policy_loss != "ppo":
        yield (
            f'[grpo] ratio_clip_c = {grpo.ratio_clip_c} applies to policy_loss = "ppo" only, not '
            f"{show(grpo.policy_loss)}: set it to 0"
        )
    if grpo.kl_coef and grpo.kl_estimator == "k1" and grpo.kl_placement == "loss":
        yield (
            '[grpo] kl_estimator = "k1" with kl_placement = "loss" has an expected gradient of zero, so it has no '
            'effect: use kl_placement = "reward", or k2 or k3'
        )
    if not grpo.kl_coef:
        for name in ("kl_estimator", "kl_placement"):
            value = getattr(grpo, name)
            if value != keys()[f"grpo.{name}"].default:
                yield f"[grpo] {name} = {show(value)} is read with kl_coef over 0 only: set that, or leave it out"
    if grpo.importance_correction != "none" and not grpo.importance_min <= 1 <= grpo.importance_max:
        yield (
            f"[grpo] importance_min = {grpo.importance_min} and [grpo] importance_max = {grpo.importance_max} must "
            "have 1 between them: it is the weight of a token on which sampler and trainer agree"
        )
    if grpo.proximal_logprobs == "sampler" and grpo.importance_correction != "none":
        yield (
            '[grpo] proximal_logprobs = "sampler" with importance_correction = '
            f"{show(grpo.importance_correction)} would correct twice: the ratio holds the sampler already, so set "
            'importance_correction = "none"'
        )
    if grpo.replace_limit != keys()["grpo.replace_limit"].default and grpo.zero_variance_groups != "replace":
        yield f'[grpo] replace_limit = {grpo.replace_limit:g} is read with zero_variance_groups = "replace" only'
    if grpo.importance_min > grpo.importance_max:
        yield f"[grpo] importance_min = {grpo.importance_min} is over [grpo] importance_max = {grpo.importance_max}"


def _check_offload(config: JobConfig) -> Iterator[str]:
    offload, grpo = config.offload, config.grpo
    window = "[offload] offload_optimizer_states_for_logprob = true"
    if offload.offload_optimizer_states_for_logprob and offload.optimizer_states == "host":
        yield f'{window} with optimizer_states = "host": the state is on the host already, so leave one of them out'
    if offload.offload_optimizer_states_for_logprob and not (
        grpo.kl_coef or (grpo.minibatches > 1 and grpo.proximal_logprobs == "recompute")
    ):
        yield (
            f"{window} has no window: without [grpo] kl_coef, and with one minibatch or proximal_logprobs = "
            '"sampler", no log-probabilities are computed before the update; leave it out, or use '
            '[offload] optimizer_states = "host"'
        )
    if offload.reference_weights == "host" and not grpo.kl_coef:
        yield '[offload] reference_weights = "host" needs a reference: set [grpo] kl_coef over 0, or leave it out'


def _check_torchtitan(config: JobConfig) -> Iterator[str]:
    if not config.model.hf_assets_path:
        yield "[model] hf_assets_path is missing: give the Hugging Face folder with config.json, tokenizer and weights"
    if config.model.hf_assets_path.endswith("tokenizer.model"):
        yield f"[model] hf_assets_path = {show(config.model.hf_assets_path)} is a file: give the folder that holds it"
    if config.model.flavor and not config.model.name:
        yield f'[model] flavor = {show(config.model.flavor)} needs [model] name, its family, as in "qwen3"'
    if config.optimizer.name not in ("Adam", "AdamW"):
        yield f"[optimizer] name = {show(config.optimizer.name)} must be AdamW or Adam"
    if config.training.flash_attention == "FA4" and config.training.mixed_precision_param == "float32":
        yield (
            '[training] flash_attention = "FA4" computes in bfloat16, and mixed_precision_param is "float32": set '
            'mixed_precision_param = "bfloat16", or flash_attention = "auto"'
        )
    shard = config.parallelism.data_parallel_shard_degree
    if shard != -1 and shard < 1:
        yield f"[parallelism] data_parallel_shard_degree = {shard} must be at least 1, or -1 for all remaining ranks"
    option = config.activation_checkpoint.selective_ac_option
    if option not in ("op", "matmul") and not re.fullmatch("[1-9][0-9]{0,8}", option):
        yield (
            f'[activation_checkpoint] selective_ac_option = {show(option)} must be "matmul", "op" or a layer interval '
            'like "2"'
        )
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable:
        yield '[activation_checkpoint] mode = "memory_budget" needs [compile] enable = true'


def _check_checkpoint(config: JobConfig) -> Iterator[str]:
    checkpoint, validation = config.checkpoint, config.validation
    for name in ("resume", "keep_best"):
        value = getattr(checkpoint, name)
        if value and not checkpoint.enable:
            yield f"[checkpoint] {name} = {show(value)} needs [checkpoint] enable = true"
    if checkpoint.load_step >= 0 and checkpoint.resume is not True:
        again = ", since every start would go back to it" if checkpoint.resume == "auto" else ""
        yield f"[checkpoint] load_step = {checkpoint.load_step} is read with [checkpoint] resume = true only{again}"
    if not checkpoint.keep_best:
        return
    best = f"[checkpoint] keep_best = {show(checkpoint.keep_best)}"
    if not checkpoint.keep_best.startswith("validation/"):
        yield f'{best} must be a metric of validation, as in "validation/greedy_reward"'
    if not validation.enable:
        yield f"{best} needs [validation] enable = true"
    elif checkpoint.interval % validation.freq:
        yield (
            f"{best} compares checkpoints by their validation: set [checkpoint] interval = {checkpoint.interval} to a "
            f"multiple of [validation] freq = {validation.freq}"
        )


def _check_servers(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine != "embedded" and not (rollout.urls or rollout.urls_file or rollout.replicas):
        yield (
            f'[rollout] urls is empty: engine = "{rollout.engine}" needs the addresses of running servers, as in '
            '["http://host:8000"], or replicas = 1, which starts one'
        )
    yield from _check_replicas(config)
    if rollout.urls and rollout.urls_file:
        yield "[rollout] urls and [rollout] urls_file are both set: keep the addresses in one of them"
    if rollout.urls_file and not os.path.isfile(rollout.urls_file):
        yield f"[rollout] urls_file = {show(rollout.urls_file)} does not exist: write one base address a line into it"
    servers = rollout.replicas or max(1, len(rollout.urls))
    if rollout.min_servers > servers and not rollout.urls_file:
        more = "raise [rollout] replicas" if rollout.replicas else "add servers to [rollout] urls"
        yield (
            f"[rollout] min_servers = {rollout.min_servers} is over the number of servers, {servers}: lower it, or "
            f"{more}"
        )
    if rollout.group_timeout_seconds < rollout.request_timeout_seconds:
        yield (
            f"[rollout] group_timeout_seconds = {rollout.group_timeout_seconds:g} is under [rollout] "
            f"request_timeout_seconds = {rollout.request_timeout_seconds:g}: a group takes one request or more, so "
            "raise the first or lower the second"
        )
    for url, times in Counter(rollout.urls).items():
        if times > 1:
            yield f"[rollout] urls has {show(url)} {times} times: one address per server"
    for entry, url in enumerate(rollout.urls):
        if problem := url_problem(url):
            yield f"[rollout] urls, entry {entry}: {problem}"
    for token, times in Counter(rollout.stop_token_ids).items():
        if not 0 <= token < 2**31 or times > 1:
            wrong = f" {times} times" if times > 1 else ": ids are 0 or more, and under 2**31"
            yield f"[rollout] stop_token_ids has {show(token)}{wrong}"
    for text, times in Counter(rollout.stop).items():
        if not text or times > 1:
            yield f"[rollout] stop has {show(text)}{f' {times} times' if text else ', which is in every answer'}"
    if len(rollout.stop) > _STOP_STRINGS_MAX:
        yield f"[rollout] stop has {len(rollout.stop)} texts: servers take {_STOP_STRINGS_MAX} at most"
    yield from _check_function("rollout.environment", rollout.environment)


def _check_replicas(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.replicas:
        for name in ("gpus_per_server", "server_python", "server_flags"):
            value = getattr(rollout, name)
            if value != keys()[f"rollout.{name}"].default:
                yield f"[rollout] {name} = {show(value)} is read with [rollout] replicas over 0 only"
        return
    for name in ("urls", "urls_file"):
        if getattr(rollout, name):
            yield (
                f"[rollout] replicas = {rollout.replicas} and [rollout] {name} are both set: the run starts its own "
                "servers, or uses running ones"
            )
    if rollout.engine == "embedded":
        for name in ("gpus_per_server", "server_python"):
            value = getattr(rollout, name)
            if value != keys()[f"rollout.{name}"].default:
                yield (
                    f"[rollout] {name} = {show(value)} is for vllm and sglang: an embedded server runs on one device, "
                    "in the trainer's Python"
                )
    own = OWN_FLAGS.get(rollout.engine, ("--model", "--host", "--port", "--device", "--parent-pid", "--expose"))
    for flag in rollout.server_flags:
        name = flag.partition("=")[0]
        if name in own:
            instead = _INSTEAD.get(name.removeprefix("--").removesuffix("-size"), "leave it out: the run sets it")
            yield f"[rollout] server_flags has {show(name)}: {instead}"


def _check_weight_sync(config: JobConfig) -> Iterator[str]:
    sync = config.weight_sync
    if sync.disk_folder and sync.transport != "disk":
        yield (
            f'[weight_sync] disk_folder = {show(sync.disk_folder)} is read with transport = "disk" only: set that, or '
            "leave it out"
        )
    if sync.disk_folder and os.path.exists(sync.disk_folder) and not os.path.isdir(sync.disk_folder):
        yield f"[weight_sync] disk_folder = {show(sync.disk_folder)} is a file: name a folder"
    if sync.cadence == "auto" and not sync.async_weight_update:
        yield '[weight_sync] cadence = "auto" needs async_weight_update = true: sync mode sends every version'


def _check_async(config: JobConfig) -> Iterator[str]:
    ahead, prompts = config.async_grpo, config.grpo.prompts_per_step
    if not ahead.enabled:
        for name in ("max_trajectory_age_steps", "run_ahead", "late_groups", "order_window"):
            value = getattr(ahead, name)
            if value != keys()[f"async_grpo.{name}"].default:
                yield f"[async_grpo] {name} = {show(value)} is read with [async_grpo] enabled = true only"
    if ahead.max_trajectory_age_steps > 1 and not ahead.in_flight_weight_updates:
        yield (
            f"[async_grpo] max_trajectory_age_steps = {ahead.max_trajectory_age_steps} needs in_flight_weight_updates "
            "= true: without it every update waits for running answers, so a higher age only ages them; set "
            "in_flight_weight_updates = true, or max_trajectory_age_steps = 1"
        )
    if not (ahead.recompute_kv_cache_after_weight_updates or ahead.in_flight_weight_updates):
        yield (
            "[async_grpo] recompute_kv_cache_after_weight_updates = false needs in_flight_weight_updates = true: "
            "without it no answer is running when weights change"
        )
    if 0 < ahead.order_window < prompts:
        yield (
            f"[async_grpo] order_window = {ahead.order_window} is under [grpo] prompts_per_step = {prompts}: a step "
            "takes that many groups from it, so raise it, or set 0 for as many as the age allows"
        )


def _check_data(config: JobConfig) -> Iterator[str]:
    if not config.data.mixture:
        yield from _check_rows(config.data)
    yield from _check_function("data.curriculum", config.data.curriculum)


def _check_tables(config: JobConfig) -> Iterator[str]:
    """`[[data.mixture]]` and `[[validation.sets]]`."""
    times = Counter((type(table), table.name) for _, table in titled_tables(config))
    named = sorted(source.name for source in config.data.mixture)
    for title, table in titled_tables(config):
        held_out = isinstance(table, HeldOutSet)
        if not table.name:
            yield f"{title} has no name: give one, for metrics"
        elif not re.fullmatch(r"[\w.-]+", table.name, re.ASCII):
            yield f"{title} name: it becomes part of metrics' names, so write letters, digits, _, - and . only"
        elif (count := times[type(table), table.name]) > 1:
            yield f"{title} is there {count} times: give each table a name of its own"
        if unknown := [name for name in table.functions if name not in config.reward.functions]:
            yield (
                f"{title} functions has {show(unknown[0])}, which is not in [reward] functions"
                f"{did_you_mean(unknown[0], config.reward.functions)}: list it there, with its weight if there are any"
            )
        if held_out and named and table.name not in named and not table.own_rows:
            yield (
                f"{title} has neither rows of its own nor the name of a [[data.mixture]] source: give source and path, "
                f"or one of the names {named}"
            )
        if not held_out and table.data.max_prompt_tokens > config.data.max_prompt_tokens:
            yield (
                f"{title} max_prompt_tokens = {table.data.max_prompt_tokens} is over [data] max_prompt_tokens = "
                f"{config.data.max_prompt_tokens}, which is that of the longest source: raise that one"
            )
        if not held_out or any(f"data.{name}" in keys() for name in table.given):
            yield from (message.replace("[data]", title) for message in _check_rows(table.data))


def _check_rows(data: Data) -> Iterator[str]:
    """The keys of one source, as [data] has them."""
    readers = {
        "path": ("jsonl", "hf"),
        "subset": ("hf",),
        "validation_path": ("jsonl", "hf"),
        "validation_split": ("hf",),
        "messages_column": ("jsonl", "hf"),
        "tools_column": ("jsonl", "hf"),
        "tasks": ("reasoning_gym",),
    }
    for name, sources in readers.items():
        value = getattr(data, name)
        if value and data.source not in sources:
            wanted = " or ".join(show(source) for source in sources)
            yield (
                f"[data] {name} = {show(value)} is not read with source = {show(data.source)}: set source = {wanted}, "
                "or leave it out"
            )
    if data.source in ("jsonl", "hf") and not data.path:
        what = "a file" if data.source == "jsonl" else "a folder"
        yield f"[data] path is missing: source = {show(data.source)} needs {what}"
    if data.source == "reasoning_gym" and not data.tasks:
        yield '[data] tasks is empty: source = "reasoning_gym" needs task names, as in ["basic_arithmetic"]'
    for task, times in Counter(data.tasks).items():
        if times > 1:
            yield f"[data] tasks has {show(task)} {times} times"
    if data.source in ("jsonl", "hf") and not data.prompt_column:
        yield "[data] prompt_column is empty: name the column with the question"
    if data.source == "hf" and not data.split:
        yield '[data] split is empty: name one, usually "train"'
    if "{prompt}" not in data.prompt_template:
        yield f"[data] prompt_template = {show(data.prompt_template)} lacks {{prompt}}, which stands for the question"
    if data.system_prompt and not data.chat_template:
        yield "[data] system_prompt needs chat_template = true: without it, put the text into prompt_template"
    if data.chat_template_file and not data.chat_template:
        yield f"[data] chat_template_file = {show(data.chat_template_file)} is read with chat_template = true only"
    if data.chat_template_file and not os.path.isfile(data.chat_template_file):
        yield f"[data] chat_template_file = {show(data.chat_template_file)} is no file: give a Jinja template"
    if data.source == "arithmetic":
        unknown = [operator for operator in data.arithmetic_operators if operator not in ("+", "-", "*")]
        if unknown or not data.arithmetic_operators:
            yield f'[data] arithmetic_operators = {show(data.arithmetic_operators)} must hold some of "+", "-", "*"'
    yield from _check_pattern("data.answer_pattern", data.answer_pattern)
    training = (data.path, data.split)
    held_out = (data.validation_path or data.path, data.validation_split or data.split)
    named = data.source in ("jsonl", "hf") and (data.validation_path or data.validation_split)
    if named and held_out == training:
        yield (
            "[data] validation_path and validation_split name the same rows as [data] "
            f"path = {show(data.path)}, split = {show(data.split)}: change them, or leave them out to hold out the "
            "last rows"
        )


def _check_reward(config: JobConfig) -> Iterator[str]:
    reward = config.reward
    if not reward.functions:
        yield '[reward] functions is empty: name at least one, as in ["exact_match"]'
    for function, times in Counter(reward.functions).items():
        if times > 1:
            yield f"[reward] functions has {show(function)} {times} times: give it a weight instead"
        if ":" in function:
            yield from _check_function("reward.functions", function)
        elif function not in BUILT_IN:
            yield (
                f"[reward] functions: there is no built-in {show(function)}{did_you_mean(function, BUILT_IN)}. Choose "
                f'from {list(BUILT_IN)} or name a function of your own as "module:function"'
            )
    if reward.weights and len(reward.weights) != len(reward.functions):
        yield (
            f"[reward] weights has {len(reward.weights)} entries for {len(reward.functions)} [reward] functions: "
            "give one for each, or leave it out for 1 each"
        )
    if reward.weights and not any(reward.weights):
        yield "[reward] weights are all 0: every reward would be 0"
    if any(abs(weight) > LARGEST for weight in reward.weights):
        yield f"[reward] weights = {show(reward.weights)} must be at most {LARGEST} in size, as every number"
    for title, functions, data in _scored(config):
        own = "" if title == "[data]" else f", or name others in {title} functions"
        if "reasoning_gym" in functions and data.source != "reasoning_gym":
            yield (
                f'[reward] functions has "reasoning_gym", which scores tasks of {title} source = "reasoning_gym", not '
                f"{show(data.source)}: leave it out{own}"
            )
        compared = {"exact_match", "numeric_match", "math_verify"} & set(functions)
        if compared and data.source in ("jsonl", "hf") and not data.answer_column:
            names = ", ".join(sorted(compared))
            yield f"{title} answer_column is empty, but [reward] functions {names} compare with it: name it{own}"
    if reward.answer_pattern and reward.functions and all(":" in function for function in reward.functions):
        yield (
            f"[reward] answer_pattern = {show(reward.answer_pattern)} is read by built-in functions only, and "
            "[reward] functions has none: leave it out (a function of your own gets the whole answer)"
        )
    yield from _check_pattern("reward.answer_pattern", reward.answer_pattern)


def _check_warm_start(config: JobConfig) -> Iterator[str]:
    for source in training_sources(config):
        data = source.data
        if config.sft.steps and data.source in ("jsonl", "hf") and not (config.sft.target_column or data.answer_column):
            yield "[sft] target_column is missing: name the column to learn, or set [data] answer_column"
            break


def _check_sft(config: JobConfig) -> Iterator[str]:
    """What `sft_train.py` learns, and from which columns."""
    tables = [("[data]", config.data)] if not config.data.mixture else []
    tables += [(title, table.data) for title, table in titled_tables(config)]
    for title, data in tables:
        if data.messages_column and not data.chat_template:
            yield (
                f"{title} messages_column = {show(data.messages_column)} needs chat_template = true: a conversation is "
                "rendered by it"
            )
        if data.messages_column and data.prompt_template != keys()["data.prompt_template"].default:
            yield (
                f"{title} prompt_template = {show(data.prompt_template)} goes around the question of prompt_column; "
                "with messages_column leave it out"
            )
        if data.tools_column and not data.messages_column:
            yield f"{title} tools_column = {show(data.tools_column)} is read with messages_column only"
        learned = data.messages_column or config.sft.target_column or data.answer_column
        if data.source in ("jsonl", "hf") and not learned:
            yield (
                f"{title}: there is no column to learn: set messages_column, or [sft] target_column or [data] "
                "answer_column"
            )
    if config.sft.train_on != "all" and not any(data.messages_column for _, data in tables):
        yield f"[sft] train_on = {show(config.sft.train_on)} is read with [data] messages_column only"
    if config.checkpoint.keep_best.endswith("loss"):
        yield (
            f"[checkpoint] keep_best = {show(config.checkpoint.keep_best)} would keep the highest loss: use "
            '"validation/token_accuracy"'
        )


def _scored(config: JobConfig) -> Iterator[tuple[str, list[str], Data]]:
    """For [data] or each table: its name in messages, the functions that score its rows, and its rows' keys.

    Not where each row names its functions.
    """
    if not config.data.mixture and not config.data.reward_column:
        yield "[data]", config.reward.functions, config.data
    for title, table in titled_tables(config):
        if not table.data.reward_column:
            yield title, table.functions or config.reward.functions, table.data


def _check_pattern(path: str, pattern: str) -> Iterator[str]:
    if not pattern:
        return
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        yield f"{label(path)} = {show(pattern)} is no regular expression: {error}"
        return
    if groups != 1:
        yield (
            f"{label(path)} = {show(pattern)} has {groups} groups and needs one: put ( ) around the answer, and write "
            "other brackets as (?: ) or \\( \\)"
        )


def _check_function(path: str, name: str) -> Iterator[str]:
    """An import path must look like one. Whether the function exists is known when it is imported."""
    module, colon, function = name.partition(":")
    if name and not (colon and all(part.isidentifier() for part in [*module.split("."), function])):
        yield f'{label(path)}: {show(name)} must be "module:function", as in "my_package.my_module:my_function"'


def _check_ray(config: JobConfig) -> Iterator[str]:
    ray = config.ray
    if ray.address.startswith("ray://"):
        yield (
            f"[ray] address = {show(ray.address)} is Ray Client's, which has no Compiled Graphs: run the script on a "
            'node of the cluster with "auto" or "host:port" (port 6379 as a rule)'
        )
    if ray.warmup_tokens and ray.dispatch != "compiled":
        yield (
            f'[ray] warmup_tokens = {ray.warmup_tokens} is read with dispatch = "compiled" only, not '
            f"{show(ray.dispatch)}: leave it out"
        )
    if ray.warmup_tokens > row_tokens(config):
        yield (
            f"[ray] warmup_tokens = {ray.warmup_tokens} is over the longest packed row, {row_tokens(config)} tokens "
            "([training] tokens_per_microbatch, or seq_len): lower it, or set 0 for the longest"
        )
