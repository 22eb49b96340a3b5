"""Run under torchrun by test_weight_sync: publishes from a sharded model; every rank writes what it saw.

    torchrun ... weight_sync_worker.py
      '{"folder": ..., "tp": 2, "urls": [...], "sync": {...}, "acts": [...], "out": ...}'

An act is [kind, version]. `publish` sends changed weights and compares what each server got, tensor by tensor and byte
by byte, with the full tensors put together by DTensor itself. `flip` and `trailer` damage a bucket on its way; those
and `fails` expect an error. Each rank writes {"acts": [...], "close_s": ..., "most_in_flight": ...}
to OUT.RANK.
"""

import hashlib
import json
import sys
import time
from types import SimpleNamespace

import requests
import torch
import torch.distributed as dist

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo import job_config
from torchtitan.grpo.engines.control import ServerControl
from torchtitan.grpo.models import load_hf_weights, resolve_model
from torchtitan.grpo.parallelize import build_model
from torchtitan.grpo.weight_sync.buckets import TRAILER_BYTES
from torchtitan.grpo.weight_sync.link import ServerLink, WeightSyncError
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.grpo.weight_sync.transport import Group

send = Group.broadcast
post = ServerLink.post
most_in_flight = 0


def post_and_count(self: ServerLink, wire: torch.Tensor, payload_bytes: int) -> None:
    global most_in_flight
    post(self, wire, payload_bytes)
    most_in_flight = max(most_in_flight, len(self._in_flight))


def damage(kind: str):
    """Have the third bucket leave rank 0 with one bit flipped, or with another version in its trailer."""
    done = False

    def broadcast(self: Group, tensor: torch.Tensor) -> dist.Work:
        nonlocal done
        trailer = tensor[-TRAILER_BYTES:].view(torch.int64)
        if trailer[1] == 2 and not done:
            done = True
            if kind == "flip":
                tensor[(tensor.numel() - TRAILER_BYTES) // 2] ^= 1
            else:
                trailer[0] -= 1
        return send(self, tensor)

    return broadcast


def digests(model: torch.nn.Module, source, dtype: torch.dtype) -> dict[str, list]:
    """What a server must hold, by a path that shares nothing with the sender: DTensor's own full tensors."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        full[name.replace("_checkpoint_wrapped_module.", "")] = value.to(dtype)
    out = {}
    for name, value in source.adapter.to_hf(full).items():
        data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        out[name] = [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    return out


def change(model: torch.nn.Module, version: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.mul_(1.0 + version / 64).add_(version / 128)


def main(job: dict) -> None:
    config = JobConfig()
    config.training = SimpleNamespace(
        dtype="float32", mixed_precision_param="float32", mixed_precision_reduce="float32", seq_len=64
    )
    config.parallelism.tensor_parallel_degree = job["tp"]
    config.activation_checkpoint.mode = "full"
    dist_utils.init_distributed(config.comm, base_folder=".")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    dims = ParallelDims(1, world // job["tp"], 1, job["tp"], 1, 1, 1, world)
    source = resolve_model(SimpleNamespace(flavor="", hf_assets_path=job["folder"], weights="hf"), 64)
    model = build_model(source, config, dims, device)
    load_hf_weights(model, source, job["folder"])
    controls = [ServerControl(url, None, job["sync"]["timeout_seconds"]) for url in job["urls"]] if rank == 0 else []
    sync = WeightSync(model, source.adapter, job_config.WeightSync(**job["sync"]), controls, device, source.tied)
    ServerLink.post = post_and_count
    sync.connect()
    seen = []
    for kind, version in job["acts"]:
        change(model, version)
        expected = digests(model, source, getattr(torch, job["sync"]["dtype"]))
        Group.broadcast = damage(kind) if kind in ("flip", "trailer") else send
        started = time.monotonic()
        act = {"kind": kind, "version": version}
        try:
            report = sync.publish(version)
        except WeightSyncError as error:
            act |= {"error": str(error), "phase": error.phase, "error_version": error.version, "bytes": error.bytes}
            act |= {"server": error.server}
        else:
            act |= {"report": [report.version, report.bytes, report.buckets], "seconds": report.seconds}
            if rank == 0:
                act["tensors"] = len(expected)
                act["equal"] = [requests.get(url + "/tensors", timeout=10).json() == expected for url in job["urls"]]
        act["elapsed_s"] = time.monotonic() - started
        if rank == 0 and kind != "fails":
            act["paused"] = [control.is_paused() for control in controls]
            act["served"] = [control.weight_version() for control in controls]
        seen.append(act)
    started = time.monotonic()
    sync.close()
    close_s = time.monotonic() - started
    with open(f"{job['out']}.{rank}", "w") as file:
        json.dump({"acts": seen, "close_s": close_s, "most_in_flight": most_in_flight}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
