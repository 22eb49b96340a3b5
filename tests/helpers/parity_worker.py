"""Run under torchrun by test_hf_parity: sharded load and export of every folder given, against transformers.

Usage: parity_worker.py TP OUT FOLDER...  Rank 0 writes what it saw of each.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import gather_hf, load_hf_weights, resolve_model, write_hf
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample


def reference_logprobs(folder: str, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs = model(tokens.unsqueeze(0)).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, tokens[1:, None])[:, 0].detach()


def main(tp: int, out: str, folders: list[str]) -> None:
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
    config.activation_checkpoint.mode = "none"
    dist_utils.init_distributed(config.comm, base_folder=".")
    world = dist.get_world_size()
    dims = ParallelDims(1, world // tp, 1, tp, 1, 1, 1, world)
    single = ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
    seen = {}
    for folder in folders:
        source = resolve_model(SimpleNamespace(hf_assets_path=folder, weights="hf"), 64)
        model = build_model(source, config, dims, torch.device("cpu"))
        load_hf_weights(model, source, folder)
        whole = build_model(source, config, single, torch.device("cpu"))
        load_hf_weights(whole, source, folder)
        unsharded, differing = whole.state_dict(), []
        for name, value in model.state_dict().items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if not torch.equal(full, unsharded[name]):
                differing.append(name)

        tokens = torch.randint(3, source.model_args.vocab_size, (64,), generator=torch.Generator().manual_seed(1))
        expected = reference_logprobs(folder, tokens)
        exported = f"{folder}-exported-{world}-{tp}"
        write_hf(gather_hf(model, source, torch.float32), source, exported, AutoTokenizer.from_pretrained(folder))
        dist.barrier()
        seen[folder] = {
            "differing": differing,
            "export_difference": (reference_logprobs(exported, tokens) - expected).abs().max().item(),
        }
        sample = PackedSample(tokens[:1].tolist(), tokens[1:].tolist(), 1.0, 1.0, [0.0] * 63)
        with torch.no_grad():
            logprobs, _ = model(Microbatch.of(pack([sample], 64, 1, tp)[0][0], "cpu"), 1.0)
        seen[folder]["load_difference"] = (logprobs - expected).abs().max().item()
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(seen, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
