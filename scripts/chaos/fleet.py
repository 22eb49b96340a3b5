"""Part 2: servers die, hang, crawl, refuse and come back as something else while a trainer trains in flight.

Every fault that goes in must be seen going out: the server leaves traffic in time, and is back in time once it is well.
The trainer goes on with the others, on tokens that are young enough and that our weights sampled.
"""

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos.faults import BACK_S, KINDS, Injection, Member, Torment, start_members
from chaos.in_flight import FLAGS, REQUEST_S, sound
from chaos.processes import Broken, Trainer
from chaos.report import Row, row
from chaos.watch import Watch

STANDSTILL_S = REQUEST_S + 3.0
"""How long one broken server may keep a step waiting. A request may meet all of them, one after the other."""


@dataclass
class Fleet:
    """A trainer, its servers, and the faults.

    Args:
        only: Kinds of faults whose names begin so; all if there are none.
        faults: After how many no further one begins. Two may begin at once.
        reward_workers: One has steps of half a second in place of a quarter, see `rewards.PACE_S`.
        gpu: Where vLLM or SGLang serves; "" for the CPU.
        transport: `[weight_sync] transport`. NCCL joins no two processes on one GPU.

    Attributes:
        seconds: In which faults begin.
        wrong: What did not hold.
        injections: The faults.
        watch: What the trainer said.
        pause_s: Shortest and longest time between two faults of one server.
    """

    folder: Path
    engine: str
    servers: int
    seconds: float
    seed: int
    only: Sequence[str] = ()
    gpu: str = ""
    transport: str = "auto"
    faults: int | None = None
    pause_s: tuple[float, float] = (0.5, 2.0)
    reward_workers: int = 2
    wrong: list[str] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = [kind for kind in KINDS if kind.name.startswith(tuple(self.only) or "")]

    def hit(self, members: list[Member]) -> list[Member]:
        """Those that are broken."""
        return members

    def run(self) -> list[Row]:
        with ExitStack() as stack:
            members = start_members(stack, self.engine, self.servers, self.folder, gpu=self.gpu)
            flags = FLAGS | {"--rollout.engine": self.engine, "--rollout.urls": ",".join(m.url for m in members)}
            flags |= {"--weight_sync.transport": self.transport, "--reward.workers": str(self.reward_workers)}
            trainer = stack.enter_context(Trainer(self.folder / "run", flags, self.folder / "scratch"))
            self.watch = watch = Watch(trainer)
            stack.callback(watch.end)
            watch.wait_for("five steps", lambda: len(watch.steps) >= 5, 120.0)
            ends_at = time.monotonic() + self.seconds

            def over() -> bool:
                enough = self.faults is not None and len(self.injections) >= self.faults
                return enough or time.monotonic() > ends_at

            torment = Torment(self.hit(members), watch, random.Random(self.seed), over, self.pause_s, self.kinds)
            self.injections = torment.injections
            try:
                torment.run(self.seconds + 400.0)
                wanted = len(watch.steps) + 3
                watch.wait_for("three steps after the last fault", lambda: len(watch.steps) >= wanted, 30.0)
                trainer.stop()
                trainer.wait(30.0)
            except Broken as error:
                self.wrong.append(str(error))
            watch.end()
            if "Traceback" in trainer.log:
                self.wrong.append(f"a traceback: {trainer.log[trainer.log.index('Traceback') :][:3000]}")
        self.check()
        return self.rows()

    def rows(self) -> list[Row]:
        part = f"fleet, {self.servers} {self.engine}" + (" on a GPU" if self.gpu else "")
        part += ", weights over NCCL" if self.transport == "nccl" else ""
        rows = []
        for kind in KINDS:
            own = [injection for injection in self.injections if injection.kind is kind]
            if own:
                rows.append(
                    row(
                        part,
                        kind.name,
                        tries=len(own),
                        survived=sum(not injection.wrong for injection in own),
                        detect_s=[injection.out_at - injection.at for injection in own if injection.out_at],
                        recover_s=[injection.in_at - injection.well_at for injection in own if injection.in_at],
                        lost=f"{statistics.fmean(injection.lost_s for injection in own):.2f} s of training each",
                    )
                )
        return rows

    def details(self) -> list[str]:
        """When each fault fell, and what was seen of it."""
        begin = min((injection.at for injection in self.injections), default=0.0)
        return [
            f"{i.at - begin:6.1f} s {i.url} {i.kind.name}: out after {i.out_at - i.at:.2f} s, "
            f"back {i.in_at - i.well_at:.2f} s after it was well {i.wrong}"
            for i in self.injections
        ]

    def check(self) -> None:
        """Each fault by itself, and the steps."""
        watch = self.watch
        quiet = [
            line["time/step_s"]
            for at, line in watch.steps[2:]
            if not any(i.at <= at <= i.in_at + line["time/step_s"] for i in self.injections)
        ]
        usual_s = statistics.median(quiet or [line["time/step_s"] for _, line in watch.steps])
        for injection in self.injections:
            out_s, back_s = injection.out_at - injection.at, injection.in_at - injection.well_at
            entered = watch.first(injection.url, True, injection.out_at)
            if not injection.in_at:
                injection.wrong = f"it left traffic after {out_s:.2f} s and did not come back"
            elif out_s > injection.kind.limit_s:
                injection.wrong = f"out of traffic after {out_s:.2f} s, limit {injection.kind.limit_s:g}"
            elif back_s > BACK_S:
                injection.wrong = f"back {back_s:.2f} s after it was well, limit {BACK_S:g}"
            elif injection.kind.stays_out and entered and entered.time < injection.cleared_at:
                injection.wrong = f"it was in traffic meanwhile: {entered.line}"
            if injection.wrong:
                self.wrong.append(f"{injection.kind.name!r} at {injection.url}: {injection.wrong}")
        for at, line in watch.steps:
            step_s = line["time/step_s"]
            touched = [i for i in self.injections if i.at <= at and at - step_s <= i.in_at]
            for injection in touched:
                injection.lost_s += max(0.0, step_s - usual_s) / len(touched)
        longest_s = max(line["time/step_s"] for _, line in watch.steps)
        if longest_s > STANDSTILL_S * self.servers:
            self.wrong.append(f"a step took {longest_s:.1f} s, limit {STANDSTILL_S:g} s per server")
        self.wrong += sound([line for _, line in watch.steps])
