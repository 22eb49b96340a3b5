"""Which servers are started: the command, the GPUs and the environment of each."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from torchtitan.grpo.config.machine import shares_gpu
from torchtitan.grpo.config.tables import longest_tokens
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.server_commands.command import ALL_LINEAR, ServerCommand, ServerCommandError
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.servers.kept_server import Launch
from torchtitan.grpo.servers.ports import PORTS

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

MODEL_FOLDER = "served_model"
LOG_FOLDER = "servers"
"""In the run's folder."""
URLS_FILE = "urls.txt"
"""Beside the logs."""
_CONTROL_S = 60.0


def launches(servers: list[ServerCommand]) -> list[Launch]:
    """How a supervisor starts these servers, which are of one engine and Python.

    Raises:
        ServerCommandError: Their Python lacks the engine, or a GPU is not visible.
    """
    folder, control = servers[0].engine_folder(), ENGINES[servers[0].engine].control
    key = os.environ.get(servers[0].key_env)

    def launch(index: int, server: ServerCommand, environment: dict[str, str]) -> Launch:
        return Launch(
            str(index), lambda port: (server.argv(port, folder), environment), lambda url: control(url, key, _CONTROL_S)
        )

    return [launch(i, server, server.environment()) for i, server in enumerate(servers)]


def served_base(config: JobConfig) -> str:
    """With `[lora]`: the folder whose weights servers load, since they get adapters only. Without it: ""."""
    return config.model.hf_assets_path if config.lora.enable else ""


def reads_files(config: JobConfig) -> bool:
    """Whether servers can get this run's weights from files only."""
    return config.lora.enable and COMMANDS[config.rollout.engine].adapter_files


def planned_servers(config: JobConfig, gpus: int, trainers_here: int, model: str = "") -> list[ServerCommand]:
    """The servers of `[rollout] replicas`. Trainers have the first GPUs, servers the next ones. A server that shares
    one has rank 0's.

    Args:
        gpus: Of the machine; 0 for servers on the CPU.
        trainers_here: Trainer processes on it.
        model: A folder with weights, to evaluate. Without it, the trainer sends them; with `[lora]` it sends adapters
            only.
    """
    rollout, lora = config.rollout, config.lora
    longest = longest_tokens(config, trains=not model)
    model = model or served_base(config)
    each = rollout.gpus_per_server if gpus else 0
    first = 0 if shares_gpu(config, gpus, trainers_here) else trainers_here
    return [
        COMMANDS[rollout.engine](
            os.path.abspath(model or os.path.join(config.job.dump_folder, MODEL_FOLDER)),
            tuple(range(first + i * each, first + (i + 1) * each)),
            tuple(rollout.server_flags),
            max_model_len=longest,  # the engine's own limit may be far longer, and would cost memory
            key_env=rollout.api_key_env,
            has_tokenizer=True,
            has_weights=bool(model),
            memory_share=rollout.memory_share if rollout.colocate and gpus else 0.0,
            sleeps=rollout.sleep_while_training and gpus > 0,
            lora_rank=lora.rank if lora.enable else 0,
            lora_layers=ALL_LINEAR if "all-linear" in lora.target_modules else tuple(lora.target_modules),
            # A step may train on answers that began this many versions ago, and new ones begin.
            lora_versions=1 + config.async_grpo.max_age,
            routes=config.grpo.routing_replay,
            kept=rollout.top_k > 0,
            fp8=rollout.quantization == "fp8",
            top_tokens=config.grpo.score_centering,
        )
        for i in range(rollout.replicas)
    ]


def run_launches(config: JobConfig, gpus: int, trainers_here: int, model: str = "") -> list[Launch]:
    """`launches` of `planned_servers`.

    Raises:
        UserError: See there.
    """
    try:
        return launches(planned_servers(config, gpus, trainers_here, model))
    except ServerCommandError as error:
        raise UserError(f"[rollout] replicas = {config.rollout.replicas}: {error}") from error


def plan_lines(config: JobConfig, gpus: int, trainers_here: int) -> list[str]:
    """What `--dry_run` says of the servers. Nothing is looked for on this machine."""
    ray = config.ray
    servers = planned_servers(config, gpus, 0 if ray.enable else trainers_here)
    node = "" if ray.enable else ", on node 0"
    lines = [f"servers: {len(servers)}, kept alive, with logs in {config.job.dump_folder}/{LOG_FOLDER}{node}"]
    if ray.enable:
        lines += [f"  each in a Ray actor, {'on any node' if ray.expose_servers else 'on the node of rank 0'}"]
    for i, server in enumerate(servers):
        own = server.gpus or ()
        which = f"{len(own)} of Ray's" if ray.enable else ", ".join(map(str, own))
        where = f"GPU {which}" if own else "CPU"
        if own and own[-1] >= gpus and not ray.enable:
            where = f"NO GPU is left on a node of {gpus}"
        where += ", the trainer's" if config.rollout.colocate or shares_gpu(config, gpus, trainers_here) else ""
        lines += [f"  {i}, {where}: {shlex.join(server.argv(PORTS.start + i))}"]
    return lines if servers else []
