"""`[ray]` on a cluster of two nodes on this machine: equal runs, and ranks and servers that go wrong."""

import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_group import wait_for
from safetensors.torch import load_file

from tests.helpers.ray_nodes import RANK_CORES, SERVER, RayNodes, driver
from tests.helpers.servers import server_pids
from tests.helpers.trainer_runs import (
    UNHURRIED,
    command_of,
    embedded_url,
    processes_of,
    steps,
    train,
    without_times,
)
from torchtitan.grpo.process.stopping import STOPPED

ray = pytest.importorskip("ray", reason="needs the ray package: pip install '.[ray]'")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its two nodes have no GPUs: trains on the CPU")

LAST = 8
START_S = 240.0
"""More than `[rollout] start_timeout_seconds`: its error says more."""
STEPS = {"--training.steps": str(LAST), "--parallelism.data_parallel_replicate_degree": "1"}
"""One copy of the model over both nodes: by default there is one on each, and one on torchrun's single node."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[RayNodes]:
    """Two, each with room for one of two ranks and for one server."""
    with RayNodes(tmp_path_factory.mktemp("ray"), RANK_CORES + 1, RANK_CORES + 1) as nodes:
        yield nodes


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / f"step-{step}" / "hf" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert without_times(steps(one)) == without_times(steps(other))
    expected, got = weights(one, LAST), weights(other, LAST)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun") / "run"
    train(folder, STEPS, ranks=2)
    return folder


@pytest.mark.timeout(900)  # three starts of two ranks, each with a bound of its own
def test_a_run_that_is_stopped_and_loses_a_rank_ends_as_one_under_torchrun(nodes, under_torchrun, tmp_path):
    """On two nodes. It is stopped with plain remote calls. With a Compiled Graph on each node it goes on, loses a rank,
    and goes on again."""
    folder = tmp_path / "run"
    flags = STEPS | {"--rollout.urls": embedded_url(), "--checkpoint.resume": "auto", "--checkpoint.interval": "1"}
    with driver(nodes, folder, flags | {"--ray.dispatch": "remote"}) as run:
        run.wait_until("the first step", lambda: steps(folder), START_S)
        run.send_signal(signal.SIGTERM)
        assert run.wait(90) == STOPPED, run.log
        last = steps(folder)[-1]["step"]
        assert f"stopped at step {last}, newest checkpoint {last} in" in run.log.splitlines()[-1]
        assert last < LAST - 1 and not nodes.actors()
    with driver(nodes, folder, flags | {"--ray.dispatch": "compiled"}) as run:
        run.wait_until("a checkpoint", lambda: steps(folder)[-1]["step"] > last, START_S)
        os.kill(nodes.actors()[1], signal.SIGKILL)
        run.check(180)
        assert "rank 1 (process" in run.log and "died" in run.log and "Restart 1 of 3" in run.log
        assert "falls back" not in run.log
    assert_same_run(under_torchrun, folder)


@pytest.mark.timeout(900)
def test_servers_on_two_nodes_come_back_and_a_rank_that_hangs_is_named_and_nothing_is_left(nodes, tmp_path):
    """Each server has a supervisor of its own, in an actor. In the ranks' own loop."""
    folder = tmp_path / "run"
    flags = {"--training.steps": "100000", "--debug.hang_seconds": "15", "--ray.max_restarts": "0"}
    flags |= {"--rollout.replicas": "2", "--ray.expose_servers": None, "--rollout.api_key_env": "SERVER_KEY"}
    flags |= UNHURRIED
    with driver(nodes, folder, flags, SERVER_KEY="of-a-test") as run:
        run.wait_until("the first step", lambda: steps(folder), START_S)
        listed = (folder / "servers" / "urls.txt").read_text().split()
        here, there = sorted(listed)
        assert here.startswith("http://127.0.0.1:") and there.startswith("http://127.0.0.2:")
        assert steps(folder)[-1]["sync/servers_in_traffic"] == 2

        def wait_until_back(restarts: int, before: set[int]) -> None:
            def is_back() -> bool:
                last = steps(folder)[-1]
                if (last["sync/servers_restarted"], last["sync/servers_in_traffic"]) != (restarts, 2):
                    return False
                servers = set(server_pids(folder))
                return len(servers) == 2 and servers != before  # a loss may be counted before it is noticed

            started = time.monotonic()
            run.wait_until("the server to be back", is_back, START_S)
            print(f"back after {time.monotonic() - started:.1f} s")

        before = set(server_pids(folder))
        (server,) = (pid for pid in before if there.rpartition(":")[2] in command_of(pid))
        os.kill(server, signal.SIGKILL)
        wait_until_back(1, before)
        before = set(server_pids(folder))
        os.kill(nodes.actors(SERVER)[0], signal.SIGKILL)
        wait_until_back(2, before)
        mismatches = [line.get("policy/mismatch_abs", 0.0) for line in steps(folder)]  # a step may have no tokens
        assert max(mismatches) < 1e-4, "no answer came from other weights"
        ranks = nodes.actors()
        assert len(ranks) == 2 and len(server_pids(folder)) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        assert run.wait(90) == 1
        assert re.search(r"rank 1 \(process .*stopped by a signal\) did not answer within 15 s", run.log), run.log
        assert re.search(r"rank 0, main thread, most recent call first:\n.*in train_step", run.log, re.DOTALL), run.log
        assert not wait_for(lambda: not (nodes.actors() or nodes.actors(SERVER)), 20)  # Ray ends them on its own time
        assert processes_of(folder) == [] and not (folder / "servers" / "urls.txt").exists()


def test_compiled_graphs_are_not_deprecated(nodes, caplog):
    """The day that this fails, `dispatch = "compiled"` needs another way, or an upper limit of Ray's version."""
    from ray.dag import InputNode, MultiOutputNode
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Echo:
        def call(self, number: int) -> int:
            return number

    ray.init(address=nodes.address, log_to_driver=False)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        with caplog.at_level("WARNING"), warnings.catch_warnings(), InputNode() as number:
            warnings.simplefilter("error", DeprecationWarning)
            warnings.simplefilter("error", FutureWarning)
            actor = ray.remote(num_cpus=0, scheduling_strategy=here)(Echo).remote()  # channels between nodes can hang
            graph = MultiOutputNode([actor.call.bind(number)]).experimental_compile()
            assert [each.get(timeout=120) for each in graph.execute(7)] == [7]
            graph.teardown()
        assert "deprecat" not in caplog.text.lower()
    finally:
        ray.shutdown()
