"""`scale`: what publish and a push cost the trainer as the number of servers grows."""

import argparse
import statistics
import threading
import time
from contextlib import ExitStack
from itertools import chain

from bench_common.output import Output, Row

from torchtitan.grpo.config import job_config
from torchtitan.grpo.errors import UserError

from .receivers import Receivers, raise_open_files_limit
from .trainer import Ranks, build, change, connected, shape_source

COLUMNS = "servers connect_s publish_us publish_max_us push_s cpu_s threads"
PROCESSES = 2
_SAMPLE_S = 0.005


class ThreadCount:
    """`most`: the most Python threads seen in the blocks run with it, without its own."""

    def __init__(self) -> None:
        self.most = 0

    def __enter__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.most = max(self.most, threading.active_count() - 1)


def scale(args: argparse.Namespace, ranks: Ranks, out: Output, resources: ExitStack) -> None:
    raise_open_files_limit()
    source = shape_source("tiny")
    model = build(source, ranks, "float32")
    processes: list[Receivers] = []
    for _ in range(PROCESSES):
        processes.append(Receivers(-(-max(args.counts) // PROCESSES), "cpu"))
        resources.callback(processes[-1].close)
    urls = list(chain.from_iterable(zip(*(process.urls for process in processes), strict=True)))
    rows: list[Row] = []
    for count in args.counts:
        rows.append({"servers": count} | measure(args, ranks, model, source, urls[:count]))
        out.say(f"{count} server(s): push {rows[-1]['push_s']:.3f} s, publish {rows[-1]['publish_us']:.0f} us")
    payload = rows[0]["bytes"] / 1e6
    title = f"One publish of {payload:.1f} MB against fake servers in {PROCESSES} processes, {ranks.describe()}"
    out.table(f"{title}: medians of {args.repeats}", COLUMNS, rows)


def measure(args: argparse.Namespace, ranks: Ranks, model, source, urls: list[str]) -> Row:
    """Medians over `--repeats` versions that every server has acknowledged."""
    settings = job_config.WeightSync(
        async_weight_update=True,
        bucket_mib_max=1,  # four buckets
        timeout_seconds=args.timeout_s,
        straggler_seconds=args.timeout_s,  # every server takes part in each push
    )
    started = time.perf_counter()
    sync, fleet = connected(model, source, settings, urls, ranks)
    connect_s = time.perf_counter() - started
    publish_s, cpu_s, push_s = [], [], []
    threads = ThreadCount()
    try:
        for version in range(args.warmup + args.repeats):
            sync.order_writes_after()
            change(model)
            cpu_before, before = time.process_time(), time.perf_counter()
            sync.publish(version)
            publish_s.append(time.perf_counter() - before)
            with threads:
                sync.drain()
            cpu_s.append(time.process_time() - cpu_before)
            new = sync.finished()
            sync.check()
            behind = [server.describe() for server in fleet.servers if server.version != version]
            if behind or len(new) != 1:
                raise UserError(
                    f"version {version}, {len(new)} pushes: not acknowledged by {'; '.join(behind) or 'all'}"
                )
            push_s.append(new[0].seconds["total"])
    finally:
        sync.close()
    timed = slice(args.warmup, None)
    return {
        "bytes": new[0].bytes,
        "connect_s": connect_s,
        "publish_us": 1e6 * statistics.median(publish_s[timed]),
        "publish_max_us": 1e6 * max(publish_s[timed]),
        "push_s": statistics.median(push_s[timed]),
        "cpu_s": statistics.median(cpu_s[timed]),
        "threads": threads.most,
    }
