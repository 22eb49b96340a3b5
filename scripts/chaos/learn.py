"""Learning under fire: the quickstart, in flight, with servers that break, learns what it learns without faults."""

import json
import random
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos.faults import Injection, Torment, start_members
from chaos.parallel import in_processes
from chaos.processes import Broken, Flags, Trainer
from chaos.report import Row, row
from chaos.watch import Watch

SERVERS = 2
RUN_S = 3600.0
FLAGS: Flags = {
    "--job.config_file": "train_configs/quickstart.toml",
    "--metrics.no-enable_tensorboard": None,
    "--checkpoint.no-enable": None,
    "--async_grpo.enabled": None,
    "--async_grpo.max_trajectory_age_steps": "2",
    "--weight_sync.async_weight_update": None,
    "--weight_sync.timeout_seconds": "15",
    "--rollout.request_timeout_seconds": "10",
}


@dataclass
class Learn:
    """Fault-free runs and runs under fire, one of each per seed.

    Args:
        jobs: Runs at a time.

    Attributes:
        clean, under_fire: Held-out greedy reward at the end of each run.
        wrong: What did not hold.
    """

    folder: Path
    seeds: int
    seed: int
    jobs: int = 1
    clean: list[float] = field(default_factory=list)
    under_fire: list[float] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> list[Row]:
        seeds = range(self.seed, self.seed + self.seeds)
        runs = [(self.folder, seed, faults) for seed in seeds for faults in (False, True)]
        for (_, _, faults), (reward, injections) in zip(runs, in_processes(_train, runs, self.jobs), strict=True):
            (self.under_fire if faults else self.clean).append(reward)
            self.injections += injections
        spread = max(self.clean) - min(self.clean)
        if min(self.under_fire) < min(self.clean) - spread:
            self.wrong.append(f"held-out rewards under fire {self.under_fire}, without faults {self.clean}")
        label = f"quickstart in flight, held-out reward {_range(self.under_fire)}; without faults {_range(self.clean)}"
        survived = sum(not injection.wrong for injection in self.injections)
        return [row(f"learn, {self.seeds} seeds", label, len(self.injections), survived)]

    def details(self) -> list[str]:
        """The rewards of each seed."""
        pairs = enumerate(zip(self.clean, self.under_fire, strict=True), self.seed)
        return [f"seed {seed}: {clean:.3f}, under fire {fire:.3f}" for seed, (clean, fire) in pairs]


def _train(parent: Path, seed: int, faults: bool) -> tuple[float, list[Injection]]:
    """One run: its last held-out greedy reward, and the faults that it recovered from."""
    folder = parent / f"seed-{seed}-{'fire' if faults else 'clean'}"
    folder.mkdir()
    injections: list[Injection] = []
    with ExitStack() as stack:
        members = start_members(stack, "embedded", SERVERS, folder, sequences=1024)
        flags = FLAGS | {"--debug.seed": str(seed), "--rollout.urls": ",".join(member.url for member in members)}
        trainer = stack.enter_context(Trainer(folder / "run", flags, folder / "scratch"))
        watch = Watch(trainer)
        stack.callback(watch.end)
        if faults:
            watch.wait_for("the first step", lambda: watch.steps, 600.0)
            torment = Torment(
                members, watch, random.Random(seed), lambda: trainer.poll() is not None, pause_s=(5.0, 15.0)
            )
            torment.run(RUN_S)
            injections = [injection for injection in torment.injections if injection.in_at]
        if trainer.wait(RUN_S) != 0:
            raise Broken(f"seed {seed}: the run did not end well\n{trainer.log[-6000:]}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return [line["validation/greedy_reward"] for line in lines if "validation/greedy_reward" in line][-1], injections


def _range(rewards: list[float]) -> str:
    return f"{min(rewards):.3f} to {max(rewards):.3f}"
