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
    attempt,
    embedded_server,
    endless,
    environment,
    forked_server,
    small_run,
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
        "rollout/process_losses",
        "validation/",
        "checkpoint/",
        "data/",
    )
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in without_times(lines)]


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_run_with_a_teacher_resumes_and_replays_exactly(teacher, top_k, tmp_path):
    flags = {"--distill.teacher_urls": teacher, "--distill.mode": "add", "--distill.coef": "0.3"}
    flags |= {"--distill.top_k": str(top_k)}
    flags |= {"--lr_scheduler.total_steps": "4", "--checkpoint.interval": "2", "--rollout.record_gib": "1"}
    whole = train(tmp_path / "whole", flags | {"--training.steps": "4"})
    train(tmp_path / "parts", flags | {"--training.steps": "2"})
    parts = train(tmp_path / "parts", flags | {"--training.steps": "4", "--checkpoint.resume": None})
    assert plain(parts) == plain(whole)
    assert all(line["distill/reverse_kl"] > 0 and line["distill/failures"] == 0 for line in whole)
    assert all(line[TIMED] > 0 and line["distill/failed_requests"] == 0 for line in whole)
    assert all(line["reward/mean"] > 0 for line in whole)
    if top_k:
        assert all(line["distill/top_k_kl"] > 0 and line["distill/top_k_mass"] < 1 for line in whole)

    flags |= {"--training.steps": "4"}
    replay(tmp_path / "whole", tmp_path / "again", flags)
    assert plain(steps(tmp_path / "again")) == plain(whole)
    if top_k:  # random weights depend on the number of ranks
        flags |= {"--model.weights": "hf", "--model.hf_assets_path": str(tmp_path / "whole/checkpoint/step-4/hf")}
        for ranks in (1, 2):
            only = {"--sft.steps": "0", "--distill.mode": "only"}
            only |= {"--parallelism.context_parallel_degree": str(ranks)}
            replay(tmp_path / "whole", tmp_path / f"on_{ranks}", flags | only, ranks)
        one, two = (steps(tmp_path / f"on_{ranks}")[0] for ranks in (1, 2))
        for name in ("train/loss", "train/grad_norm", "distill/top_k_kl", "distill/top_k_mass"):
            assert two[name] == pytest.approx(one[name], rel=1e-4)
        assert one["train/loss"] == pytest.approx(0.3 * one["distill/top_k_kl"], rel=1e-4)
        assert steps(tmp_path / "on_1")[-1]["distill/top_k_kl"] < 0.9 * one["distill/top_k_kl"]


def replay(run: Path, out: Path, flags: dict[str, str], ranks: int = 1) -> None:
    given = [part for flag in small_run(flags).items() for part in flag if part is not None]
    command, log = [run, "--out", out, *given], out.with_suffix(".log")
    ranks_of_it = Ranks(ranks, "torchtitan.grpo.commands", "replay", *command, log=log, environment=environment())
    assert ranks_of_it.wait(120) == 0, ranks_of_it.log[-4000:]


def test_a_run_without_rewards_outlives_one_of_two_teachers_and_names_the_last(tmp_path):
    """`kill -9`, in the background mode, with a list of teachers for one source and another for the rest. A group that
    nobody scores is replaced, and if that goes on the run ends."""
    config = tmp_path / "mixture.toml"
    mixture = MIXTURE.partition("[[validation.sets]]")[0].replace('functions = ["numeric_match"]', "")
    config.write_text((ROOT / "train_configs" / "quickstart.toml").read_text() + mixture)
    with (
        forked_server(TINY_QWEN3, tmp_path / "first.log") as (first, first_pid),
        forked_server(TINY_QWEN3, tmp_path / "second.log") as (second, second_pid),
    ):
        urls = f"small={first},small={second},{second},{first}"
        flags = BACKGROUND | {"--distill.teacher_urls": urls}
        flags |= {"--job.config_file": str(config), "--reward.functions": "", "--validation.no-enable": None}
        flags |= {"--rollout.request_timeout_seconds": "8", "--rollout.group_timeout_seconds": "8"}
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
            assert "over [rollout] group_timeout_seconds = 8: " in run.log
            assert '"teacher" failed on' in run.log and "[rollout] request_timeout_seconds" in run.log


def test_a_teacher_that_is_not_there_is_named_before_anything_starts(tmp_path: Path):
    flags = {"--distill.teacher_urls": "http://127.0.0.1:1", "--rollout.start_timeout_seconds": "0.5"}
    status, said = attempt(tmp_path / "run", flags)
    assert status == 2 and "http://127.0.0.1:1: not healthy" in said and "[distill] teacher_urls" in said
    assert "embedded server" not in said, "no server was started"
