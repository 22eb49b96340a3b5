"""A trainer without a model, in a process of its own: `python -m arrivals_bench.trainer FOLDER`.

FOLDER holds job.json; the row goes to row.json. Weights are not sent: the servers are admitted with each version.
"""

import faulthandler
import gc
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from arrivals_bench.processes import MIB, cpu_s, descendants, forget_peaks, peak_mib, pin
from async_bench.generation import generated_tokens

from torchtitan.grpo.config.batch import row_tokens
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.engines.fleet import Server
from torchtitan.grpo.model.source import resolve_and_check
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.run.rollouts import Rollouts
from torchtitan.grpo.servers.own import OwnServers

Job = dict[str, Any]
Row = dict[str, Any]

SPENT = "ready_s", "take_s", "metrics_s"
LONGEST = "gap_ms", "held_ms"
QUIET_SHARE, POLL_S = 0.1, 0.2
"""The trainer is quiet once it uses under that share of a CPU."""
RANKS = 8
"""Trainer ranks that rows are packed for."""
ATTENTION_TOKENS = 4096.0
DRAIN_S = 1.0
"""The loop goes on for so long after the last tokens, and what they cost then counts too."""
LATE_MS = 5.0
"""The heartbeat is late if it is held for longer."""
LOOP_S = 0.5
"""Small calls are made for so long before the trainer looks for a batch."""


class Trainer:
    """Takes steps from `Rollouts`, as grpo_train.py does, and trains nothing.

    Attributes:
        spent: Seconds of the main thread in the calls of `Rollouts`.
        own, children: This process, and those that `Rollouts` started, each as a list of their numbers.
    """

    def __init__(self, job: Job, resources: ExitStack) -> None:
        config = load_config(job["words"])
        source = resolve_and_check(config)
        vocab_size, assets = source.model_args.vocab_size, config.model.hf_assets_path
        tokenizer = load_tokenizer(assets, "", vocab_size)
        ids = end_token_ids(tokenizer, assets, vocab_size)
        self.urls, self.step, self.spent = job["urls"], 0, Counter[str]()
        self.ledger, servers = Ledger("cpu"), OwnServers(config, torch.device("cpu"), 1)
        self.rollouts = Rollouts(config, resources)
        self.rollouts.prepare(source, tokenizer, ids)
        self.rollouts.start(servers)
        layout = Layout(row_tokens(config), RANKS, 1, ATTENTION_TOKENS, config.training.share_prompts)
        metrics = MetricsLogger(config, config.job.dump_folder, True, config.training.steps)
        resources.callback(metrics.close)
        self.rollouts.connect(self.ledger, layout, metrics, lambda: self.step)
        resources.callback(self.rollouts.stop)
        self.own, self.children = [os.getpid()], descendants(os.getpid())
        pin(self.own, job["trainer_cpus"])
        pin(self.children, job["rollout_cpus"])
        self._admit()

    def take(self) -> None:
        """A step: its rows, its metrics, and the new version on every server."""
        self.step += 1
        with self._timed("take_s"):
            taken = self.rollouts.take(self.step)
        with self._timed("metrics_s"):
            self.rollouts.metrics([], 1.0)
            self.rollouts.log(self.step, taken.advantages)
            self.ledger.close_step()
        self._admit()

    def take_if_ready(self) -> None:
        with self._timed("ready_s"):
            is_ready = self.rollouts.is_ready()
        if is_ready:
            self.take()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[name] += time.perf_counter() - began

    def pause(self) -> None:
        """Let no more tokens arrive."""
        for server in self.servers:
            server.control.pause()

    def wait_quiet(self) -> None:
        """Until what has arrived is dealt with. --run-limit-s bounds it."""
        used_s = -1.0
        while (now_s := cpu_s(self.own + self.children)) > used_s + QUIET_SHARE * POLL_S:
            used_s = now_s
            time.sleep(POLL_S)

    def resume(self) -> None:
        for server in self.servers:
            server.control.resume()

    def arrived(self) -> float:
        """Tokens that the servers have sent since they started."""
        tokens = generated_tokens(self.urls)
        assert tokens is not None
        return tokens

    @property
    def servers(self) -> list[Server]:
        assert self.rollouts.fleet is not None
        return self.rollouts.fleet.servers

    def _admit(self) -> None:
        for server in self.servers:
            self.rollouts.fleet.admit(server, self.step)


class Heartbeat(threading.Thread):
    """Sleeps for a millisecond, again and again.

    Attributes:
        gaps: Milliseconds from one beat to the next, and without those in which it was ready and had no CPU.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gaps: list[tuple[float, float]] = []

    def run(self) -> None:
        file = os.open(f"/proc/self/task/{self.native_id}/schedstat", os.O_RDONLY)
        last, before_ns = time.perf_counter(), 0
        while True:
            time.sleep(1e-3)
            now, ready_ns = time.perf_counter(), int(os.pread(file, 100, 0).split()[1])
            gap_ms = (now - last) * 1e3
            self.gaps.append((gap_ms, gap_ms - (ready_ns - before_ns) / 1e6))
            last, before_ns = now, ready_ns


def small_calls() -> None:
    """What a training step asks of the interpreter: many short calls of torch."""
    for _ in range(10):
        hidden = torch.relu(_SMALL @ _SMALL)
        (hidden + _SMALL).sum()


_SMALL = torch.ones(32, 32)


def loop(trainer: Trainer, beat: Heartbeat, seconds: float, between: Callable[[], None]) -> Row:
    """Small calls for so many seconds, and `between` before each LOOP_S of them."""
    calls, loop_s, loop_cpu_s, beat.gaps = 0, 0.0, 0.0, []
    tokens, child_s, trainer.spent = trainer.arrived(), cpu_s(trainer.children), Counter()
    began, own_s = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        between()
        begun, cpu = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < begun + LOOP_S:
            small_calls()
            calls += 1
        loop_cpu_s += time.process_time() - cpu
        loop_s += now - begun
    all_s, own_s, child_s = time.perf_counter() - began, time.process_time() - own_s, cpu_s(trainer.children) - child_s
    found = {"calls": calls, "all_s": all_s, "loop_s": loop_s, "loop_cpu_s": loop_cpu_s}
    found |= {name: trainer.spent[name] for name in SPENT}
    found |= {"own_cpu_s": own_s, "child_cpu_s": child_s, "tokens": trainer.arrived() - tokens}
    gaps, held = zip(*beat.gaps, strict=True)
    return found | {"gap_ms": max(gaps), "held_ms": max(held), "late": sum(each > LATE_MS for each in held)}


def notice(trainer: Trainer, job: Job) -> Row:
    """The loop alone and beside arriving tokens, in turn. The loop alone is that before and after."""
    sys.setswitchinterval(0.0005)  # as `WeightSync` does
    beat, alone, beside, arriving_s = Heartbeat(), [], [], 0.0
    beat.start()
    trainer.take()
    trainer.take()
    forget_peaks(trainer.own + trainer.children)
    for _ in range(job["rounds"] + 1):
        trainer.pause()
        trainer.wait_quiet()
        alone.append(loop(trainer, beat, job["seconds"] + DRAIN_S, lambda: None))
        trainer.resume()
        if len(alone) <= job["rounds"]:
            arriving = loop(trainer, beat, job["seconds"], trainer.take_if_ready)
            trainer.pause()
            drained = loop(trainer, beat, DRAIN_S, trainer.take_if_ready)
            beside.append(
                {name: (max if name in LONGEST else sum)((arriving[name], drained[name])) for name in drained}
            )
            arriving_s += arriving["all_s"]
    arrived = sum(each["tokens"] for each in beside)
    millions = max(arrived, 1) / 1e6
    row: Row = {"tokens_arrived": arrived, "tokens_per_s": arrived / arriving_s}
    for name, of_loop in (("lost_s", "loop_s"), ("lost_cpu_s", "loop_cpu_s"), ("own_cpu_s", "own_cpu_s")):
        per_call = [each[of_loop] / each["calls"] for each in alone]
        pairs = zip(beside, pairwise(per_call), strict=True)
        more = [each[of_loop] - each["calls"] * fmean(around) for each, around in pairs]
        row |= {name: sum(more) / millions, f"{name}_by_round": more}
    row |= {name: sum(each[name] for each in beside) / millions for name in (*SPENT, "child_cpu_s")}
    for each, suffix in ((beside, ""), (alone[1:], "_alone")):
        row |= {f"{name}{suffix}": max(one[name] for one in each) for name in LONGEST}
        row[f"late{suffix}"] = sum(one["late"] for one in each)
    return row | {"own_mib": peak_mib(trainer.own), "child_mib": peak_mib(trainer.children)}


def growth(trainer: Trainer, job: Job) -> Row:
    """Step after step, each taken as soon as it is there. The first is for memory and warmth, the others for time."""
    processes = {"own": trainer.own, "child": trainer.children}
    forget_peaks(trainer.own + trainer.children)
    base = {name: peak_mib(own) for name, own in processes.items()}
    trainer.take()
    tokens, cpu, began = trainer.arrived(), {name: cpu_s(own) for name, own in processes.items()}, time.perf_counter()
    of_each = {pid: cpu_s([pid]) for pid in trainer.children}
    taken = trainer.step
    while taken == trainer.step or time.perf_counter() < began + job["seconds"]:
        trainer.take()
    steps, seconds, tokens = trainer.step - taken, time.perf_counter() - began, trainer.arrived() - tokens
    row: Row = {"steps": steps, "step_s": seconds / steps, "tokens_per_s": tokens / seconds}
    for name, own in processes.items():
        used_s, peak = cpu_s(own) - cpu[name], peak_mib(own)
        row |= {f"{name}_us": used_s / tokens * 1e6, f"{name}_busy": used_s / seconds, f"{name}_mib": peak}
        row[f"{name}_bytes"] = (peak - base[name]) * MIB / (job["answers"] * job["tokens"])
    return row | {"busiest_us": max(cpu_s([pid]) - used for pid, used in of_each.items()) / tokens * 1e6}


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    faulthandler.dump_traceback_later(job["run_limit_s"] + 60, exit=True)  # should its parent be gone
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    gc.disable()  # as the trainer does
    with ExitStack() as resources:
        trainer = Trainer(job, resources)
        row = {"notice": notice, "growth": growth}[job["command"]](trainer, job)
        (folder / "row.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
