"""`exposed`: what weight sync takes from a training loop: none, blocking, in the background, and with faults."""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import requests
import torch
from bench_common.output import Output, Row

from torchtitan.grpo.config import job_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedRow, PackedSample

from .trainer import Ranks, Servers, build, connected, hf_tensors, shape_source

COLUMNS = "run steps step_s step_ratio extra_ms exposed_ms exposed_max_ms push_s pushed skipped servers"
_SAFE_SHARE = 0.8
_AFTER_FAULT_S = 5.0
_FAULT_STEP = 2


def parameter_dtype(parameters: int, memory_bytes: int, ranks: int) -> str:
    """float32, or bfloat16 if float32 with gradients, AdamW state and two bfloat16 snapshots would not fit."""
    needed = parameters * (4 * 4 + 2 * 2) / ranks
    return "float32" if needed <= _SAFE_SHARE * memory_bytes else "bfloat16"


def fault_steps(step_s: float, sleep_s: float, at_least: int) -> int:
    """Steps that last until a server that sleeps has woken up and caught up."""
    return max(at_least, _FAULT_STEP + math.ceil((sleep_s + _AFTER_FAULT_S) / max(step_s, 1e-3)))


def random_row(tokens: int, document_tokens: int, vocab_size: int, rank: int) -> PackedRow:
    """A packed row of `tokens` tokens in documents, each half prompt and half answer."""
    generator = torch.Generator().manual_seed(rank)
    samples = []
    for _ in range(tokens // document_tokens):
        ids = torch.randint(vocab_size, (document_tokens + 1,), generator=generator).tolist()
        half = document_tokens // 2
        samples.append(PackedSample(ids[:half], ids[half:], 1.0, 1.0, [0.0] * len(ids[half:])))
    return pack(samples, tokens, 1)[0][0]


class Loop:
    """A training loop on one packed row. `run` times steps; the weights change in each."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, source, param_dtype: str):
        self.ranks = ranks
        self.model = build(source, ranks, param_dtype, ac="full")
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # Fused needs no memory of its own; foreach would take that of the parameters once more.
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=ranks.device.type == "cuda")
        row = random_row(args.tokens, args.document_tokens, source.model_args.vocab_size, ranks.rank)
        self.row = row.to(ranks.device)
        self.answer_tokens = int(row.loss_mask.sum()) * ranks.size
        self.version = 0

    def run(
        self, steps: int, sync=None, wait: bool = False, fault: Callable[[], None] | None = None
    ) -> tuple[list[float], list[float]]:
        """(seconds of each step, exposed seconds of each step), the largest over the ranks."""
        step_s, exposed_s = [], []
        self.ranks.synchronize()
        gc.collect()
        gc.disable()  # as a trainer does, which collects between some steps
        try:
            for step in range(steps):
                if fault is not None and step == _FAULT_STEP:
                    fault()
                seconds, exposed = self._step(sync, wait)
                step_s.append(seconds)
                exposed_s.append(exposed)
        finally:
            gc.enable()
        return self.ranks.largest(step_s), self.ranks.largest(exposed_s)

    def _step(self, sync, wait: bool) -> tuple[float, float]:
        started = time.perf_counter()
        logprobs, _ = self.model(self.row, 1.0)
        loss = -logprobs.sum() / self.answer_tokens
        loss.backward()
        exposed_s = 0.0
        if sync is not None:
            before = time.perf_counter()
            sync.order_writes_after()
            exposed_s += time.perf_counter() - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # as a trainer does that logs its gradient norm
        self.version += 1
        if sync is not None:
            before = time.perf_counter()
            sync.publish(self.version, wait=wait)
            exposed_s += time.perf_counter() - before
            sync.check()
        return time.perf_counter() - started, exposed_s


def exposed(args: argparse.Namespace, ranks: Ranks, out: Output, resources: ExitStack) -> None:
    source = shape_source(args.shape, args.document_tokens)
    dtype = "float32"
    if ranks.device.type == "cuda":
        parameters = sum(shape.numel() for shape in hf_tensors(source).values())
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        dtype = parameter_dtype(parameters, memory, ranks.size)
    loop = Loop(args, ranks, source, dtype)
    servers = Servers(args, ranks, resources)
    # The run: name, whether publish blocks, what happens to the first receiver process after two steps.
    runs = [("no weight sync", None, None), ("blocking", True, None), ("background", False, None)]
    runs.append(("no weight sync, again", None, None))
    if args.receivers and args.sleep_s:
        runs.append((f"background, a server sleeps {args.sleep_s:g} s", False, {"sleep_s": args.sleep_s}))
    if args.kill:
        runs.append(("background, a server is killed", False, {"kill": True}))

    loop.run(args.warmup)
    rows: list[Row] = []
    for name, wait, fault in runs:
        steps = args.steps
        if fault is not None:
            steps = int(ranks.agree(fault_steps(rows[0]["step_s"], args.sleep_s, args.steps)))
        row = {"shape": args.shape, "ranks": ranks.size, "param_dtype": dtype, "run": name, "steps": steps}
        rows.append(row | _one_run(args, loop, source, servers, steps, wait, fault))
        out.say(f"{name}: {1e3 * rows[-1]['step_s']:.1f} ms a step")
    alone_s = statistics.fmean(row["step_s"] for row in rows if row["run"].startswith("no weight sync"))
    for row in rows:
        row |= {"step_ratio": row["step_s"] / alone_s, "extra_ms": 1e3 * (row["step_s"] - alone_s)}
    title = f"Exposed time, Qwen3's {args.shape} shape, {dtype} parameters, {args.tokens} tokens a rank"
    out.table(f"{title}, {ranks.describe()}", COLUMNS, rows)
    ranks.synchronize()


def _one_run(
    args: argparse.Namespace, loop: Loop, source, servers: Servers, steps: int, wait: bool | None, fault: dict | None
) -> Row:
    if wait is None:
        step_s, _ = loop.run(steps)
        return {"step_s": statistics.median(step_s), "step_s_each": step_s}
    settings = job_config.WeightSync(
        transport=args.transport, async_weight_update=not wait, timeout_seconds=args.timeout_s
    )
    sync, fleet = connected(loop.model, source, settings, servers.urls, loop.ranks)

    def spoil() -> None:
        if loop.ranks.rank != 0:
            return
        try:
            requests.post(f"{servers.faulty}/fault", json=fault, timeout=args.timeout_s).raise_for_status()
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            if "kill" not in fault:  # a bucket on its way may kill it before it has answered
                raise

    try:
        sync.publish(loop.version, wait=True)  # connections are warm, all servers are in traffic
        before = len(sync.finished()) if fleet is not None else 0
        step_s, exposed_s = loop.run(steps, sync, wait, spoil if fault is not None else None)
        sync.drain()
        sync.check()
        reports = sync.finished() if fleet is not None else []
    finally:
        sync.close()
    row = {"step_s": statistics.median(step_s), "step_s_each": step_s, "exposed_s_each": exposed_s}
    row |= {"exposed_ms": 1e3 * statistics.median(exposed_s), "exposed_max_ms": 1e3 * max(exposed_s)}
    if fleet is None:
        return row
    if before != 1:
        raise UserError(f"the first blocking publish gave {before} reports, expected 1")
    # A server that is fed alone reports a version that others had before.
    pushed = {report.version for report in reports}
    row["pushed"], row["skipped"] = len(pushed), steps - len(pushed)
    row["push_s"] = statistics.median(report.seconds["total"] for report in reports)
    in_traffic = sum(server.in_traffic for server in fleet.servers)
    newest = sum(server.version == loop.version for server in fleet.servers)
    row["servers"] = f"{newest} of {len(fleet.servers)} newest, {in_traffic} in traffic"
    return row
