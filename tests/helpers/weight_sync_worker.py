"""Run under torchrun by test_weight_sync: publishes from a sharded model; every rank writes what it saw.

    torchrun ... weight_sync_worker.py
      '{"folder": ..., "tp": 2, "urls": [...], "sync": {...}, "min_servers": 1, "acts": [...], "out": ...}'

An act is [kind, version, ...]. `publish` sends changed weights and waits until every server has them, then compares
what each got, tensor by tensor and byte by byte, with the full tensors put together by DTensor itself. `flip` and
`trailer` do so, too, and damage a bucket on its way to one server. `fails` expects rank 0's error. [`loop`, first
version, seconds, pause] publishes again and again for so long, then drains; [`soak`, first version, file, pause, chance
of a flip] does so until the file exists and servers have refused two flips. [`cut`, version, seconds] publishes and
goes on after so long, in the middle of the push.

Each rank writes {"acts": [...], "events": what the fleet was told, "close_s", "threads": ours that are left, "ended":
time.time() at the end of main, "most_in_flight"} to OUT.RANK.
"""

import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import requests
import torch
import torch.distributed as dist

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.weight_sync import sync as sync_module
from torchtitan.grpo.weight_sync.link import GroupLink
from torchtitan.grpo.weight_sync.published import model_weights
from torchtitan.grpo.weight_sync.sync import WeightSync, wire_dtype
from torchtitan.grpo.weight_wire.buckets import TRAILER_BYTES
from torchtitan.grpo.weight_wire.transport import Group
from torchtitan.grpo.weight_wire.version_names import version_of

send = Group.broadcast
post = GroupLink._post
most_in_flight = 0
SETTLE_S = 40.0


class WatchedFleet(Fleet):
    """Records its events."""

    events: list[list]

    def admit(self, server: Server, version: int) -> None:
        self.events.append([time.monotonic(), "admit", server.url, version])
        super().admit(server, version)

    def withdraw(self, server: Server, reason: str, lost: bool = True) -> None:
        self.events.append([time.monotonic(), "lost" if lost else "slow", server.url, reason])
        super().withdraw(server, reason, lost)


def post_and_count(self: GroupLink, wire: torch.Tensor, *args) -> None:
    global most_in_flight
    post(self, wire, *args)
    most_in_flight = max(most_in_flight, len(self._in_flight))


def damage(kind: str):
    """Have the third bucket of one push leave rank 0 with one bit flipped, or with another version in its trailer. The
    one server that gets it is the first to be sent that bucket."""
    first, kept = threading.Lock(), []  # several servers' threads send

    def broadcast(self: Group, tensor: torch.Tensor) -> dist.Work:
        if tensor[-TRAILER_BYTES:].view(torch.int64)[1] == 2 and first.acquire(blocking=False):
            tensor = tensor.clone()
            kept.append(tensor)
            if kind == "flip":
                tensor[(tensor.numel() - TRAILER_BYTES) // 2] ^= 1
            else:
                tensor[-TRAILER_BYTES:].view(torch.int64)[0] -= 1
        return send(self, tensor)

    return broadcast


def flip_at_random(chance: float, rng: random.Random):
    """Flip a random bit of any bucket to any server, with this probability."""
    kept: list[torch.Tensor] = []

    def broadcast(self: Group, tensor: torch.Tensor) -> dist.Work:
        if rng.random() < chance:
            tensor = tensor.clone()
            tensor[rng.randrange(tensor.numel())] ^= 1 << rng.randrange(8)
            kept.append(tensor)
        return send(self, tensor)

    return broadcast


def digest(tensors: dict[str, list]) -> str:
    """As `receiver_process` sums up its answer to /tensors."""
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def digests(model: torch.nn.Module, source, dtype: torch.dtype) -> dict[str, list]:
    """What a server must hold, by a path that shares nothing with the packer: DTensor's own full tensors."""
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
            local.mul_(-1.0 + (version % 7) / 64).add_((version % 5) / 128 + 1e-3)


def main(job: dict) -> None:
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
    config.parallelism.tensor_parallel_degree = job["tp"]
    config.activation_checkpoint.mode = "full"
    dist_utils.init_distributed(config.comm, base_folder=".")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    dims = ParallelDims(1, world // job["tp"], 1, job["tp"], 1, 1, 1, world)
    source = resolve_model(SimpleNamespace(hf_assets_path=job["folder"], weights="hf"), 64)
    model = build_model(source, config, dims, device)
    load_hf_weights(model, source, job["folder"])

    def make(url: str) -> Server:
        return Server(url, VllmControl(url, None, job["sync"]["timeout_seconds"]), engine=ENGINES["vllm"])

    fleet = WatchedFleet(job["urls"], make, job.get("min_servers", 1)) if rank == 0 else None
    WatchedFleet.events = []
    settings = job_config.WeightSync(**job["sync"])
    sync_module.NUM_BUFFERS = job.get("num_buffers", 2)
    published = model_weights(model, source.adapter, wire_dtype(settings, device), source.tied)
    sync = WeightSync(published, settings, fleet, device)
    GroupLink._post = post_and_count
    sync.connect()
    dtype = getattr(torch, job["sync"]["dtype"])

    def step(version: int) -> dict[str, list]:
        """An optimizer step, as weight sync sees it. Returns what servers must hold from now on."""
        sync.order_writes_after()
        change(model, version)
        return digests(model, source, dtype)

    def settle(version: int) -> None:
        """Rank 0: wait until every server serves this version."""
        deadline = time.monotonic() + SETTLE_S
        while not all(server.in_traffic and server.version == version for server in fleet.servers):
            sync.check()
            assert time.monotonic() < deadline, f"version {version}: {fleet.describe()}"
            time.sleep(0.01)

    def act_publish(kind: str, version: int) -> dict:
        expected = step(version)
        Group.broadcast = damage(kind) if kind in ("flip", "trailer") else send
        started = time.monotonic()
        sync.publish(version)
        act = {"publish_s": time.monotonic() - started}
        if fleet is not None:
            act["had_it"] = [server.version == version for server in fleet.servers]
        else:
            act["gave"] = sync._thread.followed
        sync.drain()
        if fleet is not None:
            settle(version)
            sync.drain()  # a server is in traffic before its push has ended
            act["tensors"] = len(expected)
            act["equal"] = [requests.get(url + "/tensors", timeout=10).json() == expected for url in job["urls"]]
            act["paused"] = [server.control.is_paused() for server in fleet.servers]
            act["served"] = [version_of(server.control.weight_version()) for server in fleet.servers]
        reports = [report for report in sync.finished() if report.servers]
        act["reports"] = [[r.version, r.bytes, r.buckets, r.missed, r.waited, r.alone] for r in reports]
        act["seconds"] = [[r.seconds, r.servers] for r in reports]
        dist.barrier()
        return act

    def act_fails(kind: str, version: int) -> dict:
        step(version)
        started = time.monotonic()
        act = {"error": ""}
        try:
            sync.publish(version)
        except FleetError as error:
            act["error"] = str(error)
        return act | {"publish_s": time.monotonic() - started}

    def act_loop(kind: str, version: int, seconds: float, pause_s: float) -> dict:
        end = time.monotonic() + seconds
        return publish_until(lambda: time.monotonic() > end, version, pause_s)

    def act_soak(kind: str, version: int, stop: str, pause_s: float, flips: float) -> dict:
        def over() -> bool:
            return Path(stop).exists() and sum("checksum" in str(event[3]) for event in WatchedFleet.events) >= 2

        Group.broadcast = flip_at_random(flips, random.Random(job.get("seed", 0)))
        return publish_until(over, version, pause_s)

    def publish_until(over: Callable[[], bool], version: int, pause_s: float) -> dict:
        """Publish version after version, then a last one, which every server must get."""
        expected, publish_s, published = {}, [], {}
        more = torch.ones(1)
        while more.item():
            expected[version] = digest(step(version))
            began = time.monotonic()
            sync.publish(version)
            publish_s.append(time.monotonic() - began)
            published[version] = began
            change(model, -1)  # what comes after the publish must be in no version
            time.sleep(pause_s)
            version += 1
            more.fill_(not over())
            dist.broadcast(more, 0)  # rank 0's clock, and only rank 0 has a fleet
        Group.broadcast = send
        expected[version] = digest(step(version))
        sync.publish(version)
        sync.drain()
        if fleet is not None:
            settle(version)
            sync.drain()
        reports = [[r.version, r.seconds["total"], r.alone] for r in sync.finished()]
        dist.barrier()
        return {
            "expected": expected, "publish_s": publish_s, "published": published, "newest": version, "reports": reports
        }  # fmt: skip

    def act_cut(kind: str, version: int, seconds: float) -> dict:
        step(version)
        started = time.monotonic()
        sync.publish(version)
        publish_s = time.monotonic() - started
        time.sleep(seconds)
        return {"publish_s": publish_s}

    kinds = {"fails": act_fails, "loop": act_loop, "soak": act_soak, "cut": act_cut}
    seen = []
    for kind, version, *more in job["acts"]:
        act = kinds.get(kind, act_publish)(kind, version, *more)
        seen.append({"kind": kind, "version": version} | act)
    started = time.monotonic()
    sync.close()
    close_s = time.monotonic() - started
    dist.destroy_process_group()
    destroy_s = time.monotonic() - started - close_s
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and (
        threads := [thread.name for thread in threading.enumerate() if thread.name.startswith("weight-sync")]
    ):
        time.sleep(0.02)
    record = {"acts": seen, "events": WatchedFleet.events, "close_s": close_s, "threads": threads}
    record |= {"most_in_flight": most_in_flight, "destroy_s": destroy_s}
    with open(f"{job['out']}.{rank}", "w") as file:
        json.dump(record | {"ended": time.time()}, file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
