"""What the keys of servers and weight sync must satisfy together."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.data_contradictions import check_function
from torchtitan.grpo.config.job_config import NO_ENVIRONMENT, Data, HeldOutSet
from torchtitan.grpo.config.keys import show
from torchtitan.grpo.config.tables import titled_tables
from torchtitan.grpo.config.urls import PORTS, is_of_another_node, url_problem
from torchtitan.grpo.process.addresses import is_loopback
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.weight_wire.transports import needs_own_gpus

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

_INSTEAD = {
    "api-key": "ps shows it to everyone; name its variable in [rollout] api_key_env",
    **dict.fromkeys(("tensor-parallel", "tp", "-tp"), "set [rollout] gpus_per_server"),
}
"""What to write in place of a server's flag."""
_SECRET = re.compile(
    r"(^|-)((api|access|auth|private|secret|admin)-?key|(hf|api|access|auth|bearer|github)-?token|client-?secret|"
    r"pass(word|wd|phrase))$",
    re.IGNORECASE,
)
"""Names of arguments and flags whose values are secrets, `_` written as `-`: no answer_key, end_token or max_tokens, no
secret or token of a game."""
_NO_SECRET = re.compile(r"none|[$A-Z_{}]*|\$?{?[A-Z][A-Z0-9]*_[A-Z0-9_]*}?")
"""Values in their place that are none: none, EMPTY, or the name of a variable."""
_STOP_STRINGS_MAX = 32
"""SGLang takes no more for one request."""
_PACKAGES = {"verifiers": "the name of a taskset", "openenv": "the address of its server"}
"""Packages of environments, and what `[rollout] environment` has behind their name."""


def check_servers(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    if not (rollout.urls or rollout.urls_file or rollout.replicas):
        yield (
            f'[rollout] urls is empty: engine = "{rollout.engine}" needs the addresses of running servers, as in '
            '["http://host:8000"], or replicas = 1, which starts one'
        )
    yield from _check_colocated(config)
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
    if rollout.top_k == 1:
        yield "[rollout] top_k = 1 gives every prompt the same answers, and nothing to learn from: set 2 or more, or 0"
    if len(rollout.stop) > _STOP_STRINGS_MAX:
        yield f"[rollout] stop has {len(rollout.stop)} texts: servers take {_STOP_STRINGS_MAX} at most"
    yield from _check_environment(config)
    yield from _check_endpoint(config)


def _check_environment(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    yield from _check_name(rollout.environment)
    yield from _check_secrets("[rollout]", rollout.environment_args)
    if not config.data.mixture:
        yield from _check_tasks("[data]", config.data, "[rollout]", rollout.environment)
    named = bool(rollout.environment)
    for title, table in titled_tables(config):
        if isinstance(table, HeldOutSet) and "environment" in table.given:
            named = named or table.environment != NO_ENVIRONMENT
            yield from _check_secrets(title, table.environment_args)
            yield from _check_own_environment(title, table)
            continue
        yield from _check_tasks(title, table.data, "[rollout]", rollout.environment)
        if isinstance(table, HeldOutSet) and (value := table.environment_args):
            yield f"{title} environment_args = {show(value)} is read with an environment of the set's own: name it"
    if not named and (value := rollout.environment_concurrency):
        yield f"[rollout] environment_concurrency = {value} is read with [rollout] environment only: leave it out"


def _check_secrets(title: str, arguments: Any) -> Iterator[str]:
    """Files and logs have an environment's arguments, at any depth."""
    if isinstance(arguments, list):
        for each in arguments:
            yield from _check_secrets(title, each)
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        yield from _check_secrets(title, value)
        if isinstance(value, str) and _is_secret(name, value):
            yield (
                f"{title} environment_args has a value for {show(name)}, which files and logs of the run would show: "
                "let its code read an environment variable, whose name may be an argument"
            )


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET.search(name.lstrip("-").replace("_", "-"))) and not _NO_SECRET.fullmatch(value)


def _check_own_environment(title: str, held_out: HeldOutSet) -> Iterator[str]:
    """The environment that a held-out set names in place of the run's."""
    name, kind = held_out.environment, held_out.environment.partition(":")[0]
    none = f'"{NO_ENVIRONMENT}" for one answer per prompt'
    if not name:
        yield f'{title} environment = "": leave it out for that of [rollout], or write {none}'
        return
    if name == NO_ENVIRONMENT:
        name = ""
    elif name == "endpoint":
        yield (
            f'{title} environment = "endpoint" is for [rollout] only: its harness plays the prompts of the whole run. '
            f"Leave it out for that of [rollout], or write {none}"
        )
    else:
        yield from (message.replace("[rollout]", title) for message in _check_name(name))
    if not name and held_out.environment_args:
        shown = show(held_out.environment_args)
        yield f'{title} environment_args = {shown} with environment = "{NO_ENVIRONMENT}": leave them out'
    if held_out.own_rows or held_out.data.source != "environment":
        yield from _check_tasks(title, held_out.data, title, name)
    elif kind in _PACKAGES:
        yield (
            f"{title} asks rows that [rollout] environment holds out, and its own environment = {show(name)} has other "
            'tasks: set source = "environment" for these'
        )


def _check_name(environment: str) -> Iterator[str]:
    kind, colon, name = environment.partition(":")
    if environment != "endpoint" and not (colon and kind in _PACKAGES):
        yield from check_function("rollout.environment", environment)
    elif colon and not name:
        yield f"[rollout] environment = {show(environment)}: put {_PACKAGES[kind]} behind the colon"
    elif kind == "openenv" and "@" in name:
        yield "[rollout] environment has a user or password in its address, which is written to files: leave it out"


def _check_tasks(title: str, data: Data, section: str, environment: str) -> Iterator[str]:
    """The rows of a table are such as the environment of this section or table can answer."""
    kind = environment.partition(":")[0]
    if kind in _PACKAGES and data.source != "environment":
        yield (
            f"{title} source = {show(data.source)} has no tasks of {kind}, which {section} environment = "
            f'{show(environment)} needs: set source = "environment"'
        )
    if not environment and data.source == "environment":
        yield f'{title} source = "environment" are the rows of {section} environment, and there is none: name one'


def _check_endpoint(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.environment == "endpoint" and not rollout.serve_port:
        yield (
            '[rollout] environment = "endpoint" is a harness that speaks to the run\'s endpoint: set serve_port, as in '
            "8100"
        )
    ports = {"[rollout] serve_port": rollout.serve_port, "[metrics] prometheus_port": config.metrics.prometheus_port}
    if rollout.serve_port and len(set(ports.values())) == 1:
        yield f"{' and '.join(ports)} are both {rollout.serve_port}: change one"
    for key, port in ports.items():
        if rollout.replicas and port in PORTS:
            yield (
                f"{key} = {port} is among the ports of the servers that the run starts, {PORTS.start} to "
                f"{PORTS.stop - 1}: set another one, or 0"
            )
    if rollout.serve_port and not is_loopback(rollout.serve_host) and not rollout.serve_key_env:
        yield (
            f"[rollout] serve_host = {show(rollout.serve_host)} is open to other machines: name the variable of an API "
            'key in serve_key_env, or set serve_host = "127.0.0.1"'
        )


def _check_colocated(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.colocate:
        return
    if rollout.sleep_while_training:
        yield from _check_sleep(config)
    one = "[rollout] colocate = true is a server on each trainer's GPU"
    if not COMMANDS[rollout.engine].maps_memory:
        yield f'{one}, and [rollout] engine = "{rollout.engine}" is not there for it: set engine = "vllm"'
    if rollout.gpus_per_server > 1:
        yield f"{one}, and [rollout] gpus_per_server = {rollout.gpus_per_server}: leave gpus_per_server out"
    if config.ray.enable:
        yield f"{one}, and [ray] enable = true places servers on GPUs of their own: leave one of them out"
    if needs_own_gpus(transport := config.weight_sync.transport):
        yield f'{one}, and [weight_sync] transport = "{transport}" cannot join two processes on one GPU: use "auto"'
    for flag in rollout.server_flags:
        if flag.partition("=")[0] in ("--gpu-memory-utilization", "--memory-share"):
            yield f"[rollout] server_flags has {show(flag)}: with colocate set [rollout] memory_share"


def _check_sleep(config: JobConfig) -> Iterator[str]:
    """A server that sleeps answers nobody, and needs all of its weights when it wakes up."""
    sleeps = "[rollout] sleep_while_training = true"
    if config.async_grpo.enabled:
        yield f"{sleeps}, and [async_grpo] enabled = true samples while the trainer trains: leave one of them out"
    if config.lora.enable:
        yield f"{sleeps} sends all weights again, and [lora] enable = true sends adapters only: leave one of them out"
    if config.rollout.serve_port:
        yield f"{sleeps}, and [rollout] serve_port is open to requests at any time: leave one of them out"


def _check_replicas(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.replicas:
        return
    for name in ("urls", "urls_file"):
        if getattr(rollout, name):
            starts = "colocate = true" if rollout.colocate else f"replicas = {rollout.replicas}"
            yield (
                f"[rollout] {starts} and [rollout] {name} are both set: the run starts its own "
                "servers, or uses running ones"
            )
    engine = COMMANDS[rollout.engine]
    for flag, behind in itertools.pairwise([*rollout.server_flags, ""]):
        name, assigned, value = flag.partition("=")
        plain = "--" + name[2:].replace("_", "-") if name.startswith("--") else name  # vLLM takes both
        if plain in engine.own_flags:
            instead = _INSTEAD.get(plain.removeprefix("--").removesuffix("-size"), "leave it out: the run sets it")
            yield f"[rollout] server_flags has {show(name)}: {instead}"
        elif name.startswith("--") and len(words := name.split(maxsplit=1)) > 1:
            shown = ", ".join(map(show, [words[0], "..."]))  # a value may be a key
            yield f"[rollout] server_flags has {show(words[0])} and its value as one word: write {shown}"
        elif flag.startswith("-") and _is_secret(name, value if assigned or behind.startswith("-") else behind):
            yield (
                f"[rollout] server_flags has {show(name)}, which ps and files of the run would show: export the "
                "variable that the engine reads, such as HF_TOKEN"
            )


def check_routing_replay(config: JobConfig) -> Iterator[str]:
    engine, recomputes = COMMANDS[config.rollout.engine], config.async_grpo.recompute_kv_cache_after_weight_updates
    if config.grpo.routing_replay and recomputes and not engine.routes_recomputed:
        yield (
            f'[grpo] routing_replay = true with [rollout] engine = "{engine.engine}": {engine.title} forgets a '
            "token's experts when it computes its keys and values again. Set [async_grpo] "
            "recompute_kv_cache_after_weight_updates = false"
        )


def check_quantization(config: JobConfig) -> Iterator[str]:
    """Servers that quantize sample from other probabilities than the trainer computes."""
    quantized, grpo = f"[rollout] quantization = {show(config.rollout.quantization)}", config.grpo
    if config.rollout.quantization == "none":
        return
    if grpo.importance_correction == "none" and grpo.proximal_logprobs != "sampler":
        yield (
            f"{quantized} samples with other probabilities than the trainer's, and [grpo] importance_correction = "
            '"none" does not correct for them: set "truncate" or "mask"'
        )
    if config.lora.enable:
        yield (
            f"{quantized} is for weights that the trainer sends, and [lora] enable = true sends adapters only: leave "
            "one of them out"
        )


def check_adapters(config: JobConfig) -> Iterator[str]:
    """An engine may read adapters from files, and compute layers that it has fused only if these have certain parts."""
    lora, sync, engine = config.lora, config.weight_sync, f'[rollout] engine = "{config.rollout.engine}"'
    known = COMMANDS[config.rollout.engine]
    if not lora.enable:
        return
    names = set(lora.target_modules)
    for needs, of in known.adapted_together:
        if names & set(of) and not names >= set(needs):
            given = ", ".join(name for name in of if name in names)
            lacks = " and ".join(f'"{name}"' for name in needs if name not in names)
            yield f"[lora] target_modules has {given}, which {engine} adapts with {lacks} only: add it"
    if not known.adapter_files:
        return
    if sync.transport not in ("auto", "disk"):
        yield (
            f"[weight_sync] transport = {show(sync.transport)} with [lora] and {engine}, which reads adapters from "
            'files: use "auto" or "disk"'
        )
    if config.ray.enable and config.ray.expose_servers and not sync.disk_folder:
        yield (
            f"[ray] expose_servers = true with [lora] and {engine}, which reads adapters from files: set [weight_sync] "
            'transport = "disk" and disk_folder to a folder that all nodes have'
        )


def check_weight_sync(config: JobConfig) -> Iterator[str]:
    sync = config.weight_sync
    if sync.transport == "ipc" and not COMMANDS[config.rollout.engine].maps_memory:
        yield (
            f'[weight_sync] transport = "ipc" is not there for [rollout] engine = "{config.rollout.engine}", which '
            'maps no memory of the trainer: use "auto" or "gloo", or engine = "vllm"'
        )
    if sync.transport == "disk" and not sync.disk_folder:
        elsewhere = [url for url in config.rollout.urls if is_of_another_node(url)]
        if config.ray.enable and config.ray.expose_servers:
            elsewhere.append("those of [ray] expose_servers")
        if elsewhere:
            yield (
                f'[weight_sync] transport = "disk" with servers on other nodes ({elsewhere[0]}): set disk_folder to a '
                "folder that they and rank 0 have at this path"
            )
    if sync.disk_folder and os.path.exists(sync.disk_folder) and not os.path.isdir(sync.disk_folder):
        yield f"[weight_sync] disk_folder = {show(sync.disk_folder)} is a file: name a folder"
