"""What of `[ray]` needs no cluster: order of ranks, command lines of restarts, which error a run ends with, and how the
driver waits for a step."""

import os
import subprocess
import threading
import time

import pytest

import grpo_train
from tests.helpers import ROOT
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.stopping import STOPPED, Stopped
from torchtitan.grpo.run.ray.driver import drive
from torchtitan.grpo.run.ray.outcome import RanksFailed, error_of, outcome_of

TINY = ["--model.hf_assets_path", str(ROOT / "train_configs" / "tiny_qwen3"), "--ray.enable", "--ray.ranks", "2"]


def place(node: str, address: str, *gpus: str) -> dict:
    return {"node": node, "address": address, "gpus": list(gpus)}


def test_ranks_of_a_node_are_neighbours_in_order_of_their_gpus_and_the_drivers_node_comes_first():
    cluster = pytest.importorskip("torchtitan.grpo.run.ray.cluster", exc_type=ImportError)
    places = [
        place("far", "10.0.0.10", "0"),
        place("near", "10.0.0.9", "10"),
        place("mine", "10.0.0.200", "1"),
        place("near", "10.0.0.9", "2"),
        place("mine", "10.0.0.200", "0"),
    ]
    order = cluster.in_order(places, "mine")
    sorted_places = [(places[i]["node"], places[i]["gpus"][0]) for i in order]
    assert sorted_places == [("mine", "0"), ("mine", "1"), ("near", "2"), ("near", "10"), ("far", "0")]


def test_a_server_needs_gpus_only_where_it_has_some():
    servers = pytest.importorskip("torchtitan.grpo.run.ray.servers", exc_type=ImportError)
    vllm = ["--rollout.engine", "vllm", "--rollout.replicas", "2", "--rollout.gpus_per_server", "4"]
    made = servers.Servers(load_config([*TINY, *vllm]))
    assert made.count == 2 and made.variables
    assert made.needs(cuda=True) == {"CPU": 1, "GPU": 4} and made.needs(cuda=False) == {"CPU": 1}
    assert servers.Servers(load_config(TINY)).count == 1
    none = servers.Servers(load_config([*TINY, "--rollout.urls", "http://a:1"]))
    assert none.count == 0 and not none.variables


def test_a_restart_replaces_what_the_command_line_says_of_the_checkpoint():
    attempts = pytest.importorskip("torchtitan.grpo.run.ray.attempts", exc_type=ImportError)
    given = [
        "--checkpoint.no-resume",
        "--grpo.group_size",
        "4",
        "--checkpoint.load-step=7",
        "--debug.seed",
        "3",
    ]
    argv = attempts.with_flags(given, {"checkpoint.resume": "auto", "checkpoint.load_step": "-1"})
    assert argv[:4] == ["--grpo.group_size", "4", "--debug.seed", "3"]
    checkpoint = load_config([*TINY, *argv]).checkpoint
    assert (checkpoint.resume, checkpoint.load_step) == ("auto", -1)
    assert attempts.with_flags(argv, {"checkpoint.resume": "auto", "checkpoint.load_step": "-1"}) == argv


def test_the_class_travels_by_its_name():
    attempts = pytest.importorskip("torchtitan.grpo.run.ray.attempts", exc_type=ImportError)
    assert attempts.import_path(grpo_train.Trainer) == "grpo_train:Trainer"


def test_the_first_failure_is_the_run_s_and_counts_more_than_a_stop():
    assert error_of({0: outcome_of(None), 1: outcome_of(None)}) is None
    first = outcome_of(ValueError("the cause"))
    later = outcome_of(RuntimeError("connection closed")) | {"at": first["at"] + 1}
    stopped = outcome_of(Stopped(STOPPED, "stopped at step 3")) | {"at": first["at"] - 1}
    error = error_of({0: later, 1: first, 2: stopped})
    assert isinstance(error, RanksFailed)
    assert str(error) == "rank 1 failed:\nValueError: the cause"
    only_stopped = error_of({0: stopped, 1: outcome_of(Stopped(STOPPED))})
    assert isinstance(only_stopped, Stopped)
    assert (only_stopped.code, only_stopped.words) == (STOPPED, "stopped at step 3")
    failed = error_of({0: outcome_of(EngineError("http://a: gone"))})
    assert isinstance(failed, RanksFailed) and str(failed) == "rank 0 failed:\nhttp://a: gone", "no traceback"
    refused = error_of({0: outcome_of(UserError("[data] path"))})
    assert isinstance(refused, UserError) and str(refused) == "[data] path"


def test_the_driver_sleeps_until_every_rank_has_rung_or_one_has_died():
    dispatch = pytest.importorskip("torchtitan.grpo.run.ray.dispatch", exc_type=ImportError)
    rang = []

    def ring_late() -> None:
        rang.append(True)
        rank.write(b".")

    with (
        dispatch._Bell() as bell,
        open(bell.path, "wb", buffering=0) as rank,
        subprocess.Popen(["cat"], stdin=-1) as cat,
    ):
        bell.expect([os.getpid(), cat.pid])
        rank.write(b".")
        threading.Timer(0.1, ring_late).start()
        worked = time.thread_time()
        bell.wait(time.monotonic() + 60)
        assert rang and time.thread_time() - worked < 0.05  # Ray's own wait never sleeps
        bell.wait(time.monotonic())  # nobody rings in time
        cat.kill()
        deadline = time.monotonic() + 60
        bell.wait(deadline)
        assert time.monotonic() < deadline


def test_torchrun_and_ray_are_not_both_taken(monkeypatch):
    config = load_config(TINY)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"\[ray\] enable = true, and RANK is set, as by torchrun"):
        drive([], config, grpo_train.Trainer, "grpo")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ray.address", "ray://head:10001"], r"\[ray\] address = .*Ray Client"),
        (
            ["--ray.expose_servers", "--rollout.urls", "http://a:1"],
            r"\[ray\] expose_servers = true is read with \[rollout\] replicas over 0 only",
        ),
        (["--parallelism.data_parallel_shard_degree", "3"], r"this run has 2 processes: change them or \[ray\] ranks"),
        (["--ray.dispatch", "graph"], "--ray.dispatch"),
        (["--debug.hang_seconds", "0"], r"\[ray\] enable = true is read with \[debug\] hang_seconds over 0 only"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(flags, words):
    with pytest.raises(UserError, match=words):
        load_config([*TINY, *flags])


def test_a_dry_run_says_what_ray_would_do(capsys):
    assert (
        grpo_train.main(
            [
                *TINY,
                "--dry_run",
                "--training.seq_len",
                "512",
                "--data.max_prompt_tokens",
                "128",
                "--rollout.max_answer_tokens",
                "128",
                "--ray.dispatch",
                "compiled",
                "--rollout.replicas",
                "2",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "on 2 processes" in said
    assert "each in a Ray actor, on the node of rank 0" in said


def test_a_servers_node_that_does_not_have_the_runs_folder_is_told_what_it_needs(tmp_path, monkeypatch):
    supervised = pytest.importorskip("torchtitan.grpo.run.ray.supervised", exc_type=ImportError)
    monkeypatch.setattr(supervised.ray, "get_gpu_ids", list)
    monkeypatch.setattr(supervised, "init_log_lines", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    argv = [*TINY, "--job.dump_folder", "file/run"]
    server = supervised.SupervisedServer(0, dict(os.environ), argv, "", "grpo", str(tmp_path))
    assert server.serve("127.0.0.1").startswith("[job] dump_folder must be on a file system that all nodes share: ")
    server.close()
