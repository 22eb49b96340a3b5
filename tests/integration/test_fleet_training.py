"""The whole trainer with several embedded servers that freeze, die, come back, join and leave while it trains."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks, free_port
from tests.helpers.trainer_runs import BACKGROUND, EndlessRun, attempt, endless, environment, steps, wait_healthy

STRAGGLER_S = 1.5
STEP_S = 1.0
"""Shortest step: over half of STRAGGLER_S, so a push that waits for a straggler skips no version."""
FLAGS = BACKGROUND | {
    "--rollout.engine": "embedded",
    "--weight_sync.timeout_seconds": "8",
    "--weight_sync.straggler_seconds": str(STRAGGLER_S),
    "--validation.no-enable": None,
    "--checkpoint.no-enable": None,
    # Far from random weights; from then on versions differ, but hardly: random weights would show in the mismatch.
    "--sft.steps": "20",
    "--optimizer.lr": "1e-5",
    "--grpo.zero_variance_groups": "keep",
    "--grpo.entropy_coef": "0.01",
    "--grpo.prompts_per_step": "8",
    "--grpo.group_size": "2",
    "--reward.functions": "exact_match,paced:paced",
    "--reward.workers": "2",
}


class RecordingServer:
    """A server that can be killed and started again at its address; see recording_server.py."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder, name
        self._port = free_port()
        self._record = folder / f"{name}.jsonl"
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        script = ROOT / "tests" / "helpers" / "recording_server.py"
        arguments = ["--model", "train_configs/tiny_qwen3", "--port", self._port]
        log, record = self._folder / f"{self.name}.log", {"RECORD": str(self._record)}
        self.process = Ranks(1, script, *arguments, log=log, environment=environment() | record)

    def close(self) -> None:
        self.process.kill()

    def drifts(self, until: str = "") -> None:
        """It answers log-probabilities that are not the model's, for good or, with any text, until it is checked."""
        self._record.with_name(self._record.name + ".drift").write_text(until)

    def did(self, what: str, since: float = 0.0) -> list[dict]:
        """The values that it recorded under this name since that time, in order."""
        lines = [json.loads(line) for line in self._record.read_text().splitlines()]
        return [line for line in lines if line["did"] == what and line["time"] >= since]

    def versions(self) -> list[int]:
        return [int(line["version"]) for line in self.did("took")]

    def version_at(self, moment: float) -> int:
        return max(int(line["version"]) for line in self.did("took") if line["time"] <= moment)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[[str], list[RecordingServer]]]:
    """Start servers of these names, and wait until they serve."""
    with ExitStack() as stack:

        def start(names: str) -> list[RecordingServer]:
            started = [RecordingServer(tmp_path, name) for name in names]
            for server in started:
                stack.callback(server.close)
            for server in started:
                wait_healthy(server.url, server.process)
            return started

        yield start


@pytest.fixture(autouse=True)
def paced_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reward: 16 answers on two workers make a step of STEP_S."""
    (tmp_path / "paced.py").write_text(
        f"import time\n\ndef paced(answer, prompt):\n    time.sleep({STEP_S / 8})\n    return 0.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))


class StepTimes(threading.Thread):
    """When each step was logged, which is after its version was published."""

    def __init__(self, run: EndlessRun) -> None:
        super().__init__(daemon=True)
        self._run = run
        self.at: dict[int, float] = {}
        self.start()

    def run(self) -> None:
        while self._run.process.poll() is None:
            for line in steps(self._run.folder):
                self.at.setdefault(line["step"], time.time())
            time.sleep(0.05)


def urls(*servers: RecordingServer) -> dict[str, str]:
    return {"--rollout.urls": ",".join(server.url for server in servers)}


def wait_for_steps(run: EndlessRun, count: int) -> None:
    wanted = len(steps(run.folder)) + count
    run.wait_for(f"step {wanted}", lambda: len(steps(run.folder)) >= wanted)


def assert_first_asked_with_newest(server: RecordingServer, other: RecordingServer, since: float) -> None:
    """From `since` on it got no request until it had the version that `other` had at that time."""
    first = server.did("asked", since)[0]
    (took, *_) = server.did("took", since)
    assert first["time"] > took["time"]
    # The next common push may have reached the other one just before.
    assert int(first["version"]) >= other.version_at(first["time"]) - 1


def test_a_frozen_and_a_killed_server_delay_neither_the_run_nor_the_others(servers, tmp_path):
    well, frozen, killed, fine = started = servers("abcd")
    with endless(tmp_path / "run", FLAGS | urls(*started)) as run:
        step_times = StepTimes(run)
        wait_for_steps(run, 2)
        broken = time.time()
        frozen.process.send_signal(signal.SIGSTOP)
        killed.close()
        first_step_without = len(steps(run.folder)) + 1
        run.wait_for("the killed server to be missed", lambda: f"{killed.url} is lost" in run.log)
        killed.start()
        # Requests at the frozen server are asked elsewhere within 2 s, so that steps end while it is frozen.
        time.sleep(max(0.0, broken + 6.0 - time.time()))
        thawed = time.time()
        frozen.process.send_signal(signal.SIGCONT)
        run.wait_for("the killed server to be asked again", lambda: killed.did("asked", broken))
        run.wait_for("the frozen server to be asked again", lambda: frozen.did("took", thawed))
        back = frozen.did("took", thawed)[0]["time"]
        run.wait_for("requests for the frozen server", lambda: frozen.did("asked", back))
        run.wait_for("all servers in traffic", lambda: steps(run.folder)[-1]["sync/servers_in_traffic"] == 4)
        wait_for_steps(run, 3)
        lines = steps(run.folder)
        log = run.log

    out = [line for line in lines if line["sync/servers_in_traffic"] < 4]
    assert out, "steps went on without the frozen server"
    assert lines[-1]["sync/servers_in_traffic"] == 4 and lines[-1]["sync/servers_lost"] == 0
    assert frozen.url in log and killed.url in log

    # The others: each version, soon after it was published.
    assert len(lines) >= first_step_without + 4
    for server in (well, fine):
        assert server.versions()[: len(lines) - 1] == list(range(len(lines) - 1)), server.name
        late_s = [
            line["time"] - step_times.at[int(line["version"])]
            for line in server.did("took")
            if int(line["version"]) in step_times.at
        ]
        assert max(late_s) < STRAGGLER_S + 2.5, (server.name, late_s)
    # A publish takes no longer while a server does not answer.
    assert max(line["time/sync_s"] for line in out) < STRAGGLER_S / 2
    # Requests under way at the frozen server are asked elsewhere too.
    assert max(line["time/step_s"] for line in lines if line["step"] >= first_step_without) < 5.0 + STEP_S

    # The others come back with the newest weights; nothing was sampled by the restarted one's random weights.
    assert_first_asked_with_newest(killed, well, killed.did("started")[1]["time"])
    assert all(line["rollout/age_max"] <= 1 for line in lines)
    mismatches = [line.get("policy/mismatch_abs", 0.0) for line in lines]
    assert max(mismatches) < 0.05, mismatches


def test_servers_join_and_leave_during_a_run(servers, tmp_path):
    stays, leaves, joins = started = servers("abc")
    listed = tmp_path / "servers.txt"

    def write(*these: RecordingServer) -> None:
        new = tmp_path / "servers.new"
        new.write_text("# the run's servers\n" + "".join(f"{server.url}\n" for server in these))
        new.replace(listed)

    write(stays, leaves)
    with endless(tmp_path / "run", FLAGS | {"--rollout.urls_file": str(listed)}) as run:
        wait_for_steps(run, 1)
        write(stays, joins)
        run.wait_for("the new server to be asked", lambda: joins.did("asked"))
        wait_for_steps(run, 3)
        lines = steps(run.folder)
    assert_first_asked_with_newest(joins, stays, 0.0)
    taken_up = joins.did("took")[0]["time"]
    assert leaves.did("asked") and not leaves.did("asked", taken_up)
    assert all(server.process.poll() is None for server in started)
    assert stays.versions()[: len(lines) - 1] == list(range(len(lines) - 1))
    assert lines[-1]["sync/servers_in_traffic"] == 2 and lines[-1]["sync/servers_lost"] == 0
    assert all(line.get("policy/mismatch_abs", 0.0) < 0.05 for line in lines)


def test_a_server_whose_log_probabilities_drift_is_fed_again_before_it_is_asked(servers, tmp_path):
    drifts, fine = servers("ab")
    # Of each server's tokens of one step some hundred are of the trained version: enough to be judged.
    flags = FLAGS | {"--reward.functions": "exact_match", "--grpo.prompts_per_step": "64", "--grpo.group_size": "4"}
    with endless(tmp_path / "run", flags | urls(drifts, fine)) as run:
        wait_for_steps(run, 2)
        drifts.drifts("until it is checked")
        named = f"{drifts.url} is lost: sampler and trainer log-probabilities"
        run.wait_for("the server to be named", lambda: named in run.log)
        run.wait_for("it to be connected again", lambda: len(drifts.did("checked")) > 1)
        connected = drifts.did("checked")[1]["time"]
        run.wait_for("it to be asked again", lambda: drifts.did("asked", connected))
        wait_for_steps(run, 3)

        def agrees() -> bool:
            return steps(run.folder)[-1].get("server/mismatch_max", 1.0) < 0.05

        run.wait_for("a step without what it answered before", agrees)
        lines, log = steps(run.folder), run.log
    assert_first_asked_with_newest(drifts, fine, connected)
    worst = [line.get("server/mismatch_max", 0.0) for line in lines]
    assert max(worst) == pytest.approx(1.0, abs=0.05) and max(worst[:2]) < 0.05, worst
    assert log.count("is lost: ") == log.count(named) == 1, "no other server, and this one once"

    drifts.drifts()  # the only server: the run ends before the first optimizer step
    status, said = attempt(tmp_path / "alone", flags | urls(drifts))
    refusal = rf"error: sampler and trainer .* differ by 1\.\d+ nat on average at {drifts.url}, over \[rollout\]"
    refusal += ".*: old prefix: it scores the same tokens as the trainer does, and answers 1.000 nat apart"
    assert status == 2 and re.search(refusal, said), said[-2000:]
    assert not steps(tmp_path / "alone")


def test_too_few_servers_end_the_run_and_the_lost_one_is_named(servers, tmp_path):
    _, lost = started = servers("ab")
    with endless(tmp_path / "run", FLAGS | urls(*started) | {"--rollout.min_servers": "2"}, ranks=2) as run:
        lost.close()
        assert run.process.wait(60) != 0
        (reason,) = {line for line in run.log.splitlines() if line.startswith("error: ")}
        assert f"1 of 2 servers left, [rollout] min_servers = 2: {lost.url}: lost" in reason
        run.wait_until_gone(15)
