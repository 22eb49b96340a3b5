"""A whole run with embedded teachers: it resumes and replays exactly, and survives a teacher's death."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import (
    BACKGROUND,
    SMALL,
    attempt,
    embedded_server,
    endless,
    environment,
    forked_server,
    steps,
    train,
    without_times,
)
from tests.integration.test_train import MIXTURE  # a source with two functions, one with one

TIMED = "distill/teacher_s"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_server(TINY_QWEN3, tmp_path_factory.mktemp("teacher") / "server.log") as url:
        yield url


def plain(lines: list[dict]) -> list[dict]:
    """What must repeat, but for what comes from servers or a resume."""
    other = (
        TIMED,
        "distill/failed_requests",
        "rollout/groups_",
        "rollout/retried",
        "validation/",
        "checkpoint/",
        "data/",
    )
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in without_times(lines)]


def test_a_run_with_a_teacher_resumes_and_replays_exactly(teacher, tmp_path):
    flags = {"--distill.teacher_urls": teacher, "--distill.mode": "add", "--distill.coef": "0.3"}
    flags |= {"--lr_scheduler.total_steps": "4", "--checkpoint.interval": "2", "--rollout.record_gib": "1"}
    whole = train(tmp_path / "whole", flags | {"--training.steps": "4"})
    train(tmp_path / "parts", flags | {"--training.steps": "2"})
    parts = train(tmp_path / "parts", flags | {"--training.steps": "4", "--checkpoint.resume": None})
    assert plain(parts) == plain(whole)
    assert all(line["distill/reverse_kl"] > 0 and line["distill/failures"] == 0 for line in whole)
    assert all(line[TIMED] > 0 and line["distill/failed_requests"] == 0 for line in whole)
    assert all(line["reward/mean"] > 0 for line in whole)

    given = [part for flag in (SMALL | flags | {"--training.steps": "4"}).items() for part in flag if part is not None]
    command = [tmp_path / "whole", "--out", tmp_path / "again", *given]
    log = tmp_path / "again.log"
    replay = Ranks(1, ROOT / "scripts" / "replay.py", *command, log=log, environment=environment())
    assert replay.wait(120) == 0, replay.log[-4000:]
    assert plain(steps(tmp_path / "again")) == plain(whole)


def test_a_run_without_rewards_outlives_one_of_two_teachers_and_names_the_last(tmp_path):
    """`kill -9`, in the background mode, with a list of teachers for one source and another for the rest. A group that
    nobody scores is left out, and a step of nothing ends the run."""
    config = tmp_path / "mixture.toml"
    mixture = MIXTURE.partition("[[validation.sets]]")[0].replace('functions = ["numeric_match"]', "")
    config.write_text((ROOT / "train_configs" / "quickstart.toml").read_text() + mixture)
    with (
        forked_server(TINY_QWEN3, tmp_path / "first.log") as (first, first_pid),
        forked_server(TINY_QWEN3, tmp_path / "second.log") as (second, second_pid),
    ):
        urls = f"small={first},small={second},{second},{first}"
        flags = BACKGROUND | {"--distill.teacher_urls": urls, "--distill.timeout_seconds": "3"}
        flags |= {"--job.config_file": str(config), "--reward.functions": "", "--validation.no-enable": None}
        with endless(tmp_path / "run", flags) as run:
            [line] = steps(run.folder)[:1]
            assert line["train/grad_norm"] > 0 and line["reward/mean"] == 0 < line["distill/reverse_kl"]
            os.kill(first_pid, signal.SIGKILL)
            run.wait_for("a failed request", lambda: steps(run.folder)[-1]["distill/failed_requests"] > 0)
            seen = len(steps(run.folder))
            run.wait_for("more steps", lambda: len(steps(run.folder)) > seen + 2)
            lines = steps(run.folder)
            assert {line["reward/failed_fraction"] for line in lines} == {0} and first in run.log
            assert {"distill/small/reverse_kl", "distill/large/reverse_kl"} <= set().union(*lines)
            os.kill(second_pid, signal.SIGKILL)
            assert run.process.wait(60) == 2
            assert '"teacher" failed on' in run.log and "[distill] timeout_seconds" in run.log


def test_a_teacher_that_is_not_there_is_named_before_anything_starts(tmp_path: Path):
    flags = {"--distill.teacher_urls": "http://127.0.0.1:1", "--rollout.start_timeout_seconds": "0.5"}
    status, said = attempt(tmp_path / "run", flags)
    assert status == 2 and "http://127.0.0.1:1: not healthy" in said and "[distill] teacher_urls" in said
    assert "embedded server" not in said, "no server was started"
