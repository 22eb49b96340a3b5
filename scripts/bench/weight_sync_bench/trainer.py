"""The trainer's side of a measurement: ranks, a model of a given shape, servers, and waits that end."""

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch
import torch.distributed as dist

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.engines.vllm_control import ServerControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import ModelSource, resolve_model
from torchtitan.grpo.weight_sync.published import model_weights
from torchtitan.grpo.weight_sync.sync import WeightSync, wire_dtype

from .receivers import Receivers

T = TypeVar("T")
FLAVORS = {"0.6b": "0.6B", "1.7b": "1.7B", "4b": "4B", "8b": "8B"}
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_HEALTH_TIMEOUT_S = 30.0


def shape_source(shape: str, seq_len: int = 64) -> ModelSource:
    """The model of a `--shape`, with weights yet to be made."""
    if shape in FLAVORS:
        model = SimpleNamespace(name="qwen3", flavor=FLAVORS[shape], hf_assets_path="", weights="random")
        return resolve_model(model, seq_len)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        return resolve_model(SimpleNamespace(flavor="", hf_assets_path=folder, weights="random"), seq_len)


def hf_tensors(source: ModelSource) -> dict[str, torch.Size]:
    """Hugging Face name -> full shape of what a server takes."""
    with torch.device("meta"):
        parameters = dict(source.build().named_parameters())
    return {name: value.shape for name, value in source.adapter.to_hf(parameters).items()}


class Ranks:
    """This process among torchrun's; started without torchrun it is the only one. `close` leaves the group."""

    def __init__(self, device: str, timeout_s: float):
        if "RANK" not in os.environ:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def synchronize(self) -> None:
        """All ranks and their devices have come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))  # over gloo

    def agree(self, value: float) -> float:
        """Rank 0's number on every rank."""
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.item()

    def largest(self, values: list[float]) -> list[float]:
        """Element by element, the largest over the ranks."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return shared.tolist()

    def close(self) -> None:
        dist.destroy_process_group()

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
        return f"{self.size} trainer rank(s) on {name}, torch {torch.__version__}"


def build(source: ModelSource, ranks: Ranks, param_dtype: str, ac: str = "none", compiled: bool = False):
    """The model, sharded over the ranks as grpo_train.py does it, with random weights."""
    config = JobConfig()
    config.training.dtype = param_dtype
    # Keys of this project, which torchtitan's own JobConfig lacks.
    config.training.kept_logits_mib = 0
    config.training.flash_attention = "auto"
    config.training.mixed_precision_param = "bfloat16" if ranks.device.type == "cuda" else "float32"
    config.activation_checkpoint.mode = ac
    config.compile.enable = compiled
    dims = ParallelDims(1, ranks.size, 1, 1, 1, 1, 1, ranks.size)
    torch.manual_seed(0)
    return build_model(source, config, dims, ranks.device)


class Servers:
    """Addresses given by the user and receiver processes spawned here; on rank 0, elsewhere there are none."""

    def __init__(self, args, ranks: Ranks, resources: ExitStack):
        self.urls = [url.rstrip("/") for url in args.urls] if ranks.rank == 0 else []
        self.spawned: list[Receivers] = []
        for device in args.receivers if ranks.rank == 0 else []:
            self.spawned.append(Receivers(1, device))
            resources.callback(self.spawned[-1].close)
        for receivers in self.spawned:  # which start side by side
            self.urls += receivers.urls
        for url in self.urls:
            ServerControl(url, None, args.timeout_s).wait_healthy(_HEALTH_TIMEOUT_S)


def connected(model, source: ModelSource, settings: job_config.WeightSync, urls: list[str], ranks: Ranks):
    """(WeightSync, fleet): a fresh connection to the servers; the fleet is None on ranks other than 0."""
    fleet = None
    if ranks.rank == 0:
        control_s = settings.timeout_seconds
        fleet = Fleet(urls, lambda url: Server(url, ServerControl(url, None, control_s), engine=ENGINES["vllm"]))
    published = model_weights(model, source.adapter, wire_dtype(settings, ranks.device), source.tied)
    sync = WeightSync(published, settings, fleet, ranks.device)
    try:
        sync.connect()
    except BaseException:
        sync.close()
        raise
    return sync, fleet


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """Give every weight another value, on this rank's shards."""
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    torch._foreach_add_([p for p in locals_ if p.numel()], 1 / 64)


def bounded(call: Callable[[], T], timeout_s: float, what: str, check: Callable[[], None] = lambda: None) -> T:
    """`call()` in a thread that is given up on after `timeout_s`; `check` may raise to give up earlier."""
    outcome: list = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    waited_s = 0.0
    while thread.is_alive():
        thread.join(0.1)
        waited_s += 0.1
        if thread.is_alive():
            check()
            if waited_s > timeout_s:
                raise UserError(f"timed out after {timeout_s:g} s waiting for {what}")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
