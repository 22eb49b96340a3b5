"""This rank's part of a run: configuration, process group, data."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_common.arguments import as_flags
from bench_common.process import join_torchrun

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.config.batch import data_ranks
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.dry_run.memory import memory_bytes
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.lora import add_adapters
from torchtitan.grpo.model.parallelize import parallel_dims
from torchtitan.grpo.model.source import resolve_model

from .work import Work

NOT_HELD = {"snapshots", "buckets, at most"}
"""What `memory_bytes` counts for weight sync, which these steps do not have."""


class Setup:
    """What every contender is built from.

    Args:
        job: The arguments of step.py with one contender and one shape, and `folder` with the shape's config.json.
    """

    def __init__(self, job: Mapping[str, Any]):
        self.job = job
        on_cuda = job["device"] == "cuda" or (job["device"] == "auto" and torch.cuda.is_available())
        self.config = configure(job, on_cuda)
        self.work = Work.of(job)
        self.source = resolve_model(self.config.model, self.config.training.seq_len, self.config.lora)
        with torch.device("meta"):
            model = self.source.build()
            if self.source.lora is not None:
                add_adapters(model, self.source.lora, torch.float32)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flops = TrainingFlops.of(model)(self.work.lengths, self.work.trained_tokens)
        self.estimate = peak_parts(memory_bytes(self.config, job["gpus"]).moments)
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
        join_torchrun()
        if on_cuda:
            torch.cuda.set_device(self.device)
        dist_utils.init_distributed(self.config.comm, base_folder=job["folder"])
        self.dims = parallel_dims(self.config, dist.get_world_size())
        dist_utils.set_determinism(self.dims, self.device, self.config.debug, [])
        self.data_ranks = self.dims.dp_replicate * self.dims.dp_shard
        data_rank = self.dims.get_mesh("batch").get_local_rank() if self.data_ranks > 1 else 0
        self.sequences = self.work.sequences(self.source.model_args.vocab_size, data_rank)
        self.advantages = self.work.advantages(data_rank)

    @property
    def token_weight(self) -> float:
        """One over the trained tokens of all ranks: `[grpo] loss_aggregation = "token"`."""
        return 1 / (self.work.trained_tokens * self.data_ranks)


def checkpointing(config: JobConfig) -> str:
    """`[activation_checkpoint]` in a word, as --ac has it."""
    checkpoint = config.activation_checkpoint
    is_matmul = (checkpoint.mode, checkpoint.selective_ac_option) == ("selective", "matmul")
    return "matmul" if is_matmul else checkpoint.mode


def configure(job: Mapping[str, Any], on_cuda: bool) -> JobConfig:
    """grpo_train.py's configuration of the step; `job["flags"]` win."""
    compiled = on_cuda if job["compile"] is None else job["compile"]
    prompt = Work.of(job).prompt
    flags = {
        "model.hf_assets_path": job["folder"],
        "model.weights": "random",
        "job.dump_folder": str(Path(job["folder"]) / "outputs"),
        "training.seq_len": job["documents"],
        "training.tokens_per_microbatch": job["tokens"],
        "training.mixed_precision_param": "bfloat16" if on_cuda else "float32",
        "activation_checkpoint.mode": "selective" if job["ac"] == "matmul" else job["ac"],
        "activation_checkpoint.selective_ac_option": "matmul" if job["ac"] == "matmul" else "op",
        "compile.enable": compiled,
        "data.max_prompt_tokens": prompt,
        "rollout.max_answer_tokens": max(1, job["documents"] - prompt),
        "debug.seed": 0,
    }
    config = load_config(as_flags(flags | job["flags"]))
    # Set here: a run of random weights with adapters is refused.
    config.lora.enable, config.lora.rank = job["lora"] > 0, max(1, job["lora"])
    # From these the memory estimate counts rows. The rows themselves are made without them.
    samples = job["microbatches"] * job["tokens"] // job["documents"]
    config.grpo.group_size = 1
    config.grpo.prompts_per_step = samples * data_ranks(config, job["gpus"])
    return config


def peak_parts(moments: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Bytes by holder at the moment that needs most, without weight sync."""
    held = [{name: size for name, size in parts.items() if name not in NOT_HELD} for parts in moments.values()]
    return max(held, key=lambda parts: sum(parts.values()))
