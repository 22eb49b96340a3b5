"""Two nodes on one machine: two of torchrun's agents with a rank each, which meet at one address."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import Ranks, free_port
from tests.helpers.trainer_runs import (
    UNHURRIED,
    arguments,
    embedded_url,
    environment,
    processes_of,
    steps,
    without_times,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the only rank of each node would take the first GPU")
# Whichever of the two is under way notices it: a collective, or a stage of a save.
LOST = "lost the connection to|Connection (closed|reset) by peer|Broken pipe|rank 0 waited for the others"
AGENT = ROOT / "tests" / "helpers" / "forked_torchrun.py"
FLAGS: dict[str, str | None] = {
    "--job.config_file": str(ROOT / "train_configs" / "quickstart.toml"),
    "--model.hf_assets_path": str(TINY_QWEN3),
    "--training.steps": "5",
    "--sft.steps": "1",
    "--checkpoint.interval": "1",
    "--checkpoint.keep_latest_k": "0",
    "--checkpoint.export_dtype": "none",
    "--checkpoint.resume": "auto",
    "--validation.no-enable": None,
} | UNHURRIED  # a node is lost between two steps, and not after the last one


class Node:
    """An agent with one rank, in a working directory of its own."""

    def __init__(self, home: Path, port: int, flags: dict[str, str | None], dump: Path, words: tuple[str, ...]) -> None:
        home.mkdir(exist_ok=True)
        words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.1", *words)
        given = FLAGS | {"--rollout.urls": embedded_url()} | flags
        self.agent = Ranks(
            1,
            AGENT,
            *words,
            ROOT / "grpo_train.py",
            *arguments(dump, given),
            log=home / "log.txt",
            cwd=home,
            environment=environment() | {"PYTHONPATH": str(ROOT)},
        )
        self.process = self.agent.processes[0]

    @property
    def log(self) -> str:
        return self.agent.log

    def processes(self) -> list[int]:
        """The agent and what descends from it."""
        found = [self.process.pid]
        for pid in found:
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def kill(self, below_agent: bool = False) -> None:
        """At once, all of it or the rank alone."""
        for pid in self.processes()[below_agent:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join(0 if below_agent else 10)

    def wait(self, limit_s: float) -> int:
        self.process.join(limit_s)
        assert self.process.exitcode is not None, f"still running after {limit_s:g} s\n{self.log[-4000:]}"
        return self.process.exitcode


@contextmanager
def two_nodes(
    folder: Path, flags: dict[str, str | None] | None = None, dump: Path | None = None, words: tuple[str, ...] = ()
) -> Iterator[list[Node]]:
    """Both nodes of a run in `folder`/run. The first one holds the rendezvous."""
    folder.mkdir(exist_ok=True)
    port, nodes = free_port(), []
    try:
        for name in ("a", "b"):
            nodes.append(Node(folder / name, port, flags or {}, dump or folder / "run", words))
            until_listening(port)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def until_listening(port: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, f"nobody listens at port {port}"
        time.sleep(0.02)


def until_saved(step: int, folder: Path, node: Node, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not (folder / "run" / "checkpoint" / f"step-{step}" / "complete.json").exists():
        assert node.process.exitcode is None and time.monotonic() < deadline, node.log[-4000:]
        time.sleep(0.02)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / "run" / "checkpoint" / f"step-{step}" / "dcp", folder / "all.pt")
    return torch.load(folder / "all.pt")["model"]


def test_a_run_that_loses_nodes_is_the_run_that_does_not(tmp_path):
    with two_nodes(tmp_path / "whole") as nodes:
        assert [node.wait(120) for node in nodes] == [0, 0]
        assert "2 ranks on 2 nodes. 2 copies of the model, each on 1 rank: a copy for each node takes" in nodes[0].log
    hit = tmp_path / "hit"
    with two_nodes(hit) as nodes:
        until_saved(1, hit, nodes[0])
        nodes[1].kill()
        assert nodes[0].wait(60) != 0
        assert re.search(LOST, nodes[0].log), nodes[0].log[-6000:]
        assert processes_of(hit) == []
    # The same command again. Then a rank is lost, and its torchrun lives: both nodes start anew, and go on.
    with two_nodes(hit, words=("--max-restarts", "1")) as nodes:
        until_saved(3, hit, nodes[0])
        nodes[1].kill(below_agent=True)
        assert [node.wait(120) for node in nodes] == [0, 0]
        resumed_at = re.findall(r"Loaded checkpoint \S+step-(\d)", nodes[0].log + nodes[1].log)
        assert len(set(resumed_at)) == 2 and max(resumed_at) >= "3", resumed_at  # by the command, and by torchrun
    assert without_times(steps(tmp_path / "whole" / "run")) == without_times(steps(hit / "run"))
    expected, resumed = (weights(folder, 5) for folder in (tmp_path / "whole", hit))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_nodes_without_a_common_folder_are_refused(tmp_path):
    with two_nodes(tmp_path, dump=Path("run")) as nodes:
        assert [node.wait(60) for node in nodes] == [1, 1]  # torchrun's status
    for node, home in zip(nodes, "ab", strict=True):
        (error,) = [line for line in node.log.splitlines() if line.startswith("error: rank 1 on ")]
        where = f":{tmp_path}/a/run/checkpoint in {tmp_path}/b/run/checkpoint: set [job] dump_folder to a folder that"
        assert "does not see rank 0's checkpoints" in error and where in error, home
    assert list((tmp_path / "a" / "run" / "checkpoint").glob("step-*")) == []


def test_what_rank_0_refuses_ends_the_other_node_with_the_reason(tmp_path):
    with two_nodes(
        tmp_path, {"--data.source": "jsonl", "--data.source_args": "{}", "--data.path": "none.jsonl"}
    ) as nodes:
        assert [node.wait(60) for node in nodes] == [1, 1]
    why = "[data] path = 'none.jsonl' is not a file"
    assert f"error: {why}" in nodes[0].log
    assert f"error on rank 1: rank 0 has failed at its start: {why}" in nodes[1].log
