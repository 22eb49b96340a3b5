"""Run under torchrun by test_parallel_parity: three AdamW steps on fixed packed rows; rank 0 writes what it saw.

Usage: parallel_worker.py FOLDER OUT WAYS  WAYS is a JSON list. Each way starts from the weights of FOLDER, or of a
folder of its own. What several ways have in common, as DTensor's rules for a mesh, is worked out once.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.host_memory import block_inputs
from torchtitan.grpo.model import parallelize
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.gradients import accumulate_gradients, clip_gradients
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample


def make_samples(vocabulary: int) -> list[PackedSample]:
    generator = torch.Generator().manual_seed(5)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    lengths = [(5, 9), (3, 1), (11, 17), (2, 30), (8, 8), (1, 6), (4, 12), (7, 20), (5, 25), (2, 14), (9, 19)]
    made = [PackedSample(tokens(p), tokens(a), (-1.0) ** i, 1 / 83, [0.0] * a) for i, (p, a) in enumerate(lengths)]
    for i in (6, 7, 9):
        made[i].prompt_ids = made[0].prompt_ids  # a row has it once
    return made


def train(
    folder: str,
    tp: int,
    cp: int,
    ep: int,
    replicas: int,
    checkpointing: str,
    row_tokens: int,
    reduce_once: bool,
    computed: str,
    together: int,
    offload: bool = False,
    mlp_chunk: int = 0,
    rounded: bool = False,
) -> list[list[float]]:
    """[[loss, gradient norm]] of each step. `together`: how many blocks are one FSDP2 group."""
    parallelize.blocks_together = lambda *_: together
    config = JobConfig()
    config.training = SimpleNamespace(
        dtype="float32",
        mixed_precision_param=computed,
        mixed_precision_reduce="float32",
        seq_len=64,
        kept_logits_mib=1,
        logits_dtype="float32",
        tokens_per_microbatch=row_tokens,
        flash_attention="auto",
    )
    config.parallelism.tensor_parallel_degree = tp
    config.activation_checkpoint.mode = checkpointing
    config.activation_checkpoint.selective_ac_option = "matmul"
    config.activation_checkpoint.offload, block_inputs.LEAST_BYTES = offload, 1
    config.activation_checkpoint.mlp_chunk_tokens = mlp_chunk
    world = dist.get_world_size()
    dims = ParallelDims(replicas, world // (tp * cp) // replicas, cp, tp, 1, ep, 1, world)
    data_rank = dims.get_mesh("batch").get_local_rank() if world // (tp * cp) > 1 else 0
    source = resolve_model(SimpleNamespace(hf_assets_path=folder, weights="hf"), 64)
    model = build_model(source, config, dims, torch.device("cpu"), rounded=rounded)
    load_hf_weights(model, source, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    packed = pack(make_samples(source.model_args.vocab_size), row_tokens, world // (tp * cp), tp * cp)[data_rank]
    rows = [Microbatch.of(row, "cpu") for row in packed]
    assert len(rows) > 1 or not reduce_once

    def loss_of(index: int, row: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs, entropy = model(row, 0.8)
        part = -(row.weights * (row.advantages * logprobs + 0.1 * entropy)).sum()
        return part, {"loss": part.detach()}

    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = accumulate_gradients(model, rows, loss_of, reduce_once)["loss"]
        if world > tp * cp:
            dist.all_reduce(loss, group=dims.get_mesh("batch").get_group())
        norm = clip_gradients(model, 0.5)
        optimizer.step()
        seen.append([float(loss), float(norm)])
    return seen


def main(folder: str, out: str, ways: list[dict]) -> None:
    dist_utils.init_distributed(JobConfig().comm, base_folder=".")
    torch.nn.init.trunc_normal_ = lambda weight, **_: weight.fill_(float("nan"))  # each comes from the folder
    seen = [train(**{"folder": folder} | way) for way in ways]
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(seen, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
