"""Whole publishes from FSDP2 shards, and their phases."""

import argparse
import os
import time
from pathlib import Path

import torch
import urllib3
from bench_common.output import Output, Row, cell, medians

from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.vllm import GENERATE_ROUTE
from torchtitan.grpo.errors import UserError

from .trainer import Ranks, build, change, connected, shape_source

COLUMNS = """servers buckets total_ms exposed_ms answered_ms stopped_ms pause_ms snapshot_ms gather_ms pack_ms wire_ms
    apply_ms acknowledge_ms gb_per_s wire_gb_per_s device_grown_mib host_grown_mib"""


def refit(args: argparse.Namespace, ranks: Ranks, out: Output) -> None:
    """Medians of `--repeats` publishes after `--warmup`. Each has arrived before the next begins, with --background
    too."""
    source = shape_source(args.shape, args.lora)
    model = build(source, ranks, args.dtype)
    settings = job_config.WeightSync(
        transport=args.transport,
        async_weight_update=args.background,
        timeout_seconds=args.timeout_s,
        straggler_seconds=args.timeout_s,  # every server counts, however slow
    )
    sync, fleet = connected(model, source, settings, args.urls, ranks)
    samples, held = [], []
    try:
        for version in range(args.warmup + args.repeats):
            change(model)
            ranks.synchronize()
            started = time.perf_counter()
            sync.publish(version, wait=not args.background)
            sync.order_writes_after()
            exposed = time.perf_counter() - started
            if args.background:
                sync.drain()
            total = time.perf_counter() - started
            if ranks.rank == 0:
                reports = {report.version: report for report in sync.finished()}
                check_acknowledged(version, args.urls, reports, fleet)
                ask(args.urls, args.timeout_s)
                answered = time.perf_counter() - started
                samples.append({"total": total, "exposed": exposed, "answered": answered} | phases(reports[version]))
            if version >= args.warmup - 1:
                held.append(memory_in_use(ranks.device))
        sync.check()
    finally:
        sync.close()
    if ranks.rank == 0:
        row = {"shape": args.shape, "ranks": ranks.size, "servers": len(args.urls)}
        row |= row_of(samples[args.warmup :], reports[version], held)
        what = f"adapters of rank {args.lora} beside " * bool(args.lora)
        size = f"{cell(row['bytes'] / 1e9)} GB"
        title = f"Refit of {what}Qwen3's {args.shape} shape, {size}, {ranks.describe()}"
        out.table(f"{title}: medians of {args.repeats}", COLUMNS, [row])
    ranks.synchronize()


def row_of(samples: list[dict[str, float]], last, held: list[tuple[int, int]]) -> Row:
    seconds = medians(samples)
    row: Row = {"bytes": last.bytes, "buckets": last.buckets, "total_s_each": [sample["total"] for sample in samples]}
    row |= {f"{phase}_ms": 1e3 * value for phase, value in seconds.items()}
    row["device_grown_mib"], row["host_grown_mib"] = (
        (end - start) / 2**20 for start, end in zip(held[0], held[-1], strict=True)
    )
    row["gb_per_s"] = last.bytes / seconds["total"] / 1e9
    row["wire_gb_per_s"] = last.bytes / seconds["wire"] / 1e9
    return row


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes in use on the trainer's GPU, by all processes, so by a server there too; resident bytes of this process."""
    used = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return used, resident


def phases(report) -> dict[str, float]:
    """Seconds of each phase; of the servers' phases, the slowest server's."""
    seconds = {phase: report.seconds[phase] for phase in ("snapshot", "gather", "pack")}
    for phase in ("pause", "wire", "apply", "acknowledge", "stopped"):
        seconds[phase] = max(server[phase] for server in report.servers.values())
    return seconds


def ask(urls: list[str], timeout_s: float) -> None:
    """One token from each server, one after the other."""
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1, "detokenize": False}}
    for url in urls:
        reply = urllib3.request("POST", url + GENERATE_ROUTE, json=body, timeout=timeout_s, retries=False)
        if reply.status != 200:
            raise UserError(f"{url} does not answer: HTTP {reply.status} {reply.data[:300]!r}")


def check_acknowledged(version: int, urls: list[str], reports: dict, fleet) -> None:
    """A time counts only if every server has acknowledged the version in that very push."""
    pushed_to = reports[version].servers if version in reports else {}
    missing = [s for s in fleet.servers if s.url not in pushed_to or s.version != version or not s.in_traffic]
    if missing or len(fleet.servers) != len(urls):
        said = "; ".join(f"{server.url} is at version {server.version}: {server.reason}" for server in missing)
        raise UserError(f"version {version} was not acknowledged by every server: {said}")
