"""Run by test_lora: adapters on a mesh, one AdamW step; rank 0 writes what it saw of each way.

Usage: lora_worker.py FOLDER OUT WAYS  FOLDER is a model, OUT an empty folder, WAYS a JSON list. Of way i, OUT/i has
    before/, after/   the adapter as a PEFT folder
    seen.safetensors  log-probabilities before and after the step, those of the base, and gradients by PEFT's names
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.model.lora import B, PeftNames, adapters_off
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.peft_folder import gather_adapter, write_adapter
from torchtitan.grpo.model.shards import canonical_name, local, shard_of, whole
from torchtitan.grpo.model.source import gather_hf, load_hf_weights, resolve_model
from torchtitan.grpo.policy.gradients import accumulate_gradients
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample

LORA = {"enable": True, "rank": 4, "alpha": 6.0, "target_modules": ["all-linear"]}
LR, EPS = 1e-3, 1e-4


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 131, (length,), generator=generator) for length in (17, 30, 9, 23)]


def run(folder: str, out: Path, tp: int, cp: int, checkpointing: str, lora: dict) -> None:
    config = JobConfig()
    config.training = SimpleNamespace(
        dtype="float32",
        mixed_precision_param="float32",
        mixed_precision_reduce="float32",
        seq_len=64,
        kept_logits_mib=1,
        logits_dtype="float32",
        flash_attention="auto",
    )
    config.parallelism.tensor_parallel_degree = tp
    config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option = checkpointing, "matmul"
    config.debug.seed = 11
    world = dist.get_world_size()
    dims = ParallelDims(1, world // (tp * cp), cp, tp, 1, 1, 1, world)
    source = resolve_model(SimpleNamespace(hf_assets_path=folder, weights="hf"), 64, SimpleNamespace(**LORA | lora))
    model = build_model(source, config, dims, torch.device("cpu"))
    load_hf_weights(model, source, folder)
    adapters = {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():  # B is zero at the start, and A without a gradient
        for number, (name, parameter) in enumerate(adapters.items()):
            if name.endswith(B):
                generator = torch.Generator().manual_seed(number)
                full = torch.empty(parameter.shape).normal_(std=0.05, generator=generator)
                local(parameter).copy_(shard_of(full, parameter))
    rank0, names = dist.get_rank() == 0, PeftNames(source.adapter, {name: p.shape for name, p in adapters.items()})
    seen = {}

    def export(name: str) -> None:
        if (tensors := gather_adapter(model)) and rank0:
            write_adapter(tensors, source, out / name, torch.float32)

    samples = [PackedSample(d[:1].tolist(), d[1:].tolist(), 1.0, 1.0, [0.0] * (len(d) - 1)) for d in documents()]
    whole_row = [Microbatch.of(row, "cpu") for row in pack(samples, 96, 1, tp * cp)[0]]
    data_rank = dims.get_mesh("batch").get_local_rank() if world > tp * cp else 0
    own_rows = [Microbatch.of(row, "cpu") for row in pack(samples, 64, world // (tp * cp), tp * cp)[data_rank]]

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(row, 1.0)[0] for row in whole_row])

    export("before")
    seen["before"] = logprobs()
    with adapters_off(model):
        seen["base"] = logprobs()
    optimizer = torch.optim.AdamW(adapters.values(), lr=LR, eps=EPS, weight_decay=0.1)
    accumulate_gradients(model, own_rows, lambda _, row: (-model(row, 1.0)[0].sum(), {}), False)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    seen |= {f"grad.{k}": v for k, v in names.convert({n: whole(p.grad) for n, p in adapters.items()}).items()}
    seen["norm"] = dist_utils.clip_grad_norm_(list(model.parameters()), 1e9, foreach=True)
    optimizer.step()
    seen["after"] = logprobs()
    export("after")
    merged = gather_hf(model, source, torch.float32)
    if rank0:
        save_file({name: value.detach().contiguous().clone() for name, value in seen.items()}, out / "seen.safetensors")
        save_file({name: value.contiguous() for name, value in merged.items()}, out / "merged.safetensors")


def main(folder: str, out: str, ways: list[dict]) -> None:
    dist_utils.init_distributed(JobConfig().comm, base_folder=".")
    for number, way in enumerate(ways):
        of_way = Path(out) / str(number)
        if dist.get_rank() == 0:
            of_way.mkdir()
        run(out=of_way, **{"folder": folder, "tp": 1, "cp": 1, "checkpointing": "none", "lora": {}} | way)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
