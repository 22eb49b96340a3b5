"""What a configuration needs from this machine: processes, devices, environment variables.

As in `contradictions`, all messages come at once, each with the key, its value and what to change.
"""

import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.config.batch import data_ranks, ranks_of_a_row, requests_at_once, step_samples
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.keys import show
from torchtitan.grpo.config.share import rollout_processes
from torchtitan.grpo.config.target import Target
from torchtitan.grpo.config.urls import read_urls
from torchtitan.grpo.errors import UserError, UserErrorOfAllRanks
from torchtitan.grpo.process.addresses import UNSENDABLE, is_sendable
from torchtitan.grpo.process.server_commands.command import ServerCommandError
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.weight_wire.transports import needs_own_gpus

LOOPBACK = "127.0.0.1"
"""Where `[metrics] prometheus_port` is."""
_OTHER_FILES = 512
"""Files of the process besides its requests' connections: data, libraries, environments, rewards."""


def check_machine(
    config: JobConfig,
    world_size: int | None = None,
    gpus: int | None = None,
    target: Target | None = None,
    job: Job = "grpo",
) -> list[str]:
    """Check processes, devices and environment variables.

    Args:
        world_size: Number of trainer processes; 0 for servers alone. None reads torchrun's WORLD_SIZE, or [ray] ranks;
            1 without them.
        gpus: Number of CUDA devices that the run sees. None asks torch.
        target: Of a dry run. If it is another machine than this one, only processes and devices are checked, and it has
            enough GPUs for servers too.
    """
    world_size = planned_ranks(config, target is not None) if world_size is None else world_size
    if config.ray.enable and find_spec("ray") is None:
        return [_missing("[ray] enable = true", "ray", "false")]
    if config.ray.enable and "RANK" not in os.environ:  # the driver: each rank checks its own machine
        return list(check_ranks(config, world_size, job)) if config.ray.ranks else []
    if target is not None and not target.here:
        gpus = target_gpus(config, world_size, target)
        return [*check_ranks(config, world_size, job), *_check_devices(config, world_size, gpus)]
    gpus = torch.cuda.device_count() if gpus is None else gpus
    messages = [
        *check_ranks(config, world_size, job),
        *_check_devices(config, world_size, gpus),
        *_check_files(config),
        *_check_dashboards(config),
        *_check_endpoint(config, job),
        *([] if target is not None else _check_servers_python(config, gpus)),  # a dry run starts none
    ]
    for section, key in (("rollout", "api_key_env"), ("rollout", "serve_key_env"), ("distill", "api_key_env")):
        name = getattr(getattr(config, section), key)
        if name and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):  # may be the key itself: not shown
            messages.append(f"[{section}] {key} is not a variable's name: give one like VLLM_API_KEY, not the key")
        elif name and not os.environ.get(name):
            messages.append(
                f"[{section}] {key} = {show(name)}: the variable is not set: export it, or leave the key out"
            )
        elif name and not is_sendable(os.environ[name]):
            messages.append(f"[{section}] {key} = {show(name)}: the variable {UNSENDABLE}")
    return [*messages, *check_secrets(config)]


def check_secrets(config: JobConfig) -> Iterator[str]:
    """Whether this process has the keys that reward functions need."""
    for name in config.reward.secrets:
        if not os.environ.get(name):
            yield f"[reward] secrets has {show(name)}: the variable is not set: export it, or leave it out"


def target_gpus(config: JobConfig, world_size: int, target: Target) -> int:
    """GPUs of the machine of a dry run. Another one than this has enough for trainers and servers."""
    if target.here:
        return torch.cuda.device_count()
    return target.cuda * (world_size + max(1, config.rollout.replicas * config.rollout.gpus_per_server))


def shares_gpu(config: JobConfig, gpus: int, trainers_here: int) -> bool:
    """Whether the servers that the run starts are on trainers' GPUs: one on each (`colocate`), or one on rank 0's.

    Args:
        gpus: Of the machine.
        trainers_here: Trainer processes on it. Process i has GPU i.
    """
    rollout = config.rollout
    may = COMMANDS[rollout.engine].bundled and rollout.replicas == 1 and not config.ray.enable
    return gpus > 0 and (rollout.colocate or (may and (gpus <= trainers_here or config.weight_sync.transport == "ipc")))


def _check_dashboards(config: JobConfig) -> Iterator[str]:
    port = config.metrics.prometheus_port
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        yield _missing("[metrics] enable_wandb = true", "wandb", "false")
    if port and find_spec("prometheus_client") is None:
        yield _missing(f"[metrics] prometheus_port = {port}", "prometheus-client", "0")
    if port:
        yield from _check_port("[metrics] prometheus_port", LOOPBACK, port)


def _missing(what: str, package: str, off: str) -> str:
    return f"{what}: the package {package} is missing: pip install {package}, or set it to {off}"


def _check_endpoint(config: JobConfig, job: Job) -> Iterator[str]:
    rollout = config.rollout
    if job == "grpo" and rollout.serve_port:
        yield from _check_port("[rollout] serve_port", rollout.serve_host, rollout.serve_port)


def _check_port(key: str, host: str, port: int) -> Iterator[str]:
    """Whether rank 0 can listen there."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the endpoint: an earlier run's is free
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host can be no name
        why = getattr(error, "strerror", error)
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            yield (
                f"[rollout] serve_host = {show(host)} is no address of this machine ({why}): set "
                '"127.0.0.1", or "0.0.0.0" for all that it has'
            )
        else:
            yield f"{key} = {port}: {host}:{port} cannot be opened ({why}): set another port, or 0 for none"


def _check_devices(config: JobConfig, world_size: int, gpus: int) -> Iterator[str]:
    if config.compile.enable and not gpus:
        yield "[compile] enable = true needs CUDA, and this machine has none: packed attention compiles only there"
    transport = config.weight_sync.transport
    if needs_own_gpus(transport) and not gpus:
        yield f'[weight_sync] transport = "{transport}" needs CUDA, and this machine has none: use "auto" or "gloo"'
    yield from _check_replicas(config, world_size, gpus)
    rollout, engine = config.rollout, COMMANDS[config.rollout.engine]
    own_on_cpu = rollout.replicas and not gpus and not config.ray.enable
    needs = f"with [rollout] engine = {show(rollout.engine)} needs GPUs for the servers, and this machine has none"
    if config.lora.enable and not engine.adapters_on_cpu and own_on_cpu:
        yield (
            f"[lora] enable = true {needs}: on a CPU, {engine.title} does not start with --enable-lora; use engine = "
            '"embedded" or "vllm"'
        )
    if config.grpo.routing_replay and not engine.routes_on_cpu and own_on_cpu:
        yield (
            f'[grpo] routing_replay = true {needs}: on a CPU, {engine.title} tells no experts. Use engine = "embedded"'
        )
    if rollout.top_k and not engine.kept_on_cpu and own_on_cpu:
        yield (
            f"[rollout] top_k = {rollout.top_k} {needs}: on a CPU, {engine.title} does not tell which tokens it kept. "
            'Use engine = "embedded" or "sglang"'
        )
    if rollout.quantization != "none" and own_on_cpu:
        yield (
            f"[rollout] quantization = {show(rollout.quantization)} {needs}: on a CPU, a prompt of two tokens ends "
            f"{engine.title} with FP8 (0.32). Leave it out"
        )
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if rollout.colocate and trainers < world_size:
        yield (
            f"[rollout] colocate = true is for the trainer processes of one machine, and {trainers} of this run's "
            f"{world_size} are here: start them on one, or set [rollout] replicas, for servers with GPUs of their own"
        )
    elif rollout.colocate and 0 < gpus < trainers:
        yield (
            f"[rollout] colocate = true is a server on the GPU of each trainer process, and this machine has {gpus} "
            f"for {trainers}: start {gpus}"
        )
    elif rollout.colocate and rollout.replicas != max(1, world_size):
        yield (
            f"[rollout] colocate = true is a server on the GPU of each trainer process, of which this run has "
            f"{world_size}, and [rollout] replicas = {rollout.replicas}: leave replicas out"
        )
    shares = shares_gpu(config, gpus, trainers)
    if transport == "ipc" and gpus and rollout.replicas and not shares:
        yield (
            '[weight_sync] transport = "ipc" reaches servers on the trainer\'s GPU only, and [rollout] replicas = '
            f'{rollout.replicas} puts them elsewhere: use "auto"'
        )
    if needs_own_gpus(transport) and shares and not rollout.colocate:
        takes = "processes take" if trainers > 1 else "process takes"
        yield (
            f'[weight_sync] transport = "{transport}" cannot reach {engine.title}: NCCL cannot join two processes on '
            f'one GPU, and {trainers} trainer {takes} all {gpus}; use "auto"'
        )


def _check_replicas(config: JobConfig, world_size: int, gpus: int) -> Iterator[str]:
    """GPUs for the servers of `replicas`, on the machine of rank 0. Ray has its own."""
    rollout = config.rollout
    if not (rollout.replicas and gpus) or config.ray.enable or os.environ.get("GROUP_RANK", "0") != "0":
        return
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if shares_gpu(config, gpus, trainers):
        return
    wanted = trainers + rollout.replicas * rollout.gpus_per_server
    beside = f"{trainers} trainer process{'es' * (trainers > 1)} + " if trainers else ""
    if wanted > gpus:
        yield (
            f"[rollout] replicas = {rollout.replicas} needs {wanted} GPUs, and this machine has {gpus}: {beside}"
            f"{rollout.replicas} server{'s' * (rollout.replicas > 1)} x [rollout] gpus_per_server = "
            f"{rollout.gpus_per_server}; lower one of them"
        )


def _check_servers_python(config: JobConfig, gpus: int) -> Iterator[str]:
    """The servers' Python must have the engine. Only rank 0 starts servers; under Ray their own nodes look for it."""
    rollout = config.rollout
    if not rollout.replicas or config.ray.enable or os.environ.get("RANK", "0") != "0":
        return
    try:
        COMMANDS[rollout.engine]("", None if gpus else ()).engine_folder()
    except ServerCommandError as error:
        yield f"[rollout] replicas = {rollout.replicas}: {error}"


def planned_ranks(config: JobConfig, dry_run: bool = False) -> int:
    """Trainer processes: torchrun's WORLD_SIZE, else `[ray] ranks`, else in a dry run `[parallelism] ranks`, else 1."""
    of_ray, of_plan = config.ray.enable and config.ray.ranks, dry_run and config.parallelism.ranks
    return int(os.environ.get("WORLD_SIZE") or of_ray or of_plan or 1)


def check_ranks(config: JobConfig, world_size: int, job: Job) -> Iterator[str]:
    """Whether the batch and the mesh suit that number of processes."""
    parallel = config.parallelism
    replicate, shard, of_row = (
        parallel.data_parallel_replicate_degree or 1,  # 0 is settled later, and always divides
        parallel.data_parallel_shard_degree,
        ranks_of_a_row(config),
    )
    split = f"tensor_parallel_degree = {parallel.tensor_parallel_degree}"
    if parallel.context_parallel_degree > 1:
        split = f"context_parallel_degree = {parallel.context_parallel_degree}"
    processes = "[ray] ranks" if config.ray.enable else "torchrun's --nproc-per-node"
    start = f"this run has {world_size} process{'es' if world_size > 1 else ''}"
    if parallel.ranks and world_size not in (0, parallel.ranks):
        yield (
            f"[parallelism] ranks = {parallel.ranks}, but {start}: start {parallel.ranks} (by {processes}), or say "
            f"that you mean it by --parallelism.ranks {world_size}"
        )
        return
    if shard == -1 and world_size % (replicate * of_row):
        yield (
            f"[parallelism] data_parallel_replicate_degree = {replicate} x {split} does not "
            f"divide the world size: {start}; change them or {processes}"
        )
        return
    if shard != -1 and replicate * shard * of_row != world_size:
        yield (
            f"[parallelism] data_parallel_replicate_degree = {replicate} x data_parallel_shard_degree = {shard} x "
            f"{split} = {replicate * shard * of_row}, but {start}: change them or "
            f"{processes}"
        )
        return
    shards, expert = world_size // (replicate * of_row), parallel.expert_parallel_degree
    if shards % expert:
        yield (
            f"[parallelism] expert_parallel_degree = {expert} does not divide the {shards} ranks that shard the model: "
            f"{start}; change it or {processes}"
        )
        return
    ranks = data_ranks(config, world_size)
    samples = step_samples(config, job)
    if samples < ranks and job == "sft":
        yield (
            f"[sft] batch_size = {samples} for {ranks} data-parallel ranks: some would have nothing to train on, so "
            "raise it"
        )
    elif samples < ranks:
        yield (
            f"[grpo] prompts_per_step x group_size / minibatches = {samples} answers for {ranks} data-parallel ranks: "
            "some would have nothing to train on, so raise prompts_per_step"
        )
    longest = max(config.rollout.group_timeout_seconds, config.rollout.start_timeout_seconds)
    if job == "grpo" and world_size > 1 and config.comm.init_timeout_seconds <= longest:
        yield (
            f"[comm] init_timeout_seconds = {config.comm.init_timeout_seconds} must be over [rollout] "
            f"group_timeout_seconds and start_timeout_seconds (up to {longest:g}): other ranks wait in a collective "
            "while rank 0 waits for servers"
        )


def check_launch(dry_run: bool = False) -> None:
    """Refuse variables of a launcher by which this process would wait for ranks that nobody starts.

    Without RANK and WORLD_SIZE there is no launcher. Its other variables are then left over, or not its own: Kubernetes
    sets MASTER_PORT beside a Service named "master". They are removed.

    Args:
        dry_run: WORLD_SIZE may then stand alone: it is the number of processes that the dry run is about.

    Raises:
        UserErrorOfAllRanks: One is no such number, some are missing, or RANK is not under WORLD_SIZE.
    """
    needed = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *(("LOCAL_RANK",) if torch.cuda.is_available() else ())
    names = {*needed, "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    given = {name: value for name in names if (value := os.environ.get(name))}
    if not {"RANK", "WORLD_SIZE"} & given.keys():
        for name in names:
            os.environ.pop(name, None)
        return
    start = "start the ranks by torchrun, or unset RANK and WORLD_SIZE for a run of one process"
    for name in sorted(given.keys() - {"MASTER_ADDR"}):
        least = 1 if name.endswith("WORLD_SIZE") else 0
        if not given[name].isdecimal() or int(given[name]) < least:
            raise UserErrorOfAllRanks(
                f"{name}={given[name]} in the environment is no whole number of {least} or more: {start}"
            )
    rank, ranks = given.get("RANK"), given.get("WORLD_SIZE")
    if rank and ranks and int(rank) >= int(ranks):
        raise UserErrorOfAllRanks(f"RANK={rank} in the environment must be under WORLD_SIZE={ranks}: {start}")
    missing = [name for name in needed if name not in given]
    if (rank or ranks) and missing and not dry_run:
        there = f"WORLD_SIZE={ranks}" if ranks else f"RANK={rank}"
        alone = "" if rank else " (alone, WORLD_SIZE is for --dry_run)"
        raise UserErrorOfAllRanks(f"{there} is in the environment, but no {' or '.join(missing)}: {start}{alone}")


def default_to_one_process() -> None:
    """Without torchrun, or another launcher that sets RANK and WORLD_SIZE, the run is this process alone."""
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        # A store at port 0 takes a free one. Nobody else has to find it.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)


def one_cpu_thread() -> None:
    """With a GPU, PyTorch's operations on the CPU take one thread, unless OMP_NUM_THREADS says otherwise.

    They are small. On a machine that serves too, threads that wait for each other take longer.
    torchrun sets the variable only if it starts several ranks.
    """
    if torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the hard limit allows.

    Each request in flight holds a connection, and the usual soft limit is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_files(config: JobConfig) -> Iterator[str]:
    rollout = config.rollout
    servers = rollout.replicas or max(1, len(rollout.urls))
    if rollout.urls_file:
        try:
            servers = len(read_urls(rollout.urls_file))
        except UserError:
            return  # the fleet refuses it
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    at_once = requests_at_once(rollout)
    wanted = servers * -(-at_once // rollout_processes(config)) + _OTHER_FILES  # of each process
    if hard != resource.RLIM_INFINITY and wanted > hard:
        yield (
            f"[rollout] max_concurrent_requests = {at_once} on {servers} "
            f"server{'s' if servers > 1 else ''} may need {wanted} open files, and this machine allows {hard}: raise "
            "the limit (ulimit -Hn), or lower max_concurrent_requests"
        )
