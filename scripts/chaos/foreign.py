"""Part 7: what models, tools, clients and disks do to a run costs a sample at most (I11), and no trained step (I12).

A trainer trains with an environment that talks to its endpoint. One fault after another falls, each kind in turn. The
run must go on, and a thread of the rollout process must never stand still for long.
"""

import contextlib
import errno
import json
import os
import pty
import random
import select
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from process_group import free_port

from chaos import episodes
from chaos.in_flight import FLAGS
from chaos.processes import TINY, Broken, Server, Trainer, metric_lines, saved_step, until
from chaos.proxy import GENERATE, Proxy, Reply
from chaos.report import Row, row
from torchtitan.grpo.process.stopping import STOPPED

FULL, GONE = "a full disk", "a terminal that goes away"
GROUPS = {
    "what a model writes": tuple(episodes.MARKS),
    "what a tool or a client sends": tuple(episodes.CALLS),
    "what an episode or a judge returns": (*episodes.RETURNS, *episodes.JUDGES),
    "an outage of 1 to 30 s": (episodes.OUTAGE,),
    "a full disk, a closed terminal": (FULL, GONE),
}
GAP_S = 1.0
"""Longest time that a thread of the rollout process may stand still."""
OUTAGES_S = (1, 1, 1, 1, 3, 3, 3, 10, 10, 30)
FALL_S, NEXT_S = 60.0, 120.0
"""Until a fault falls, and until the run has trained the next step after it."""
DISK_MIB = 192
FAILED_WRITE = "No space left on device"


class Terminal:
    """A pseudo-terminal whose other side writes what comes into a file, until it goes away.

    Attributes:
        path: Of the device.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._master, self._slave = pty.openpty()
        self.path = Path(os.ttyname(self._slave))
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._read, name="terminal", daemon=True)
        self._thread.start()

    def go_away(self) -> None:
        self._gone.set()
        self._thread.join(10)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()

    def _read(self) -> None:
        with self._log.open("wb", buffering=0) as file:
            while not self._gone.is_set():
                if select.select([self._master], [], [], 0.1)[0]:
                    file.write(os.read(self._master, 65536))
        os.close(self._slave)
        os.close(self._master)


@dataclass
class Foreign:
    """A trainer that gets `faults` pieces of foreign data.

    Attributes:
        wrong: What did not hold.
        fallen: How often each kind fell, by its witness.
        written: Answers that the proxy wrote in place of the model's.
        gap_s: Longest time that the heartbeat stood still.
    """

    folder: Path
    mode: str
    faults: int
    seed: int
    gap_limit_s: float = GAP_S
    outages_s: tuple[int, ...] = OUTAGES_S
    wrong: list[str] = field(default_factory=list)
    fallen: Counter[str] = field(default_factory=Counter)
    written: int = 0
    gap_s: float = 0.0
    lost: str = "nothing"

    def run(self) -> list[Row]:
        self.random = random.Random(self.seed)
        self.scratch = self.folder / "foreign"
        self.scratch.mkdir(parents=True)
        with ExitStack() as stack:
            self.disk = stack.enter_context(small_disk(self.folder / "disk"))
            model = _model(self.folder / "model")
            server = stack.enter_context(Server("embedded", self.folder, "server", model))
            server.wait_healthy()
            proxy = stack.enter_context(Proxy(server.url))
            proxy.change = self._write_as_model
            self._run(proxy.url, model)
        return self.rows()

    def rows(self) -> list[Row]:
        rows = []
        for name, kinds in GROUPS.items():
            count = sum(self.fallen[kind] for kind in kinds)
            if count:
                survived = 0 if self.wrong else count
                rows.append(row(f"data, {self.mode}", name, count, survived, lost=self.lost))
        return rows

    def details(self) -> list[str]:
        return [f"{count:4d}  {kind}" for kind, count in sorted(self.fallen.items())] + [
            f"longest gap of a thread of the rollout process: {self.gap_s:.2f} s"
        ]

    def _kinds(self) -> list[str]:
        """Every kind in turn, in an order of the seed. The terminal goes once, near the end."""
        kinds = [kind for group in GROUPS.values() for kind in group if kind != GONE]
        if self.disk is None:
            kinds.remove(FULL)
        order = [kinds[i % len(kinds)] for i in range(self.faults - 1)]
        self.random.shuffle(order)
        cut = len(order) * 3 // 4
        after = [kind for kind in order[cut:] if kind != FULL]  # the log shows that a write failed
        return [*order[:cut], *[FULL] * (len(order) - cut - len(after)), GONE, *after]

    def _run(self, url: str, model: Path) -> None:
        run = (self.disk or self.folder) / "run"
        log = self.folder / "log.txt"
        os.environ["CHAOS_FOREIGN"] = str(self.scratch)
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(
            self.scratch / "error.json"
        )  # where an error is, without a terminal
        with (
            Terminal(log) as terminal,
            Trainer(run, self._flags(url, model), self.folder / "scratch", log=terminal.path) as trainer,
        ):
            trainer.log_path = log
            try:
                self._until("two steps", trainer, lambda: len(metric_lines(run)) >= 2, NEXT_S)
                (self.scratch / "heartbeat").unlink(missing_ok=True)
                for number, kind in enumerate(self._kinds()):
                    self._fall(number, kind, trainer, run, terminal)
                trainer.stop()
                status = trainer.wait(60.0)
                if status != STOPPED:
                    self.wrong.append(f"the run ended with {status} in place of {STOPPED}")
            except Broken as error:
                self.wrong.append(str(error))
                return
        steps, saved = [line["step"] for line in metric_lines(run)], saved_step(run)
        lost = max(steps) - saved
        self.lost = f"{lost} steps" if lost else "nothing"
        if lost:
            self.wrong.append(f"step {max(steps)} is trained, and {saved} is saved")
        if steps != list(range(1, len(steps) + 1)):
            self.wrong.append("steps are missing in metrics.jsonl, or came twice")
        if self.written < (asked := sum(self.fallen[kind] for kind in episodes.MARKS)):
            self.wrong.append(f"{asked} long answers were asked for, and {self.written} were written")

    def _fall(self, number: int, kind: str, trainer: Trainer, run: Path, terminal: Terminal) -> None:
        before = metric_lines(run)[-1]["step"]
        if kind == GONE:
            terminal.go_away()
        elif kind == FULL:
            assert self.disk is not None
            said = trainer.log.count(FAILED_WRITE)
            fill(self.disk)
            self._until("a write to fail", trainer, lambda: trainer.log.count(FAILED_WRITE) > said, FALL_S)
            (self.disk / "filler").unlink()
            before = metric_lines(run)[-1]["step"]
        else:
            fault = {"number": number, "kind": kind, "seconds": self.random.choice(self.outages_s)}
            part = self.scratch / "part"
            part.write_text(json.dumps(fault))
            part.rename(self.scratch / "fault")
            fallen = self.scratch / f"fallen-{number}"
            self._until(f"{kind!r} to fall", trainer, fallen.exists, FALL_S)
        self.fallen[kind] += 1
        self._until(f"a step after {kind!r}", trainer, lambda: metric_lines(run)[-1]["step"] > before + 1, NEXT_S)
        gap_s = float((self.scratch / "heartbeat").read_text())
        if gap_s > self.gap_s:
            self.gap_s = gap_s
            if gap_s > self.gap_limit_s:
                self.wrong.append(f"a thread of the rollout process stood still for {gap_s:.2f} s at {kind!r}")

    def _until(self, what: str, trainer: Trainer, ready: Any, limit_s: float) -> None:
        try:
            until(what, ready, limit_s, trainer)
        except Broken as broken:
            error = self.scratch / "error.json"  # which says why it ended, even without a terminal
            raise Broken(f"{broken}\n{error.read_text() if error.exists() else ''}") from None

    def _flags(self, url: str, model: Path) -> dict[str, str | None]:
        flags = FLAGS | {
            "--model.hf_assets_path": str(model),
            "--rollout.urls": url,
            "--rollout.environment": "chaos.episodes:play",
            "--rollout.serve_port": str(free_port()),
            "--rollout.max_answer_tokens": str(episodes.LONG_TOKENS),
            "--rollout.request_timeout_seconds": "30",
            "--training.seq_len": str(episodes.LONG_TOKENS + 100),
            "--reward.functions": "chaos.episodes:score",
            "--checkpoint.interval": "5",
            "--checkpoint.keep_latest_k": "2",
        }
        del flags["--checkpoint.no-enable"]
        if self.mode == "sync":
            del flags["--async_grpo.enabled"], flags["--async_grpo.max_trajectory_age_steps"]
            del flags["--weight_sync.async_weight_update"]
        return flags

    def _write_as_model(self, route: str, request: bytes, reply: Reply) -> Reply:
        """A long answer in place of the server's, if the prompt asks for one."""
        if route not in GENERATE or reply.status != 200:
            return reply
        prompt = json.loads(request).get("token_ids", [])
        text = {"wwww": f"<tool_call>{chr(10) * episodes.LONG_TOKENS}", "tttt": "<tool_call>" * episodes.LONG_TOKENS}
        for mark, said in text.items():
            ids = self._ids(mark)
            if any(prompt[i : i + len(ids)] == ids for i in range(len(prompt))):
                content = json.loads(reply.body)
                choice = content["choices"][0]
                choice["token_ids"] = self._ids(said)[: episodes.LONG_TOKENS]
                choice["token_logprobs"] = [-1.0] * episodes.LONG_TOKENS
                for span in choice["weight_versions"][:1]:
                    span.update(start=0, end=episodes.LONG_TOKENS)
                del choice["weight_versions"][1:]
                self.written += 1
                return Reply(200, json.dumps(content).encode())
        return reply

    def _ids(self, text: str) -> list[int]:
        vocabulary = json.loads((self.folder / "model" / "tokenizer.json").read_text())["model"]["vocab"]
        return [vocabulary[character] for character in text]


def _model(folder: Path) -> Path:
    """The tiny model for long texts, with a tokenizer that can write `<tool_call>`: a letter becomes an underscore."""
    shutil.copytree(TINY, folder)
    tokenizer, config = folder / "tokenizer.json", folder / "config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"Q"', '"_"'))
    longer = {"max_position_embeddings": 2 * episodes.LONG_TOKENS}
    config.write_text(json.dumps(json.loads(config.read_text()) | longer))
    return folder


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of DISK_MIB in memory; None where this process may not mount one."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Until nothing more can be written."""
    try:
        with (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
