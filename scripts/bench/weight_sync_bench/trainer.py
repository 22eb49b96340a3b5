"""The trainer's side of a measurement: ranks, a model of a given shape, a connection to the servers."""

import dataclasses
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from bench_common.process import join_torchrun
from bench_common.shapes import write_model

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import ModelSource, resolve_model
from torchtitan.grpo.weight_sync.published import published_weights
from torchtitan.grpo.weight_sync.sync import WeightSync, wire_dtype

MAX_TOKENS = 4096
_HEALTH_TIMEOUT_S = 30.0


def shape_source(shape: str, lora_rank: int = 0) -> ModelSource:
    """The model of a `--shape`, without weights. `lora_rank` over 0: with adapters beside all of its layers."""
    lora = job_config.Lora(enable=lora_rank > 0, rank=max(1, lora_rank))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, MAX_TOKENS)
        return resolve_model(SimpleNamespace(hf_assets_path=folder, weights="random"), 64, lora)


class Ranks:
    """This process among torchrun's ranks, or the only rank without torchrun. `close` leaves the process group."""

    def __init__(self, device: str, timeout_s: float):
        join_torchrun()
        on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def synchronize(self) -> None:
        """Returns when all ranks and their devices have arrived here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))  # over gloo

    def close(self) -> None:
        dist.destroy_process_group()

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
        return f"{self.size} trainer rank(s) on {name}, torch {torch.__version__}"


def build(source: ModelSource, ranks: Ranks, param_dtype: str) -> torch.nn.Module:
    """The model with random weights, sharded over the ranks as grpo_train.py shards it."""
    config = JobConfig()
    config.training.dtype = param_dtype
    # Keys of this project, which torchtitan's own JobConfig lacks.
    config.training.kept_logits_mib = 0
    config.training.logits_dtype = "float32"
    config.training.flash_attention = "auto"
    config.training.mixed_precision_param = "bfloat16" if ranks.device.type == "cuda" else "float32"
    config.activation_checkpoint.mode = "none"
    dims = ParallelDims(1, ranks.size, 1, 1, 1, 1, 1, ranks.size)
    torch.manual_seed(0)
    return build_model(source, config, dims, ranks.device)


def connected(
    model: torch.nn.Module, source: ModelSource, settings: job_config.WeightSync, urls: list[str], ranks: Ranks
) -> tuple[WeightSync, Fleet | None]:
    """A connection to healthy servers. The fleet is None on ranks other than 0."""
    fleet = None
    if ranks.rank == 0:
        control_s = settings.timeout_seconds
        fleet = Fleet(urls, lambda url: Server(url, VllmControl(url, None, control_s), engine=ENGINES["vllm"]))
        for server in fleet.servers:
            server.control.wait_healthy(_HEALTH_TIMEOUT_S)
    published = published_weights(model, source, wire_dtype(settings, ranks.device))
    if info := published.announced.get("adapter"):  # the base is random: no server has it
        published = dataclasses.replace(published, announced={"adapter": info | {"base": {}}})
    sync = WeightSync(published, settings, fleet, ranks.device)
    try:
        sync.connect()
    except BaseException:
        sync.close()
        raise
    return sync, fleet


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """Change every weight, on this rank's shards."""
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    torch._foreach_add_([p for p in locals_ if p.numel()], 1 / 64)
