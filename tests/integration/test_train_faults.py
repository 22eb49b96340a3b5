"""What a user sees when the input is bad or a part dies: a clear message in seconds, and nothing left behind."""

import json
import os
import pty
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import (
    BACKGROUND,
    ENDLESS,
    UNHURRIED,
    EndlessRun,
    arguments,
    attempt,
    embedded_url,
    endless,
    environment,
    forked_server,
    processes_of,
    servers_of,
    steps,
    train,
)
from torchtitan.grpo.checkpoint.marker import complete_steps
from torchtitan.grpo.process.stopping import STOPPED

SYNC: dict[str, str | None] = {}


@contextmanager
def run_and_server(folder: Path, flags: dict[str, str | None], ranks: int = 1) -> Iterator[tuple[EndlessRun, int]]:
    """A run that is in its loop, and the process id of its server, which nobody starts again."""
    with (
        forked_server(TINY_QWEN3, folder.parent / "server.txt") as (url, server),
        endless(folder, flags | {"--rollout.urls": url}, ranks) as run,
    ):
        yield run, server


@pytest.mark.parametrize(
    ("mode", "number", "launcher"), [(SYNC, signal.SIGHUP, "agent"), (BACKGROUND, signal.SIGINT, "torchrun")]
)
def test_a_stopped_run_leaves_nothing_behind(mode, number, launcher, tmp_path):
    with endless(tmp_path / "run", mode, launcher=launcher) as run:
        (server,) = servers_of(run.folder)
        if mode:
            os.kill(server, signal.SIGSTOP)
            time.sleep(1.5)  # a push is under way then, and does not get on
        if number == signal.SIGINT:  # Ctrl-C reaches the whole foreground group
            run.process.signal(number)
        else:
            run.process.send_signal(number)
        assert run.process.wait(60) != 0
        run.wait_until_gone(15)
    ours = run.log.partition("Traceback")[0]  # torchrun's own, as its last words
    assert re.search(r"stopped at step (\d+), newest checkpoint \1 in .*/run/checkpoint, resume with ", ours)
    assert "SignalException" in run.log and run.log.count("Traceback") == 1, run.log


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_run_outlives_its_terminal_and_saves_if_it_is_told(hangs_up, tmp_path):
    host, device = pty.openpty()
    flags = UNHURRIED | {"--training.steps": "100000" if hangs_up else "6", "--rollout.urls": embedded_url()}
    told = environment() | {"TERM": "xterm", "COLUMNS": "100"}
    words = arguments(tmp_path / "run", flags)
    run = Ranks(1, ROOT / "grpo_train.py", *words, log=Path(os.ttyname(device)), environment=told)
    try:
        run.wait_until("the second step", lambda: len(steps(tmp_path / "run")) >= 2)
        assert b"step 1/" in os.read(host, 100_000)
        os.close(device)
        os.close(host)
        if hangs_up:
            run.send_signal(signal.SIGHUP)
        assert run.wait(60) == (STOPPED if hangs_up else 0)
    finally:
        run.kill()
    done = len(steps(tmp_path / "run"))
    assert complete_steps(tmp_path / "run" / "checkpoint")[-1] == done and (hangs_up or done == 6)


def test_a_signal_to_one_rank_stops_all_at_one_step_although_rank_0_waits_for_answers(tmp_path):
    with run_and_server(tmp_path / "run", {"--checkpoint.resume": "auto"}, ranks=2) as (run, server):
        os.kill(server, signal.SIGSTOP)  # rank 0 would wait ten minutes for a request, or five for a push
        time.sleep(1.5)
        os.kill(run.process.processes[1].pid, signal.SIGTERM)
        run.wait_for("the checkpoint", lambda: "Saved checkpoint" in run.log)
        os.kill(server, signal.SIGCONT)  # so that closing is quick
        for process in run.process.processes:
            process.join(25)
        assert [process.exitcode for process in run.process.processes] == [STOPPED, STOPPED], run.log[-3000:]
        done = len(steps(run.folder))
        where = f"newest checkpoint {done} in {run.folder}/checkpoint"
        assert run.log.splitlines()[-1] == f"stopped at step {done}, {where}, resume by the same command"
        assert "Traceback" not in run.log


def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path):
    with endless(tmp_path / "run", BACKGROUND, launcher="agent") as run:
        (server,) = servers_of(run.folder)
        assert len(set(processes_of(run.folder)) - {server}) >= 2, "its guard, and a rank"
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(30)
        run.wait_until_gone(30)


def test_a_trainer_that_is_killed_leaves_nothing_behind(tmp_path):
    """By itself; test_nodes has torchrun, which ends or restarts the others."""
    with endless(tmp_path / "run") as run:
        assert servers_of(run.folder)
        run.process.processes[0].kill()
        run.process.wait(30)
        run.wait_until_gone(30)


ENDS = {
    # Known at once; or found out by whoever waits for it first: a request, a weight sync, a look at its health.
    signal.SIGKILL: r"0 of 1 servers left, \[rollout\] min_servers = 1: http://127\.0\.0\.1:\d+: lost",
    signal.SIGSTOP: r"http://127\.0\.0\.1:.* within 6 s|0 of 1 servers left, \[rollout\] min_servers = 1",
}


@pytest.mark.parametrize(
    ("mode", "number"), [(SYNC, signal.SIGSTOP), (BACKGROUND, signal.SIGKILL), (BACKGROUND, signal.SIGSTOP)]
)
def test_a_run_without_a_server_ends_with_its_address_and_why(mode, number, tmp_path):
    limits = {"--weight_sync.timeout_seconds": "6", "--rollout.request_timeout_seconds": "6"}
    with run_and_server(tmp_path / "run", mode | limits) as (run, server):
        os.kill(server, number)
        assert run.process.wait(60) != 0
        reason = [line for line in run.log.splitlines() if line.startswith("error: ")][-1]
        assert re.search(ENDS[number], reason), reason
        assert complete_steps(run.folder / "checkpoint")[-1:] == [line["step"] for line in steps(run.folder)][-1:]
        run.wait_until_gone(15)


def test_a_hang_is_reported_and_ends_the_run_with_the_status_that_was_asked_for(tmp_path):
    limits = {"--debug.hang_seconds": "4", "--debug.hang_exit_code": "77"}
    with run_and_server(tmp_path / "run", limits) as (run, server):
        os.kill(server, signal.SIGSTOP)  # the limits of requests and pushes are minutes
        assert run.process.wait(60) == 77, run.log[-3000:]
        assert complete_steps(run.folder / "checkpoint")[-1:] == [line["step"] for line in steps(run.folder)][-1:]
        report = run.log[run.log.index("no progress for") :]
        assert re.search(r"no progress for \d+ s .*: in stage '(rollout|sync)' for \d+ s", report)
        for words in (r"weight sync: version \d+ published", r"http://127.0.0.1:\d+: in traffic, version \d+"):
            assert re.search(words, report), report
        assert re.search(r"\d+ requests wait for a server\n  \d+ requests in flight at http://127", report)
        assert "Thread MainThread:" in report and "weight-sync http://127" in report
        assert "rank 0 starting" not in report, "what others hear of rank 0 is not for its own report"
        run.wait_until_gone(15)


@pytest.mark.parametrize("mode", [SYNC, BACKGROUND])
def test_answers_without_a_reward_are_left_out_until_too_many_fail(mode, tmp_path, monkeypatch):
    """One answer hangs, some raise, and at last the judge is down. The last step is saved, and the run can go on."""
    (tmp_path / "judges.py").write_text(
        "import asyncio, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def after_step(step):\n"
        "    lines = folder / 'run' / 'metrics.jsonl'\n"
        "    return lines.exists() and f'\"step\": {step},' in lines.read_text()\n"
        "def is_down():\n"  # by then the answer that hung must be in a trained step
        "    if not after_step(6) or (folder / 'repaired').exists():\n"
        "        return False\n"
        "    return 'took longer than' in (folder / 'run' / 'samples.jsonl').read_text()\n"
        "def hangs(answer, prompt):\n"
        "    if after_step(2) and not (folder / 'hung').exists():\n"
        "        (folder / 'hung').touch()\n"
        "        time.sleep(100)\n"
        "    return len(answer)\n"
        "async def judge(answer, prompt):\n"
        "    await asyncio.sleep(0.01)\n"
        "    if is_down():\n"
        "        raise OSError('the judge is down')\n"
        "    number = (7 + sum(map(ord, answer))) % 5\n"
        "    return 1 / (number + after_step(1))\n"  # later, or the group of the answer that hangs may fail as a whole
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = mode | {"--reward.functions": "judges:hangs,judges:judge", "--reward.timeout_seconds": "1.0"}
    flags |= {"--reward.workers": "2"}
    flags |= {"--training.steps": "100", "--metrics.samples_per_step": "1000", "--rollout.urls": embedded_url()}
    flags |= {"--rollout.request_timeout_seconds": "6", "--rollout.group_timeout_seconds": "6"}
    status, said = attempt(tmp_path / "run", flags, ranks=2)
    assert status == 2 and "Traceback" not in said, said[-3000:]
    done = len(steps(tmp_path / "run"))
    assert complete_steps(tmp_path / "run" / "checkpoint") == [done] and done >= 6
    assert f"after step {done}, newest checkpoint {done} in " in said
    (error,) = {line for line in said.splitlines() if line.startswith("error: ")}  # each rank says it
    assert re.match(
        r'error: no group has got a reward for \d+ s in all, .*_seconds = 6: "judges:judge" failed on \d+, ', error
    )
    assert re.search(
        r"No group gets a reward. Others are asked in 1 s, .* after 6 s of this: .judges:judge. failed", said
    )
    assert f"raised OSError: the judge is down ({tmp_path / 'judges.py'}:18)" in error
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    groups = defaultdict(list)
    for sample in samples:
        assert (sample["reward"] is None) == bool(sample["reward_failures"])
        assert sample["advantage"] == 0 or sample["reward"] is not None
        groups[sample["step"], sample["prompt_index"]].append(sample)
    for group in groups.values():
        assert sum(sample["advantage"] for sample in group) == pytest.approx(0, abs=1e-6)
    left_out = [sample for sample in samples if sample["reward"] is None]
    shares = [line["reward/failed_fraction"] for line in steps(tmp_path / "run")]
    assert max(shares) <= 0.5 and sum(shares) * 32 == pytest.approx(len(left_out))
    failures = {(name, why.split(" (")[0]) for sample in left_out for name, why in sample["reward_failures"].items()}
    assert failures >= {
        ("judges:hangs", "took longer than [reward] timeout_seconds = 1.0"),
        ("judges:judge", "raised ZeroDivisionError: division by zero"),
    }
    (tmp_path / "repaired").touch()
    flags |= {"--checkpoint.resume": None, "--training.steps": str(done + 1)}
    assert [line["step"] for line in train(tmp_path / "run", flags)] == list(range(1, done + 2))


def test_steps_without_a_finite_gradient_are_left_out_and_end_the_run_on_every_rank(tmp_path, monkeypatch):
    (tmp_path / "huge_rewards.py").write_text("def huge(answer, prompt):\n    return 1e36 * len(answer)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags: dict[str, str | None] = {"--reward.functions": "huge_rewards:huge", "--validation.no-enable": None}
    flags |= {"--checkpoint.interval": "2", "--checkpoint.export_dtype": "none", "--sft.steps": "1"}
    flags |= {"--rollout.urls": embedded_url(), "--training.steps": "9"}
    status, said = attempt(tmp_path / "run", flags, ranks=2)
    assert status == 2 and "in 5 optimizer steps in a row" in said, said[-4000:]
    lines = steps(tmp_path / "run")
    assert [line["train/skipped_steps"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["policy/mismatch_abs"] < 1e-4, "the servers have the weights of before"
    saved = [complete_weights(tmp_path / "run" / "checkpoint" / f"step-{step}") for step in (4, 5)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def complete_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint / "dcp", checkpoint / "all.pt")
    return torch.load(checkpoint / "all.pt")["model"]


def test_no_rank_leaves_before_rank_0_has_validated(tmp_path, monkeypatch):
    """Without a checkpoint nothing else keeps ranks together at the end."""
    (tmp_path / "slow_rewards.py").write_text(
        "import pathlib, time\n"
        "def slow(answer, prompt):\n"
        f"    lines = pathlib.Path({str(tmp_path / 'run' / 'metrics.jsonl')!r})\n"
        "    under_way = lines.exists() and '\"step\": 0,' in lines.read_text()  # after the first validation\n"
        "    time.sleep(1.8 if under_way else 0)\n"
        "    return 0.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags: dict[str, str | None] = {"--reward.functions": "exact_match,slow_rewards:slow", "--reward.workers": "4"}
    flags |= {"--checkpoint.no-enable": None, "--training.steps": "1", "--validation.samples_per_prompt": "1"}
    flags |= {"--sft.steps": "1", "--grpo.prompts_per_step": "2", "--grpo.group_size": "2"}
    flags |= {"--rollout.urls": embedded_url()}
    status, said = attempt(tmp_path / "run", flags, ranks=2)
    assert status == 0, said[-4000:]


@pytest.mark.parametrize(("mode", "fails"), [(SYNC, "server"), (BACKGROUND, "server"), (SYNC, "1")])
def test_a_publish_that_fails_on_one_rank_costs_no_step_and_holds_up_no_other_rank(mode, fails, tmp_path):
    with forked_server(TINY_QWEN3, tmp_path / "server.txt") as (url, server):
        words = arguments(tmp_path / "run", ENDLESS | mode | {"--rollout.urls": url, "--validation.no-enable": None})
        told = environment() | {"FAILS": fails, "SERVER": str(server)}
        script = ROOT / "tests" / "helpers" / "failing_publish.py"
        run = Ranks(2, script, *words, log=tmp_path / "log.txt", environment=told)
        status = run.wait(60)  # the limits of pushes and requests are minutes
    assert status == 1, run.log[-3000:]
    done = len(steps(tmp_path / "run"))
    assert complete_steps(tmp_path / "run" / "checkpoint") == [done] and 2 <= done <= 4
    said = "0 of 1 servers left" if fails == "server" else "rank 1: RuntimeError: no memory is left"
    assert f"error: {said}" in run.log, run.log[-3000:]


def refused(tmp_path: Path, flags: dict[str, str | None], *words: str, limit_s: float = 90) -> None:
    started = time.monotonic()
    status, said = attempt(tmp_path / "run", flags)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status != 0 and errors, said[-3000:]
    assert all(word in said for word in words), errors
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in said.replace("[rank0]: ", "")
    assert time.monotonic() - started < limit_s


def test_bad_input_is_refused_by_name(tmp_path):
    """tests/unit/config/test_wrong_inputs.py has many more, in one process."""
    refused(tmp_path, {"--grpo.groupsize": "4"}, "--grpo.groupsize", "--grpo.group_size")


def test_an_unreachable_server_is_named(tmp_path):
    flags = {"--rollout.engine": "vllm", "--rollout.urls": "http://127.0.0.1:9"}
    refused(tmp_path, flags | {"--rollout.start_timeout_seconds": "2"}, "http://127.0.0.1:9", "start_timeout_seconds")


def test_a_step_is_saved_though_its_validation_ends_the_run_and_a_new_run_does_not_overwrite_it(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text(
        "import pathlib\n"
        f"lines = pathlib.Path({str(tmp_path / 'run' / 'metrics.jsonl')!r})\n"
        "held_out = set()\n"
        "def once(answer, prompt):\n"
        "    if lines.exists() and '\"step\": 0,' not in lines.read_text():  # the first validation\n"
        "        held_out.add(prompt.text)\n"
        "    elif prompt.text in held_out:\n"
        "        raise OSError('the judge is down')\n"
        "    return 1.0 / len(answer)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags: dict[str, str | None] = {"--reward.functions": "judges:once", "--reward.workers": "1"}
    flags |= {"--sft.steps": "0", "--validation.freq": "1", "--rollout.urls": embedded_url()}
    status, said = attempt(tmp_path / "run", flags, ranks=2)
    assert status == 2 and "raised OSError: the judge is down" in said, said[-4000:]
    assert "Step 1 has no validation: " in said  # as in an outage
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2]
    assert complete_steps(tmp_path / "run" / "checkpoint")[-1] == 2
    refused(tmp_path, {}, "[checkpoint] resume", "[job] dump_folder")
