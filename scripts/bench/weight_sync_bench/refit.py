"""`refit`: whole blocking publishes from FSDP2 shards, their phases, and raw broadcasts of as many bytes."""

import argparse
import gc
import itertools
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import urllib3
from bench_common.output import Output, Row, cell, medians

from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.vllm import GENERATE_ROUTE
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.rendezvous import host_store
from torchtitan.grpo.weight_wire.transport import Group, in_thread

from .raw import LOCALHOST, broadcast, receive
from .receivers import Child
from .trainer import Ranks, Servers, bounded, build, change, connected, shape_source

COLUMNS = """servers num_buffers bucket_mib buckets total_ms exposed_ms answered_ms stopped_ms pause_ms snapshot_ms
    gather_ms pack_ms wire_ms apply_ms acknowledge_ms gb_per_s wire_gb_per_s
    device_grown_mib host_grown_mib"""


def refit(args: argparse.Namespace, ranks: Ranks, out: Output, resources: ExitStack) -> None:
    source = shape_source(args.shape, lora_rank=args.lora, layers=args.layers)
    model = build(source, ranks, args.dtype)
    servers = Servers(args, ranks, resources)
    rows: list[Row] = []
    counts = args.servers or sorted({1, servers.count})
    for count, bucket_mib, num_buffers in itertools.product(counts, args.bucket_mib, args.num_buffers):
        settings = job_config.WeightSync(
            transport=args.transport,
            async_weight_update=args.background,
            num_buffers=num_buffers,
            num_snapshots=args.snapshots,
            bucket_mib_max=bucket_mib,
            timeout_seconds=args.timeout_s,
            straggler_seconds=args.timeout_s,  # every server counts, however slow
        )
        row = {"shape": args.shape, "ranks": ranks.size, "servers": count, "num_buffers": num_buffers}
        row |= {"bucket_mib": bucket_mib}
        rows.append(row | publishes(args, ranks, model, source, settings, servers.urls[:count]))
        out.say(f"{count} server(s), num_buffers {num_buffers}, {bucket_mib} MiB: {rows[-1].get('total_ms', 0):.1f} ms")
    size = f"{cell(rows[0].get('bytes', 0) / 1e9)} GB"
    what = f"adapters of rank {args.lora} beside " * bool(args.lora)
    title = f"Refit of {what}Qwen3's {args.shape} shape, {size}, {ranks.describe()}"
    out.table(f"{title}: medians of {args.repeats}", COLUMNS, rows)
    if ranks.rank == 0 and args.raw_gpu is not None:
        pieces = sorted({1, *(row["buckets"] for row in rows)})
        raw_rows = raw_broadcasts(args, ranks.device, rows[0]["bytes"], pieces)
        out.table(f"Raw broadcast of {size} from rank 0 to one process", "pieces total_ms gb_per_s", raw_rows)
    ranks.synchronize()


def publishes(args: argparse.Namespace, ranks: Ranks, model, source, settings, urls: list[str]) -> Row:
    """Medians of `--repeats` publishes over a connection of their own; {} on ranks other than 0. Each has arrived
    before the next begins, with --background too."""
    sync, fleet = connected(model, source, settings, urls, ranks)
    samples, totals, held = [], [], []
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
            totals.append(time.perf_counter() - started)
            if ranks.rank == 0:
                reports = {report.version: report for report in sync.finished()}
                check_acknowledged(version, urls, reports, fleet)
                samples.append({"total": totals[-1], "exposed": exposed} | phases(reports[version]))
                if args.urls:
                    ask(args.urls, args.timeout_s)
                    samples[-1]["answered"] = time.perf_counter() - started
            if version >= args.warmup - 1:
                held.append(memory_in_use(ranks.device))
        sync.check()
    finally:
        sync.close()
        del sync
        gc.collect()  # its snapshot would stay beside the next connection's, and 8B's do not fit twice
    if ranks.rank != 0:
        return {}
    seconds, last = medians(samples[args.warmup :]), reports[version]
    row = {"bytes": last.bytes, "buckets": last.buckets, "total_s_each": totals[args.warmup :]}
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


def raw_broadcasts(args: argparse.Namespace, device: torch.device, size: int, pieces: list[int]) -> list[Row]:
    """Broadcast `size` bytes to a child process on `--raw-gpu`, whole and in pieces: one row for each of `pieces`."""
    store, port = host_store(LOCALHOST, args.timeout_s)
    backend, rounds = "nccl" if device.type == "cuda" else "gloo", args.warmup + args.repeats
    receiver = "cpu" if device.type == "cpu" else args.raw_gpu
    child = Child(receive, port, size, backend, pieces, rounds, args.timeout_s, device=receiver)
    group = None
    try:
        flat = torch.empty(size, dtype=torch.uint8, device=device)

        joining = in_thread(lambda: Group(backend, store, 0, 2, device, args.timeout_s, LOCALHOST), "bench-join")
        group = bounded(joining, args.timeout_s, "the raw receiver to join", child.check)
        rows = []
        for count in pieces:
            seconds = [broadcast(group, flat, count, args.timeout_s, child.check) for _ in range(rounds)]
            total = statistics.median(seconds[args.warmup :])
            rows.append({"pieces": count, "bytes": size, "total_ms": 1e3 * total, "gb_per_s": size / total / 1e9})
        return rows
    finally:
        if group is not None:
            group.abort()
        child.close()
