"""Runs whose rollout process is killed, stopped, or dies again and again. Where it is replaced, nothing is lost."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import (
    BACKGROUND,
    UNHURRIED,
    arguments,
    embedded_url,
    environment,
    steps,
    train,
    without_times,
)
from torchtitan.grpo.checkpoint.marker import complete_steps
from torchtitan.grpo.process.stopping import STOPPED
from torchtitan.grpo.rollouts.record import read_step, recorded_steps

KILL, STOP, TERM = int(signal.SIGKILL), int(signal.SIGSTOP), int(signal.SIGTERM)
PROCESS_MIB = 150
"""Most that a process may take before its first answer."""
SYNC: dict[str, str | None] = {
    "--training.steps": "6",
    "--lr_scheduler.total_steps": "6",
    "--validation.freq": "2",
    "--checkpoint.interval": "3",
    "--rollout.record_gib": "1",
    "--metrics.samples_per_step": "1000",
}


def lossy(
    folder: Path, flags: dict[str, str | None], losses: list[list], timeout_s: float = 120, **variables: object
) -> tuple[int, str]:
    """Run to whatever end: (exit status, what was printed)."""
    own = {"LOSSES": json.dumps(losses), "STARTED_ROLLOUTS": "0"} | variables
    told = environment() | {name: str(value) for name, value in own.items() if value is not None}
    words = arguments(folder, {"--rollout.urls": embedded_url()} | flags)
    script = ROOT / "tests" / "helpers" / "lost_rollouts.py"
    run = Ranks(1, script, *words, log=folder.parent / f"{folder.name}.log", environment=told)
    return run.wait(timeout_s), run.log


def repeatable(lines: list[dict]) -> list[dict]:
    losses = "rollout/process_losses"
    return [{name: value for name, value in line.items() if name != losses} for line in without_times(lines)]


def trained(folder: Path) -> dict[int, list[tuple[int, list[int]]]]:
    """Prompt and tokens of each answer, by step."""
    return {
        step: [(sample.prompt.index, list(sample.token_ids)) for group in read_step(path)[1] for sample in group]
        for step, path in recorded_steps(folder).items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, SYNC)
    return folder


def test_a_process_that_is_killed_at_any_moment_changes_nothing_in_sync(undisturbed, tmp_path):
    run = tmp_path / "run"
    losses = [
        ["pairs", 2, "before", KILL],  # in the warm start
        ["take", 2, "amid", KILL],
        ["take", 4, "after", KILL],  # of step 3, whose record and checkpoint come after it
        ["take", 6, "amid", KILL],  # of step 5
        ["validate", 4, "before", KILL],  # of step 6
    ]
    status, said = lossy(run, SYNC, losses, PROCESSES=tmp_path / "processes", STARTED_ROLLOUTS=2)
    assert status == 0 and "Traceback" not in said, said[-4000:]
    lines, others = steps(run), steps(undisturbed)
    assert lines[-1]["rollout/process_losses"] == len(losses) and others[-1]["rollout/process_losses"] == 0
    assert repeatable(lines) == repeatable(others)
    assert trained(run) == trained(undisturbed)
    for name in ("samples.jsonl", "validation_samples.jsonl"):
        assert (run / name).read_text() == (undisturbed / name).read_text()
    ended = r"the rollout process \(pid \d+\) was ended by SIGKILL \(.*\): the groups under way are lost, and another"
    assert len(re.findall(ended, said)) == len(re.findall(r"Rollouts go on after \d", said)) == len(losses)

    # The second is started as users' are. Tests fork the others.
    _, started, *others = [json.loads(line) for line in (tmp_path / "processes").read_text().splitlines()]
    assert len(others) == len(losses) - 1
    assert "rollout_service" in started["program"] and not started["torch"]
    assert started["rss_kib"] < PROCESS_MIB * 1024


def test_a_run_in_flight_goes_on_without_a_step_twice_and_its_checkpoint_resumes(tmp_path):
    run = tmp_path / "run"
    flags = BACKGROUND | {"--rollout.record_gib": "1", "--validation.freq": "4", "--training.steps": "8"}
    flags |= {"--lr_scheduler.total_steps": "10"}
    losses = [
        ["take", 2, "amid", KILL],
        ["log", 4, "before", KILL],
        ["take", 8, "amid", STOP],  # frozen
        ["state", 1, "before", KILL],  # while the last step is saved
    ]
    status, said = lossy(run, flags, losses, FROZEN_S=4)
    assert status == 0 and "Traceback" not in said, said[-4000:]
    assert "was ended, because it has said nothing for 4 s: the groups under way are lost" in said
    assert steps(run)[-1]["rollout/process_losses"] == 3
    train(run, flags | {"--training.steps": "10", "--checkpoint.resume": None})
    assert [line["step"] for line in steps(run)] == list(range(1, 11))
    groups = [{prompt for prompt, _ in answers} for answers in trained(run).values()]
    assert [len(each) for each in groups] == [8] * 10 and len(set.union(*groups)) == 80, "no prompt twice"
    assert all(line["rollout/age_max"] <= 2 for line in steps(run))


@pytest.mark.parametrize("loss", [["take", 2, "after", KILL, TERM], ["take", 3, "before", STOP, TERM]])
def test_a_run_that_is_stopped_while_the_process_is_replaced_or_frozen_saves_its_step(undisturbed, loss, tmp_path):
    run = tmp_path / "run"
    status, said = lossy(run, SYNC | {"--checkpoint.interval": "100"}, [loss], STOP_S=2, BEGIN_S=20)
    assert status == STOPPED and "Traceback" not in said, said[-4000:]
    assert said.splitlines()[-1].startswith("stopped at step 2, newest checkpoint 2 in ")
    assert [line["step"] for line in steps(run)] == [1, 2] and complete_steps(run / "checkpoint") == [2]
    assert "Saved checkpoint" in said.partition("Rollouts go on")[0], "nothing waits for another process"
    resumed = train(run, SYNC | {"--checkpoint.resume": None})
    assert repeatable(resumed)[2:] == repeatable(steps(undisturbed))[2:]


def test_a_process_that_dies_again_and_again_ends_the_run_with_how_and_the_step_is_saved(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (tmp_path / "deadly.py").write_text(
        "import os, pathlib\n"
        "from torchtitan.grpo.rollouts.environment import single_turn\n"
        "async def rollout(client, prompt):\n"
        f"    lines = pathlib.Path({str(run / 'metrics.jsonl')!r})\n"
        "    if lines.exists() and '\"step\": 1,' in lines.read_text():\n"
        "        os.kill(os.getpid(), 11)\n"
        "    return await single_turn(client, prompt)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = {"--rollout.environment": "deadly:rollout", "--validation.no-enable": None}
    status, said = lossy(run, flags, [], LOSSES_MAX=1)
    assert status == 1 and said.count("Traceback") == 0, said[-4000:]
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: the rollout process \(pid \d+\) was ended by SIGSEGV\. .* 2 times in a row", error)
    assert "Fatal Python error: Segmentation fault" in said, "where it was"
    assert complete_steps(run / "checkpoint") == [1] == [line["step"] for line in steps(run)]


def test_answers_of_a_version_that_is_still_being_published_are_taken(tmp_path):
    """One server may have it while the trainer waits for others, and the process has not been called since."""
    run = tmp_path / "run"
    flags = UNHURRIED | {
        "--async_grpo.enabled": None,
        "--async_grpo.max_trajectory_age_steps": "2",
        "--async_grpo.run_ahead": "full",
        "--weight_sync.no-async_weight_update": None,
        "--training.steps": "9",
        "--lr_scheduler.total_steps": "9",
        "--validation.no-enable": None,
    }
    status, said = lossy(run, flags, [], PUBLISH_S=0.5)
    assert status == 0 and "is refused" not in said, said[-4000:]
    lines = steps(run)
    assert any(line["pack/ahead"] for line in lines), "or nothing was tried"
    assert lines[-1]["rollout/retried"] == 0


def test_an_environment_may_use_models_of_transformers(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(
        "import torch\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "from torchtitan.grpo.rollouts.environment import single_turn\n"
        f"model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({str(TINY_QWEN3)!r}))\n"
        "async def rollout(client, prompt):\n"
        "    samples = await single_turn(client, prompt)\n"
        "    for sample in samples:\n"
        "        sample.reward = model(torch.tensor([sample.token_ids])).logits.mean().item()\n"
        "    return samples\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tmp_path / "run"
    flags = {"--rollout.environment": "judge:rollout", "--validation.no-enable": None, "--training.steps": "2"}
    # The first process is forked, and the second is started as users' are.
    status, said = lossy(run, flags, [["take", 2, "before", KILL]], STARTED_ROLLOUTS=2)
    assert status == 0 and "Rollouts go on" in said, said[-4000:]
    assert [line["step"] for line in steps(run)] == [1, 2]


TWO = SYNC | {"--rollout.processes": "2", "--rollout.record_gib": "0"}


@pytest.fixture(scope="module")
def two_undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    train(folder, TWO)
    return folder


def logged(folder: Path) -> dict[int, list[int]]:
    """The prompts of all answers, by step."""
    prompts: dict[int, list[int]] = {}
    for line in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        prompts.setdefault(line["step"], []).append(line["prompt_index"])
    return prompts


def test_two_processes_train_on_the_prompts_of_one(undisturbed, two_undisturbed):
    one, two = logged(undisturbed), logged(two_undisturbed)
    assert list(one) == list(two) == [1, 2, 3, 4, 5, 6]
    assert {step: sorted(own) for step, own in one.items()} == {step: sorted(own) for step, own in two.items()}
    last, other = steps(two_undisturbed)[-1], steps(undisturbed)[-1]
    for name in ("rollout/groups_asked", "rollout/groups_finished", "data/epoch"):
        assert last[name] == pytest.approx(other[name]), name
    assert last.keys() == other.keys() - {"time/record_s"}
    answers = [json.loads(line) for line in (two_undisturbed / "samples.jsonl").read_text().splitlines()]
    for step in steps(two_undisturbed):
        own = [answer for answer in answers if answer["step"] == step["step"]]
        assert step["rollout/answer_tokens"] == sum(answer["answer_tokens"] for answer in own)
        assert step["reward/mean"] == pytest.approx(sum(answer["reward"] for answer in own) / len(own))
        by_prompt: dict[int, float] = {}
        for answer in own:
            by_prompt[answer["prompt_index"]] = by_prompt.get(answer["prompt_index"], 0.0) + answer["advantage"]
        assert all(abs(total) < 1e-4 for total in by_prompt.values()), "each answer has its own group's advantage"


def test_two_processes_that_are_killed_lose_no_step_and_train_none_twice(two_undisturbed, tmp_path):
    run = tmp_path / "run"
    losses = [
        ["pairs", 3, "amid", KILL],
        ["take_share", 3, "amid", KILL],  # one of step 2's
        ["take_share", 7, "after", KILL],  # it has taken its groups, and another one takes them again
        ["pack_share", 10, "after", KILL],
        ["state", 1, "before", KILL],
    ]
    status, said = lossy(run, TWO, losses)
    assert status == 0 and "Traceback" not in said, said[-4000:]
    assert steps(run)[-1]["rollout/process_losses"] == len(losses)
    assert [line["step"] for line in steps(run)] == list(range(1, 7))
    assert {step: sorted(own) for step, own in logged(run).items()} == {
        step: sorted(own) for step, own in logged(two_undisturbed).items()
    }


def test_two_processes_resume_and_another_number_is_refused(two_undisturbed, tmp_path):
    run = tmp_path / "run"
    train(run, TWO | {"--training.steps": "3"}, STARTED_ROLLOUTS="0")
    resumed = TWO | {"--checkpoint.resume": None}
    status, said = lossy(run, resumed | {"--rollout.processes": "1"}, [])
    assert status == 2 and "has the prompts of 2 rollout processes" in said and "processes = 2" in said, said[-2000:]
    train(run, resumed, 2, STARTED_ROLLOUTS="0")  # each rank gets rows of both
    assert {step: sorted(own) for step, own in logged(run).items()} == {
        step: sorted(own) for step, own in logged(two_undisturbed).items()
    }
