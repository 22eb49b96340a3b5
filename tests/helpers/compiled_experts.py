"""Two ranks with expert parallelism and FSDP2 in bfloat16: gradients with router and experts compiled, and without.

`Ranks(2, this file, MODEL FOLDER, OUT)` writes to OUT the norm of each gradient's difference over its own norm.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.microbatches import microbatches
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.model import parallelize, qwen3_moe
from torchtitan.grpo.model.shards import canonical_name, whole
from torchtitan.grpo.model.source import load_hf_weights, resolve_and_check
from torchtitan.grpo.policy.rows import PackedSample

KEYS = ["--parallelism.expert_parallel_degree", "2", "--training.mixed_precision_param", "bfloat16"]
KEYS += ["--training.seq_len", "256", "--data.max_prompt_tokens", "64", "--rollout.max_answer_tokens", "64"]
compile_part, apply_fsdp = torch.compile, parallelize._apply_fsdp


def compile_functions(part, **how):
    """Attention does not compile on a CPU: modules stay as they are."""
    return part if isinstance(part, nn.Module) else compile_part(part, **how)


def compile_and_shard(model: nn.Module, *how) -> None:
    with patch("torch.compile", compile_functions):
        qwen3_moe.apply_compile(model, SimpleNamespace(backend="aot_eager"))
    apply_fsdp(model, *how)


def gradients(folder: str, mode: str, compiled: bool) -> dict[str, torch.Tensor]:
    checkpointing = ["--activation_checkpoint.mode", mode]
    if mode == "selective":
        checkpointing += ["--activation_checkpoint.selective_ac_option", "matmul"]
    words = ["--model.hf_assets_path", folder, "--model.weights", "hf", "--rollout.urls", "http://a:1"]
    config = load_config([*words, *KEYS, *checkpointing], world_size=2)
    source = resolve_and_check(config)
    with patch.object(parallelize, "_apply_fsdp", compile_and_shard if compiled else apply_fsdp):
        dims = parallelize.parallel_dims(config, 2)
        dims.build_mesh()
        model = parallelize.build_model(source, config, dims, torch.device("cpu"))
    load_hf_weights(model, source, folder)
    own = dist.get_rank()
    samples = [PackedSample(list(range(3, 15)), list(range(20 + own, 40 + own)), 1.0, 1.0, [0.0] * 20)] * 2
    (row,) = microbatches(samples, 128, 1)[0]
    model(row, 1.0)[0].sum().backward()
    return {canonical_name(name): whole(parameter.grad) for name, parameter in model.named_parameters()}


def main(folder: str, out: str) -> None:
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    for mode in ("none", "full", "selective"):
        eager, compiled = (gradients(folder, mode, each) for each in (False, True))
        found |= {f"{mode} {name}": float((eager[name] - compiled[name]).norm() / eager[name].norm()) for name in eager}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
