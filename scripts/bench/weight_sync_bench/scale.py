"""`scale`: what publish costs the trainer, and what a push costs, as the number of servers grows."""

import os
import statistics
import threading
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from bench_common.output import Output, Row, growth_exponent, line_through

from torchtitan.grpo.config import job_config
from torchtitan.grpo.errors import UserError

from .receivers import Receivers, raise_open_files_limit
from .trainer import Ranks, build, change, connected, shape_source

COLUMNS = {
    "servers": "servers",
    "connect_s": "connect, s",
    "publish_us": "publish, us",
    "publish_max_us": "publish, max us",
    "push_s": "push, s",
    "cpu_s": "trainer CPU, s a push",
    "threads": "Python threads",
    "os_threads": "OS threads",
}
_TASKS = Path("/proc/self/task")
_SAMPLE_S = 0.005


class ThreadCount:
    """The most threads seen in the blocks run with it: Python's, and all of the process where /proc tells (else 0)."""

    def __init__(self) -> None:
        self.python = self.os = 0

    def __enter__(self) -> "ThreadCount":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.python = max(self.python, threading.active_count() - 1)  # less this one
            self.os = max(self.os, len(os.listdir(_TASKS)) - 1 if _TASKS.is_dir() else 0)
            if self._stop.wait(_SAMPLE_S):
                return


def scale(args, ranks: Ranks, out: Output, resources: ExitStack) -> None:
    raise_open_files_limit()
    source = shape_source(args.shape)
    model = build(source, ranks, "float32")
    largest = max(args.counts)
    each = -(-largest // args.processes)
    processes: list[Receivers] = []
    for _ in range(min(args.processes, largest)):
        processes.append(Receivers(each, "cpu"))
        resources.callback(processes[-1].close)
    urls = list(chain.from_iterable(zip(*(process.urls for process in processes), strict=True)))
    rows: list[Row] = []
    for count in args.counts:
        rows.append({"shape": args.shape, "servers": count} | measure(args, ranks, model, source, urls[:count]))
        out.say(f"{count} server(s): push {rows[-1]['push_s']:.3f} s, publish {rows[-1]['publish_us']:.0f} us")
    payload = rows[0]["bytes"] / 1e6
    title = f"One publish of {payload:.1f} MB against fake servers in {len(processes)} process(es), {ranks.describe()}"
    out.table(f"{title}: medians of {args.repeats}", COLUMNS, rows)
    for line in growth(rows):
        out.say(line)
    if args.plot:
        plot(rows, args.plot)


def measure(args, ranks: Ranks, model, source, urls: list[str]) -> Row:
    settings = job_config.WeightSync(
        async_weight_update=True,
        num_buffers=args.num_buffers,
        bucket_mib_max=args.bucket_mib,
        timeout_seconds=args.timeout_s,
        straggler_seconds=args.timeout_s,  # every server takes part in each push
    )
    started = time.perf_counter()
    sync, fleet = connected(model, source, settings, urls, ranks)
    connect_s = time.perf_counter() - started
    publish_s, cpu_s, push_s = [], [], []
    threads = ThreadCount()
    reports = []
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
            reports += new
            push_s.append(new[0].seconds["total"])
    finally:
        sync.close()
    timed = slice(args.warmup, None)
    return {
        "bytes": reports[-1].bytes,
        "connect_s": connect_s,
        "publish_us": 1e6 * statistics.median(publish_s[timed]),
        "publish_max_us": 1e6 * max(publish_s[timed]),
        "push_s": statistics.median(push_s[timed]),
        "cpu_s": statistics.median(cpu_s[timed]),
        "threads": threads.python,
        "os_threads": threads.os,
    }


def growth(rows: list[Row]) -> list[str]:
    """How each quantity grows with the number of servers."""
    if len(rows) < 2:
        return []
    servers = [row["servers"] for row in rows]
    lines = []
    for key, what, unit in (
        ("publish_us", "publish", "us"),
        ("push_s", "a push", "s"),
        ("cpu_s", "trainer CPU a push", "s"),
        ("threads", "Python threads", ""),
    ):
        values = [row[key] for row in rows]
        offset, slope = line_through(servers, values)
        exponent = growth_exponent(servers, [max(value, 1e-9) for value in values])
        lines.append(f"{what}: about {offset:.3g} + {slope:.3g} {unit} per server; grows as servers^{exponent:.2f}")
    return lines


def plot(rows: list[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    servers = [row["servers"] for row in rows]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, curves, label in (
        (axes[0], {"push_s": "wall clock", "cpu_s": "trainer CPU"}, "one push, s"),
        (axes[1], {"publish_us": "median", "publish_max_us": "largest"}, "publish() of the main thread, us"),
        (axes[2], {"threads": "Python", "os_threads": "all"}, "threads of the trainer"),
    ):
        for key, name in curves.items():
            axis.plot(servers, [row[key] for row in rows], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="servers", ylabel=label)
        axis.set_xticks(servers, [str(count) for count in servers])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
