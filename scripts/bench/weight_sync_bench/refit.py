"""`refit`: whole blocking publishes from FSDP2 shards, their phases, and raw broadcasts of as many bytes."""

import itertools
import time
from contextlib import ExitStack

from bench_common.output import Output, Row, cell, medians

from torchtitan.grpo.config import job_config
from torchtitan.grpo.errors import UserError

from .baselines import raw_broadcasts
from .trainer import Ranks, Servers, build, change, connected, shape_source

COLUMNS = {
    "servers": "servers",
    "num_buffers": "num_buffers",
    "bucket_mib": "bucket, MiB",
    "buckets": "buckets",
    "total_ms": "total, ms",
    "pause_ms": "pause",
    "snapshot_ms": "snapshot",
    "gather_ms": "gather",
    "pack_ms": "pack",
    "wire_ms": "wire",
    "apply_ms": "apply",
    "acknowledge_ms": "acknowledge",
    "gb_per_s": "GB/s",
    "wire_gb_per_s": "wire GB/s",
}
RAW_COLUMNS = {"pieces": "pieces", "total_ms": "total, ms", "gb_per_s": "GB/s"}


def refit(args, ranks: Ranks, out: Output, resources: ExitStack) -> None:
    source = shape_source(args.shape)
    model = build(source, ranks, "float32" if args.param_dtype == "auto" else args.param_dtype)
    servers = Servers(args, ranks, resources)
    available = int(ranks.agree(len(servers.urls)))
    counts = args.servers or sorted({1, available})
    if max(counts) > available:
        raise UserError(f"--servers {max(counts)}: only {available} servers are given by --urls and --receivers")
    rows: list[Row] = []
    for count, bucket_mib, num_buffers in itertools.product(counts, args.bucket_mib, args.num_buffers):
        settings = job_config.WeightSync(
            transport=args.transport,
            num_buffers=num_buffers,
            bucket_mib_max=bucket_mib,
            timeout_seconds=args.timeout_s,
            straggler_seconds=args.timeout_s,  # every server counts, however slow
        )
        row = {"shape": args.shape, "ranks": ranks.size, "servers": count, "num_buffers": num_buffers}
        row |= {"bucket_mib": bucket_mib}
        rows.append(row | publishes(args, ranks, model, source, settings, servers.urls[:count]))
        out.say(f"{count} server(s), num_buffers {num_buffers}, {bucket_mib} MiB: {rows[-1].get('total_ms', 0):.1f} ms")
    gigabytes = rows[0].get("bytes", 0) / 1e9
    title = f"Refit of Qwen3's {args.shape} shape, {cell(gigabytes)} GB, {ranks.describe()}"
    out.table(f"{title}: medians of {args.repeats}, ms", COLUMNS, rows)
    raw_rows: list[Row] = []
    if ranks.rank == 0 and args.raw_gpu is not None:
        pieces = sorted({1, *(row["buckets"] for row in rows)})
        raw_rows = raw_broadcasts(args, ranks.device, rows[0]["bytes"], pieces)
        out.table(f"Raw broadcast of {cell(gigabytes)} GB from rank 0 to one process", RAW_COLUMNS, raw_rows)
    if ranks.rank == 0:
        for line in comparisons(rows, raw_rows):
            out.say(line)
    ranks.synchronize()


def publishes(args, ranks: Ranks, model, source, settings, urls: list[str]) -> Row:
    """Medians of `--repeats` blocking publishes over a connection of their own; {} on ranks other than 0."""
    sync, fleet = connected(model, source, settings, urls, ranks)
    walls: dict[int, float] = {}
    reports = {}
    try:
        for version in range(args.warmup + args.repeats):
            change(model)
            ranks.synchronize()
            started = time.perf_counter()
            sync.publish(version, wait=True)
            walls[version] = time.perf_counter() - started
            sync.order_writes_after()
            if ranks.rank == 0:
                reports |= {report.version: report for report in sync.finished()}
                check_acknowledged(version, urls, reports, fleet)
        sync.check()
    finally:
        sync.close()
    if ranks.rank != 0:
        return {}
    timed = [version for version in walls if version >= args.warmup]
    seconds = medians([{"total": walls[v]} | phases(reports[v]) for v in timed])
    last = reports[timed[-1]]
    row = {"bytes": last.bytes, "buckets": last.buckets, "total_s_each": [walls[v] for v in timed]}
    row |= {f"{phase}_ms": 1e3 * value for phase, value in seconds.items()}
    row["gb_per_s"] = last.bytes / seconds["total"] / 1e9
    row["wire_gb_per_s"] = last.bytes / seconds["wire"] / 1e9
    return row


def phases(report) -> dict[str, float]:
    """Seconds of each phase; of the servers' phases, the slowest server's."""
    seconds = {phase: report.seconds[phase] for phase in ("snapshot", "gather", "pack")}
    for phase in ("pause", "wire", "apply", "acknowledge"):
        seconds[phase] = max(server[phase] for server in report.servers.values())
    return seconds


def check_acknowledged(version: int, urls: list[str], reports: dict, fleet) -> None:
    """A time counts only if every server has acknowledged the version in that very push."""
    pushed_to = reports[version].servers if version in reports else {}
    missing = [s for s in fleet.servers if s.url not in pushed_to or s.version != version or not s.in_traffic]
    if missing or len(fleet.servers) != len(urls):
        said = "; ".join(f"{server.url} is at version {server.version}: {server.reason}" for server in missing)
        raise UserError(f"version {version} was not acknowledged by every server: {said}")


def comparisons(rows: list[Row], raw_rows: list[Row]) -> list[str]:
    """What the issue asks of these numbers, in words."""
    lines = []
    for count, mib in dict.fromkeys((row["servers"], row["bucket_mib"]) for row in rows):
        same = [row for row in rows if (row["servers"], row["bucket_mib"]) == (count, mib)]
        best = min(same, key=lambda row: row["total_ms"])
        what = f"{count} server(s), {mib} MiB: {best['total_ms']:.1f} ms with num_buffers {best['num_buffers']}"
        single = next((row for row in same if row["num_buffers"] == 1), None)
        if single is not None and best is not single:
            what += f", {single['total_ms'] / best['total_ms']:.2f}x as fast as with one"
        if raw_rows:
            raw = min(raw_rows, key=lambda row: row["total_ms"])
            what += f", {100 * raw['total_ms'] / best['total_ms']:.0f} % of the raw broadcast's speed"
            what += f" (its wire {100 * raw['total_ms'] / best['wire_ms']:.0f} %)"
        lines.append(what)
    by_servers = {row["servers"]: row["total_ms"] for row in reversed(rows)}
    if len(by_servers) > 1:
        few, many = min(by_servers), max(by_servers)
        each = (by_servers[many] - by_servers[few]) / (many - few)
        lines.append(f"each further server adds {each:.1f} ms ({few} to {many} servers, first settings)")
    return lines
