"""Part 8: the rollout process is killed, frozen, or gets no more memory, and the run goes on as if nothing had been.

A sync run must be the undisturbed one to the last bit: every checkpoint and every metric but times and the count of
these faults. With `[async_grpo]` the record of what was trained tells: each step once, each prompt once, none lost,
and no token older than the bound.
"""

import os
import random
import re
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos.aimed import START_TIMES, named_process
from chaos.processes import Broken, Flags, Server, Trainer, marked, metric_lines, until
from chaos.proxy import GENERATE, Proxy, Reply
from chaos.report import Row, row
from chaos.resume import ASYNC
from chaos.resume import FLAGS as RESUMED
from chaos.same_run import check_checkpoints, check_ledger, check_metrics
from chaos.watch import Watch
from tests.helpers.servers import parent_of
from torchtitan.grpo.rollouts.record import read_step, recorded_steps

INTERVAL = 5
FLAGS: Flags = RESUMED | {
    "--grpo.prompts_per_step": "4",
    "--reward.functions": "exact_match,tests.helpers.rewards:varied,chaos.rewards:paced",
    "--checkpoint.interval": str(INTERVAL),
    "--rollout.record_gib": "1",
    "--rollout.start_timeout_seconds": "60",
}
KILLED, FROZEN, NO_MEMORY = "killed", "frozen", "out of memory"
WITNESSES = {KILLED: "was ended by SIGKILL", FROZEN: "has said nothing for", NO_MEMORY: ""}
"""What the trainer's log says of the process, which lives for ever if nothing falls."""
IN_A_ROW = (1, 1, 1, 2, 3)
"""How many fall before another step may pass. After five the run would end."""
SEEN_S, BACK_S, STEP_S = 20.0, 90.0, 90.0
"""Until a fault is seen, until another process is there, and until the run has trained a step."""
PADDING = 2**26
"""Bytes of white space in a reply to a process that gets no more memory."""
LEFT_S = 20.0
"""Until nothing is left of a process that was hit."""


@dataclass
class Hit:
    """One fault that fell.

    Attributes:
        step: The last one that was logged before.
        at, seen_at, back_at: When it fell, when the log said so, and when another process was there; `time.time()`.
            `back_at` is 0 if that one was hit before.
    """

    kind: str
    pid: int
    step: int
    at: float
    seen_at: float = 0.0
    back_at: float = 0.0

    def describe(self) -> str:
        back = f"back {self.back_at - self.seen_at:.2f} s later" if self.back_at else "the next one was hit too"
        return (
            f"process {self.pid} {self.kind} after step {self.step}: seen after {self.seen_at - self.at:.2f} s, {back}"
        )


@dataclass
class RolloutFaults:
    """One run whose rollout process is hit `faults` times, each kind in turn.

    Args:
        frozen_s: Seconds without a word after which the trainer kills the process.
        only: Kinds of faults whose names begin so; all if there are none.

    Attributes:
        wrong: What did not hold.
        hits: The faults.
    """

    folder: Path
    mode: str
    faults: int
    seed: int
    frozen_s: int = 10
    only: Sequence[str] = ()
    wrong: list[str] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> list[Row]:
        self.random = random.Random(self.seed)
        self.steps = 2 * self.faults + 12
        flags = FLAGS | {"--training.steps": str(self.steps)} | (ASYNC if self.mode == "async" else {})
        whole, run = self.folder / "whole", self.folder / "run"
        with Server("embedded", self.folder, "server") as server, Proxy(server.url) as self.proxy:
            server.wait_healthy()
            self.flags = flags | {"--rollout.urls": self.proxy.url}
            try:
                if self.mode == "sync":
                    self._run(whole, {})
                self._run(run, self._groups())
                self._check(run, whole)
            except Broken as error:
                self.wrong.append(str(error))
        return self.rows()

    def rows(self) -> list[Row]:
        rows = []
        for kind in WITNESSES:
            own = [hit for hit in self.hits if hit.kind == kind]
            if own:
                seen_s = [hit.seen_at - hit.at for hit in own if hit.seen_at]
                back_s = [hit.back_at - hit.seen_at for hit in own if hit.back_at]
                survived = 0 if self.wrong else len(own)  # by what the whole run is at its end
                rows.append(row(f"rollouts, {self.mode}", kind, len(own), survived, seen_s, back_s, "0 steps"))
        return rows

    def details(self) -> list[str]:
        return [*map(Hit.describe, self.hits), *self.notes]

    def _groups(self) -> dict[int, int]:
        """How many faults fall in a row, by the step after which the first does. The first fall while the run starts.

        Steps between them are two: one may be taken already when the one before it is logged.
        """
        sizes: list[int] = []
        while sum(sizes) < self.faults:
            sizes.append(min(self.random.choice(IN_A_ROW), self.faults - sum(sizes)))
        after = self.random.sample(range(2, 2 * self.faults + 2, 2), len(sizes) - 1)
        return dict(zip([0, *sorted(after)], sizes, strict=True))

    def _run(self, folder: Path, groups: dict[int, int]) -> None:
        """To the end, with these faults."""
        drawn = [kind for kind in WITNESSES if kind.startswith(tuple(self.only) or "")]
        kinds = [drawn[i % len(drawn)] for i in range(self.faults)]
        self.random.shuffle(kinds)
        with ExitStack() as stack:
            scratch = folder.with_name(f"{folder.name}-scratch")
            own = {"CHAOS_FROZEN_S": str(self.frozen_s)}
            trainer = stack.enter_context(Trainer(folder, self.flags, scratch, variables=own))
            watch = Watch(trainer)
            stack.callback(watch.end)
            for step, count in groups.items():
                wanted = max(step, len(watch.steps) + 2) if self.hits else step
                watch.wait_for(f"step {wanted}", lambda wanted=wanted: len(watch.steps) >= wanted, STEP_S)
                before = 0
                for _ in range(count):
                    before = self._hit(kinds.pop(), trainer, watch, before)
                hit = self.hits[-1]
                hit.back_at = self._wait_said(watch, "Rollouts go on", BACK_S, since=hit.seen_at)
                until(f"nothing is left of {hit.pid}", lambda: not orphans(trainer), LEFT_S, trainer)
            if (status := trainer.wait(STEP_S * 4)) != 0:
                raise Broken(f"the run ended with {status}\n{trainer.log[-6000:]}")
            watch.end()
            if "Traceback" in trainer.log:
                self.notes.append(trainer.log[trainer.log.index("Traceback") :][:3000])

    def _hit(self, kind: str, trainer: Trainer, watch: Watch, before: int) -> int:
        """Hit the process that comes after `before`, at a random moment; its id."""
        named = trainer.scratch / "pid-rollouts"
        pid = 0

        def is_there() -> bool:
            nonlocal pid
            pid = named_process(named) or 0
            return pid not in (0, before)

        until("a rollout process", is_there, BACK_S, trainer)
        time.sleep(self.random.uniform(0.0, 3.0 if before or not watch.steps else 0.5))
        hit = Hit(kind, pid, len(watch.steps), time.time())
        self.hits.append(hit)
        try:
            if kind == NO_MEMORY:
                resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))
                self.proxy.change = padded
            else:
                os.kill(pid, signal.SIGKILL if kind == KILLED else signal.SIGSTOP)
        except ProcessLookupError as error:
            raise Broken(f"process {pid} ended without a fault\n{trainer.log[-6000:]}") from error
        pattern, limit_s = rf"\(pid {pid}\) .*{WITNESSES[kind]}", SEEN_S + START_TIMES * self.frozen_s
        hit.seen_at = self._wait_said(watch, pattern, limit_s)
        self.proxy.pass_on()
        return pid

    @staticmethod
    def _wait_said(watch: Watch, pattern: str, limit_s: float, since: float = 0.0) -> float:
        """When the log said it, about rollout processes."""

        def said() -> float:
            return next((at for at, line in watch.rollouts if at >= since and re.search(pattern, line)), 0.0)

        watch.wait_for(f"a line with {pattern!r}", said, limit_s)
        return said()

    def _check(self, run: Path, whole: Path) -> None:
        lines = metric_lines(run)
        if [line["step"] for line in lines] != list(range(1, self.steps + 1)):
            raise Broken("steps are missing in metrics.jsonl, or came twice")
        if lines[-1]["rollout/process_losses"] != len(self.hits):
            raise Broken(f"{len(self.hits)} processes were hit, {lines[-1]['rollout/process_losses']:g} were lost")
        usual, worst = (sorted(line["time/step_s"] for line in lines)[i] for i in (len(lines) // 2, -1))
        self.notes.append(f"a step took {usual:.2f} s in the median, {worst:.2f} s at worst")
        trained = [
            (step, sample.prompt.index, min(sample.sampled_versions, default=step - 1))
            for step, path in recorded_steps(run).items()
            for group in read_step(path)[1]
            for sample in group
        ]
        check_ledger(run, self.flags, self.steps, trained)
        if self.mode == "sync":
            checkpoints = range(INTERVAL, self.steps + 1, INTERVAL)
            check_checkpoints(run, whole, checkpoints)
            check_metrics(run, whole, apart=["rollout/process_losses"])
            if (run / "samples.jsonl").read_text() != (whole / "samples.jsonl").read_text():
                raise Broken("samples.jsonl differs from the undisturbed run's")


def padded(route: str, request: bytes, reply: Reply) -> Reply:
    """The same reply, with white space that takes memory: a tiny run needs hardly any that it has not had before."""
    return Reply(reply.status, reply.body + b" " * PADDING) if route in GENERATE else reply


def orphans(trainer: Trainer) -> list[int]:
    """Processes of the run whose parent has ended."""
    return [pid for pid in marked(trainer.mark) if parent_of(pid) == 1]
