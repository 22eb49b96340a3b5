"""Part 1: a run that is killed, wherever that falls, and resumed, is the run that was not killed.

Sync runs must agree to the last bit: every tensor of every checkpoint, the random states, the trainer's state, the
metrics that do not measure time, the samples. Async runs depend on timing; there the ledger must be whole: no prompt
is trained twice, none is lost, and no token is older than the bound.

One chain is one run that is hit again and again, and resumed each time, until it has reached its last step.

On GPUs a sync run may differ from the same run again, whatever hits it. Two runs without faults tell. If they differ,
what does not depend on rounding must agree: checkpoints, steps, versions, prompts and the order of all of them.
"""

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos.aimed import Aim
from chaos.parallel import in_processes
from chaos.processes import GONE_S, Broken, Flags, Server, Trainer, last_step, saved_step
from chaos.report import Row, row
from chaos.same_run import check_bits, check_ledger, check_prompts

STEPS, INTERVAL, PROMPTS, SAMPLES, MAX_AGE = 8, 2, 4, 4, 2
CHECKPOINTS = range(INTERVAL, STEPS + 1, INTERVAL)
"""Their steps."""
FLAGS: Flags = {
    "--job.config_file": "train_configs/quickstart.toml",
    "--training.steps": str(STEPS),
    "--sft.steps": "2",
    "--sft.batch_size": "16",
    "--grpo.prompts_per_step": str(PROMPTS),
    "--grpo.group_size": str(SAMPLES),
    "--reward.functions": "exact_match,tests.helpers.rewards:varied",
    "--data.source_args": '{"max": 39, "size": 500}',  # all are tokenized at each start
    "--checkpoint.interval": str(INTERVAL),
    "--checkpoint.keep_latest_k": "0",
    "--checkpoint.resume": "auto",
    "--validation.freq": "4",
    "--validation.prompts": "8",
    "--metrics.no-enable_tensorboard": None,
    "--metrics.samples_per_step": str(PROMPTS * SAMPLES),
    # A fault may take the server while the trainer still looks for it.
    "--rollout.start_timeout_seconds": "4",
    "--rollout.request_timeout_seconds": "20",
    "--weight_sync.timeout_seconds": "20",
}
ASYNC: Flags = {
    "--async_grpo.enabled": None,
    "--async_grpo.max_trajectory_age_steps": str(MAX_AGE),
    "--weight_sync.async_weight_update": None,
    "--optimizer.lr": "1e-4",
}
ON_GPUS: Flags = {"--debug.deterministic": None, "--debug.deterministic_warn_only": None}
SAVED = "rename checkpoint/step-N.tmp"
"""The operation that completes a checkpoint."""
IN_A_SAVE = " checkpoint/step-N.tmp"
"""Part of an operation, as in a trace, that belongs to a save."""
HITS_IN_A_CHAIN = 6
BROKEN_MAX = 3
"""Chains that may break before the campaign gives up."""
RUN_S = 90.0
WATCHED = ("checkpoint", "metrics.jsonl", "samples.jsonl")
"""Faults are aimed at operations on these."""


@dataclass
class Point:
    """One fault that fell.

    Attributes:
        aim: Where it was aimed.
        witness: What the process that sent the signal saw just before.
        step, saved: The last step in metrics.jsonl, and the newest complete checkpoint, when all was over.
        gone_s: From the signal until no process of the run was left.
        back_s: From the next start to its first step.
        held: The run that it fell on was the uninterrupted one in the end.
    """

    aim: Aim
    witness: dict[str, Any]
    step: int
    saved: int
    gone_s: float
    back_s: float | None = None
    held: bool = True

    def describe(self) -> str:
        found = [name for name in self.witness["files"] if "step-" in name]
        return (
            f"{self.aim.describe()}; step {self.step}, checkpoint {self.saved}, {len(found)} files of checkpoints; "
            f"gone in {self.gone_s:.2f} s"
        )


@dataclass
class Campaign:
    """Chains of one kind of run, against one server.

    Args:
        launcher: For faults of torchrun: "agent" or "torchrun".
        jobs: Processes that share the points. Each has a server and a whole run of its own.
        async_mode: `[checkpoint] async_mode`.
        device: Where ranks train: "cpu" or "cuda".
        engine, gpu: The server, and where vLLM serves; "" for the CPU.
        targets, signals: What faults are drawn from; no targets: all.
        when: "save": at a file operation of a save. "steps": some time after one, while the run trains. "any": also in
            loads and at the start.
        restarts: torchrun starts the ranks again by itself, at most so often.

    Attributes:
        wrong: What did not hold.
        notes: What the runs without faults showed.
    """

    folder: Path
    ranks: int
    mode: str
    points: int
    seed: int
    launcher: str = "agent"
    jobs: int = 1
    async_mode: str = "disabled"
    device: str = "cpu"
    engine: str = "embedded"
    gpu: str = ""
    targets: Sequence[str] = ()
    signals: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGTERM)
    when: str = "any"
    restarts: int = 0
    hit: list[Point] = field(default_factory=list, init=False)
    missed: int = field(default=0, init=False)
    wrong: list[str] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """Operations in the trace of rank 0 of an uninterrupted run, and of loads: what faults are aimed at."""
    deck: list[str] = field(default_factory=list, init=False)
    exact: bool = field(default=True, init=False)
    """Runs without faults agree to the last bit."""

    @property
    def on_gpus(self) -> bool:
        return self.device == "cuda"

    def run(self) -> list[Row]:
        """Hit as many points as asked, or until too many chains were broken."""
        shares = [len(range(job, self.points, self.jobs)) for job in range(self.jobs)]
        for share in in_processes(self._run_share, list(enumerate(shares)), self.jobs):
            hit, missed, wrong, notes, exact = share
            self.hit += hit
            self.missed += missed
            self.wrong += wrong
            self.notes += notes
            self.exact &= exact
        return self.rows()

    def _run_share(self, job: int, points: int) -> tuple[list[Point], int, list[str], list[str], bool]:
        """One process's part: (points that fell, faults that missed, what did not hold, notes, `exact`)."""
        folder = self.folder / f"job-{job}"
        folder.mkdir()
        share = replace(self, folder=folder, points=points, seed=self.seed + job, jobs=1)
        share._hit_all()
        return share.hit, share.missed, share.wrong, share.notes, share.exact

    def _hit_all(self) -> None:
        self.random = random.Random(self.seed)
        self.run_s = RUN_S * (2 if self.on_gpus else 1) * (1 + self.restarts)
        with Server(self.engine, self.folder, "server", gpu=self.gpu) as self.server:
            self.server.wait_healthy()
            self.flags = FLAGS | (ASYNC if self.mode == "async" else {}) | {"--rollout.urls": self.server.url}
            self.flags |= {"--rollout.engine": self.engine} | (ON_GPUS if self.on_gpus else {})
            # Only a server on a GPU of its own is reached by NCCL.
            self.flags["--weight_sync.transport"] = "nccl" if self.on_gpus and self.gpu else "gloo"
            self.flags["--checkpoint.async_mode"] = self.async_mode
            self.whole = self.folder / "whole"
            started = time.monotonic()
            self._finish(self.whole)
            self.length_s = time.monotonic() - started
            self._learn_events(self.folder / "scratch")
            if self.mode == "async":
                self._check_ledger(self.whole)
            elif self.on_gpus:
                self._compare_whole_runs()
            number = 0
            while len(self.hit) < self.points and len(self.wrong) < BROKEN_MAX:
                if self.missed > 2 * self.points + 5:
                    raise Broken(f"{self.missed} faults missed, {len(self.hit)} fell")
                number += 1
                self._chain(self.folder / f"chain-{number}")

    def rows(self) -> list[Row]:
        part = f"resume, {self.mode}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        part += f" on GPU{'s' if self.ranks > 1 else ''}" if self.on_gpus else ""
        part += "" if self.engine == "embedded" else f", {self.engine}"
        part += "" if self.async_mode == "disabled" else ", saves in the background"
        part += ", restarted by torchrun" if self.restarts else ""
        by_fault: dict[str, list[Point]] = {}
        for point in self.hit:
            name = f"{signal.Signals(point.aim.number).name} of {point.aim.target}"
            name += " in a save" if self.when == "save" else ""
            by_fault.setdefault(name, []).append(point)
        return [
            row(
                part,
                fault,
                tries=len(points),
                survived=sum(point.held for point in points),
                detect_s=[point.gone_s for point in points],
                recover_s=[point.back_s for point in points if point.back_s is not None],
                lost=f"{max(point.step - point.saved for point in points)} steps, done again",
            )
            for fault, points in sorted(by_fault.items())
        ]

    def details(self) -> list[str]:
        """Each fault, where it fell and what was found there."""
        missed = f"{self.missed} faults came after the end of their run: not counted"
        return [*map(Point.describe, self.hit), missed, *self.notes]

    # ------------------------------------------------------------------------------------------------- one chain

    def _chain(self, run: Path) -> None:
        """Hit one run several times, finish it, and compare it with the whole one."""
        hits: list[Point] = []
        finished = False
        try:
            while not finished and len(hits) < min(HITS_IN_A_CHAIN, self.points - len(self.hit)):
                finished, point = self._hit(run, hits)
                if point is None:
                    self.missed += 1
                else:
                    hits.append(point)
            if not finished:
                self._finish(run, hits)
            self._compare(run, {point.step for point in hits if point.aim.target == "server"})
        except Broken as error:
            fallen = "\n".join(f"  {point.describe()}" for point in hits)
            self.wrong.append(f"seed {self.seed}, {run}: after\n{fallen}\n{error}")
            for point in hits:
                point.held = False
        else:
            shutil.rmtree(run)
        self.hit += hits

    def _hit(self, run: Path, before: list[Point]) -> tuple[bool, Point | None]:
        """One start with an aimed fault: (whether the run reached its end, the point if the fault fell)."""
        aim = self._draw(run)
        launcher = self.launcher if aim.target == "torchrun" else "torchrun" if self.restarts else "ranks"
        scratch = self.folder / "scratch"
        saved = saved_step(run)
        how = self.ranks, launcher, aim, {"server": self.server}, self.restarts
        with Trainer(run, self.flags, scratch, *how) as trainer:
            self._time_first_step(trainer, saved, before)
            if self.restarts:
                return True, self._restarted(run, trainer)
            status = trainer.wait(self.run_s)
            ended = time.time()
            witness = scratch / "witness.json"
            if not witness.exists():
                if status:
                    raise Broken(
                        f"without a fault ({aim.describe()}) the run ended with {status}\n{trainer.log[-6000:]}"
                    )
                self._learn_events(scratch)
                self.length_s = min(self.length_s, ended - trainer.started)
                return True, None
            seen = json.loads(witness.read_text())
            self._learn_events(scratch)
            if ended - seen["time"] > GONE_S:
                raise Broken(f"{aim.describe()}: {ended - seen['time']:.1f} s until all processes had ended")
        if aim.target == "server":
            self.server.wait_gone(30.0)
            self.server.start()
            self.server.wait_healthy()
        point = Point(aim, seen, last_step(run), saved_step(run), ended - seen["time"])
        return status == 0, point

    def _restarted(self, run: Path, trainer: Trainer) -> Point | None:
        """The fault that fell on a run which torchrun starts again, once that has reached its end."""
        witness = trainer.scratch / "witness.json"
        seen: dict[str, Any] = {}

        def hit_is_gone() -> bool:
            seen.update(json.loads(witness.read_text()) if witness.exists() else {})
            return bool(seen) and not Path(f"/proc/{seen['pid']}").exists()

        point = None
        if trainer.wait(self.run_s, hit_is_gone) is None:
            step = last_step(run)
            point = Point(trainer.aim, seen, step, saved_step(run), time.time() - seen["time"])
            gone = time.monotonic()
            if trainer.wait(self.run_s, lambda: last_step(run) > step) is None:
                point.back_s = time.monotonic() - gone
        if trainer.wait(self.run_s) != 0:
            raise Broken(f"torchrun did not bring the run to its end ({trainer.aim.describe()})\n{trainer.log[-6000:]}")
        self._learn_events(trainer.scratch)
        return point if point and point.step < STEPS else None  # rank 0 hears of another rank's signal after a second

    def _finish(self, run: Path, before: list[Point] | None = None) -> None:
        """Run to the end without a fault."""
        scratch = self.folder / "scratch"
        saved = saved_step(run)
        with Trainer(run, self.flags, scratch, self.ranks) as trainer:
            self._time_first_step(trainer, saved, before or [])
            if trainer.wait(self.run_s) != 0:
                raise Broken(f"the run did not reach its end:\n{trainer.log[-6000:]}")

    def _time_first_step(self, trainer: Trainer, saved: int, before: list[Point]) -> None:
        """Until the run has logged a step after the checkpoint that it began with, or has ended."""
        if not before or before[-1].back_s is not None:
            return
        metrics = trainer.folder / "metrics.jsonl"
        stamp = metrics.stat().st_mtime_ns if metrics.exists() else 0

        def stepped() -> bool:
            try:
                now = metrics.stat().st_mtime_ns
            except FileNotFoundError:
                return False
            return now != stamp and last_step(trainer.folder) > saved

        if trainer.wait(self.run_s, stepped) is None:
            before[-1].back_s = time.time() - trainer.started

    def _draw(self, run: Path) -> Aim:
        """A fault at random: half of them at a file operation, each kind in turn; the others at a moment."""
        draw = self.random
        targets = ["rank 0"] * 3 + ["torchrun"] * 2 + ["server"] + (["rank 1"] * 2 if self.ranks > 1 else [])
        targets = list(self.targets) or targets
        aim = Aim(draw.choice(targets), draw.choice(self.signals))
        if self.when == "steps":
            saves_left = (STEPS - saved_step(run)) // INTERVAL
            aim.event, aim.nth = SAVED, draw.randint(1, max(1, saves_left - 1))
            aim.delay_s = draw.uniform(0.01, 0.2)
            return aim
        if self.when == "any" and draw.random() < 0.4:
            aim.delay_s = draw.uniform(0.2, 1.0) * self.length_s
            return aim
        if not self.deck:
            self.deck = sorted(event for event in self.counts if self._is_aimed_at(event))
            draw.shuffle(self.deck)
        aim.event = self.deck.pop()
        left = (STEPS - saved_step(run)) / STEPS
        aim.nth = draw.randint(1, max(1, int(self.counts[aim.event] * left)))
        aim.delay_s = draw.choice([0.0, 0.0, draw.uniform(0.0, 0.03)])
        return aim

    def _learn_events(self, scratch: Path) -> None:
        trace = [json.loads(line)["event"] for line in (scratch / "trace-0.jsonl").read_text().splitlines()]
        for event, count in Counter(trace).items():
            if event.split()[-1].startswith(WATCHED) and event not in self.counts:
                self.counts[event] = count
                if self._is_aimed_at(event):
                    self.deck.insert(self.random.randint(0, len(self.deck)), event)

    def _is_aimed_at(self, event: str) -> bool:
        return self.when != "save" or IN_A_SAVE in event

    # ---------------------------------------------------------------------------------------------- what must hold

    def _compare_whole_runs(self) -> None:
        """Whether a second run without faults has the bits of the first."""
        again = self.folder / "again"
        self._finish(again)
        check_prompts(again, self.whole, CHECKPOINTS)
        try:
            self._compare(again, set())
            self.notes.append("two runs without faults agreed to the last bit")
        except Broken as different:
            self.exact = False
            self.notes.append(f"two runs without faults differed, so only counts are compared: {str(different)[:300]}")

    def _compare(self, run: Path, server_lost: set[int]) -> None:
        """
        Args:
            server_lost: The last steps of starts whose server was hit.
        """
        if self.mode == "async":
            self._check_ledger(run)
            return
        if not self.exact:
            check_prompts(run, self.whole, CHECKPOINTS)
            return
        check_bits(run, self.whole, CHECKPOINTS, server_lost)

    def _check_ledger(self, run: Path) -> None:
        samples = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
        told = ((s["step"], s["prompt_index"], min(s["versions"], default=s["step"] - 1)) for s in samples)
        check_ledger(run, self.flags, STEPS, told)
