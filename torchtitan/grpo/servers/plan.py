"""Which servers are started: the command, the GPUs and the environment of each."""

import os
import shlex
from dataclasses import dataclass, field

from torchtitan.config import JobConfig
from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.config.tables import longest_tokens
from torchtitan.grpo.engines.embedded.spawn import embedded_command, server_environment, without_torchrun
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.server_commands import (
    ALL_LINEAR,
    KEY_VARIABLE,
    LOOPBACK,
    ServerCommand,
    ServerCommandError,
    engine_folder,
    engine_python,
    is_loopback,
)
from torchtitan.grpo.servers.kept_server import Launch
from torchtitan.grpo.servers.ports import PORTS

MODEL_FOLDER = "served_model"
LOG_FOLDER = "servers"
"""In the run's folder."""
URLS_FILE = "urls.txt"
"""Beside the logs."""
_CONTROL_S = 60.0


@dataclass(frozen=True)
class PlannedServer:
    """One server.

    Attributes:
        model: Folder with config.json and tokenizer.
        gpus: Indices among the visible CUDA devices; empty: the CPU.
        flags: Further flags of the engine.
        python: The Python that has the engine; "" for `engine_python`.
        max_model_len, has_tokenizer, lora_rank, lora_layers, lora_versions, routes: As in `ServerCommand`.
        rollout: `embedded_*` and `api_key_env` are used. The key itself is in no command line.
    """

    engine: str
    model: str
    gpus: tuple[int, ...]
    flags: tuple[str, ...] = ()
    python: str = ""
    host: str = LOOPBACK
    max_model_len: int | None = None
    has_tokenizer: bool = False
    rollout: Rollout = field(default_factory=Rollout)
    lora_rank: int = 0
    lora_layers: tuple[str, ...] = ALL_LINEAR
    lora_versions: int = 1
    routes: bool = False

    def argv(self, port: int, folder: str = "") -> list[str]:
        """The command line; `folder` as in `ServerCommand.argv`."""
        if self.engine != "embedded":
            return self._command(port).argv(folder, self._keys())
        command = embedded_command(self.model, self.rollout, f"cuda:{self.gpus[0]}" if self.gpus else "cpu")
        command += ["--host", self.host, "--port", str(port)]
        return [*command, *([] if is_loopback(self.host) else ["--expose"]), *self.flags]

    def environment(self) -> dict[str, str]:
        """This process's environment with what the engine needs, and its API key.

        Raises:
            ServerCommandError: A GPU is not visible.
        """
        if self.engine == "embedded":
            return server_environment()
        # A key that happens to be in the environment would be asked for, and the trainer would not send it.
        env = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE[self.engine]}
        return self._command(0).environment(without_torchrun(env) | self._keys())

    def found_python(self) -> str:
        return self.python or engine_python(self.engine, not self.gpus)

    def _keys(self) -> dict[str, str]:
        name = self.rollout.api_key_env
        return {KEY_VARIABLE[self.engine]: os.environ.get(name, "")} if name else {}

    def _command(self, port: int) -> ServerCommand:
        device = "cuda" if self.gpus else "cpu"
        return ServerCommand(
            self.engine,
            self.model,
            self.found_python(),
            self.host,
            port,
            device,
            self.gpus,
            self.max_model_len,
            self.flags,
            self.has_tokenizer,
            self.lora_rank,
            self.lora_layers,
            self.lora_versions,
            self.routes,
        )


def launches(servers: list[PlannedServer]) -> list[Launch]:
    """How a supervisor starts these servers.

    Raises:
        ServerCommandError: Their Python lacks the engine, or a GPU is not visible.
    """
    first = servers[0]
    folder, key_name = "", first.rollout.api_key_env
    if first.engine != "embedded":
        folder = engine_folder(first.engine, first.found_python())
    control, key = ENGINES[first.engine].control, os.environ.get(key_name) if key_name else None

    def launch(index: int, server: PlannedServer, environment: dict[str, str]) -> Launch:
        return Launch(
            str(index), lambda port: (server.argv(port, folder), environment), lambda url: control(url, key, _CONTROL_S)
        )

    return [launch(i, server, server.environment()) for i, server in enumerate(servers)]


def on_cuda(config: JobConfig, cuda: bool) -> bool:
    """Whether a run's servers are on GPUs, on a machine with or without them."""
    return cuda and not (config.rollout.engine == "embedded" and config.rollout.embedded_device == "cpu")


def served_base(config: JobConfig) -> str:
    """With `[lora]`: the folder whose weights servers load, since they get adapters only. Without it: ""."""
    return config.model.hf_assets_path if config.lora.enable else ""


def reads_files(config: JobConfig) -> bool:
    """Whether servers can get this run's weights from files only: SGLang gets adapters so."""
    return config.lora.enable and config.rollout.engine == "sglang"


def planned_servers(config: JobConfig, cuda: bool, trainers_here: int, model: str = "") -> list[PlannedServer]:
    """The servers of `[rollout] replicas`. Trainers have the first GPUs, servers the next ones. With `colocate`, the
    server has the trainer's.

    Args:
        cuda: The machine has GPUs.
        trainers_here: Trainer processes on it.
        model: A folder with weights. Without it, the trainer sends them; with `[lora]` it sends adapters only.
    """
    rollout, lora = config.rollout, config.lora
    model = model or served_base(config)
    each = rollout.gpus_per_server if on_cuda(config, cuda) else 0
    first = 0 if rollout.colocate else trainers_here
    share: tuple[str, ...] = ()
    if rollout.colocate and each:
        name = "--memory-share" if rollout.engine == "embedded" else "--gpu-memory-utilization"
        share = (name, f"{rollout.memory_share:g}")
        if rollout.sleep_while_training and rollout.engine == "vllm":
            share = (*share, "--enable-sleep-mode")
    loads = () if model or rollout.engine == "embedded" else ("--load-format", "dummy")
    return [
        PlannedServer(
            rollout.engine,
            os.path.abspath(model or os.path.join(config.job.dump_folder, MODEL_FOLDER)),
            tuple(range(first + i * each, first + (i + 1) * each)),
            (*loads, *share, *rollout.server_flags),
            rollout.server_python,
            max_model_len=longest_tokens(config),  # the engine's own limit may be far longer, and would cost memory
            has_tokenizer=True,
            rollout=rollout,
            lora_rank=lora.rank if lora.enable else 0,
            lora_layers=ALL_LINEAR if "all-linear" in lora.target_modules else tuple(lora.target_modules),
            # A step may train on answers that began this many versions ago, and new ones begin.
            lora_versions=1 + config.async_grpo.max_age,
            routes=config.grpo.routing_replay,
        )
        for i in range(rollout.replicas)
    ]


def run_launches(config: JobConfig, cuda: bool, trainers_here: int, model: str = "") -> list[Launch]:
    """`launches` of `planned_servers`.

    Raises:
        UserError: See there.
    """
    try:
        return launches(planned_servers(config, cuda, trainers_here, model))
    except ServerCommandError as error:
        raise UserError(f"[rollout] replicas = {config.rollout.replicas}: {error}") from error


def plan_lines(config: JobConfig, cuda: bool, trainers_here: int) -> list[str]:
    """What `--dry_run` says of the servers. Nothing is looked for on this machine."""
    ray = config.ray
    servers = planned_servers(config, cuda, 0 if ray.enable else trainers_here)
    lines = [f"servers: {len(servers)}, kept alive, with logs in {config.job.dump_folder}/{LOG_FOLDER}"]
    if ray.enable:
        lines += [f"  each in a Ray actor, {'on any node' if ray.expose_servers else 'on the node of rank 0'}"]
    for i, server in enumerate(servers):
        gpus = f"{len(server.gpus)} of Ray's" if ray.enable else ", ".join(map(str, server.gpus))
        where = f"GPU {gpus}" if server.gpus else "CPU"
        where += ", the trainer's" if config.rollout.colocate else ""
        lines += [f"  {i}, {where}: {shlex.join(server.argv(PORTS.start + i))}"]
    return lines if servers else []
