"""LoRA factors and experts, published without a model; run under torchrun by test_published, it packs shards of them.

    torchrun ... published_worker.py '{"folder": ..., "shards": "experts", "rows" or "both"}'

Rank 0 writes the buckets of version 1 as files, and what a receiver needs to read them as info.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan.grpo.weight_sync.packer import Packer
from torchtitan.grpo.weight_sync.published import PublishedTensor, PublishedWeights, whole
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_wire.bucket_files import write_bucket
from torchtitan.grpo.weight_wire.buckets import TensorSpec, plan_to_json
from torchtitan.grpo.weight_wire.receiver import PROTOCOL

EXPERTS, HIDDEN, DIM, RANK = 5, 6, 8, 3


def parameters(seed: int) -> dict[str, torch.Tensor]:
    """Two LoRA factors, gate and up projections of all experts in one tensor, and down projections in another."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "lora_a": (RANK, DIM),
        "lora_b": (HIDDEN, RANK),
        "gate_up": (EXPERTS, 2 * HIDDEN, DIM),
        "down": (EXPERTS, HIDDEN, DIM),  # a checkpoint has [DIM, HIDDEN]
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def checkpoint(parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a server must hold, spelled out by hand."""
    tensors = {"q_proj.lora_A.weight": parameters["lora_a"], "q_proj.lora_B.weight": parameters["lora_b"]}
    for e in range(EXPERTS):
        tensors[f"experts.{e}.gate_proj.weight"] = parameters["gate_up"][e, :HIDDEN]
        tensors[f"experts.{e}.up_proj.weight"] = parameters["gate_up"][e, HIDDEN:]
    for e in range(EXPERTS):
        tensors[f"experts.{e}.down_proj.weight"] = parameters["down"][e].t()
    return {name: value.to(dtype) for name, value in tensors.items()}


def published(parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> PublishedWeights:
    def transposed(box: torch.Tensor) -> torch.Tensor:
        return box[0].t()

    tensors = [
        PublishedTensor(TensorSpec("q_proj.lora_A.weight", dtype, (RANK, DIM)), "lora_a", whole((RANK, DIM))),
        PublishedTensor(TensorSpec("q_proj.lora_B.weight", dtype, (HIDDEN, RANK)), "lora_b", whole((HIDDEN, RANK))),
    ]
    for e in range(EXPERTS):
        for start, kind in ((0, "gate"), (HIDDEN, "up")):
            spec = TensorSpec(f"experts.{e}.{kind}_proj.weight", dtype, (HIDDEN, DIM))
            tensors.append(PublishedTensor(spec, "gate_up", ((e, 1), (start, HIDDEN), (0, DIM))))
    for e in range(EXPERTS):
        spec = TensorSpec(f"experts.{e}.down_proj.weight", dtype, (DIM, HIDDEN))
        tensors.append(PublishedTensor(spec, "down", ((e, 1), (0, HIDDEN), (0, DIM)), transposed))
    return PublishedWeights(parameters, tuple(tensors))


def main(job: dict) -> None:
    dist.init_process_group("gloo")
    module = nn.Module()
    mesh = None
    if job["shards"] == "both":  # experts over one half of the ranks, and each half's over its ranks
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("efsdp", "ep"))
    for name, value in parameters(1).items():
        if mesh is not None and value.dim() == 3:
            value = distribute_tensor(value, mesh["ep"], [Shard(0)])
        module.register_parameter(name, nn.Parameter(value))
    by_rows = job["shards"] == "rows"
    fully_shard(
        module,
        mesh=mesh and mesh["efsdp"],
        shard_placement_fn=lambda parameter: Shard(int(by_rows and parameter.dim() == 3)),
    )
    sharded = published(dict(module.named_parameters()), torch.bfloat16)
    packer = Packer(sharded, Ranks(torch.device("cpu"), 20, 20), 200, num_buffers=2)
    packer.snapshots.take(1)
    folder = Path(job["folder"])
    with packer.snapshots.hold(lambda newest: newest, 5, lambda: None) as snapshot:
        for bucket in packer.buckets:
            packer.gather(bucket, snapshot)
            if dist.get_rank() == 0:
                write_bucket(folder, bucket, packer.pack(bucket, snapshot))
    if dist.get_rank() == 0:
        info = {
            "protocol": PROTOCOL,
            "run": "r",
            "backend": "disk",
            "master_address": "",
            "master_port": 0,
            "rank_offset": 1,
        }
        info |= {"world_size": 2, "num_buffers": 2, "timeout_seconds": 10.0}
        (folder / "expected.json").write_text(json.dumps(packer.expected_acknowledgement(1)))
        (folder / "info.json").write_text(json.dumps(info | {"plan": plan_to_json(packer.buckets)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
