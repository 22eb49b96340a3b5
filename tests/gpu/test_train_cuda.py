"""The whole trainer on CUDA: sharded over two GPUs, weights over NCCL to a server on another, a server that dies."""

import os
import signal
import time

import pytest
import torch

from tests.helpers import TINY_QWEN3
from tests.helpers.servers import serve_embedded
from tests.helpers.trainer_runs import BACKGROUND, endless, train
from torchtitan.grpo.process.stopping import GRACE_S

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BF16 = {"--training.mixed_precision_param": "bfloat16"}
# Gradients do not vanish when no answer of a group is right.
BF16 |= {"--grpo.entropy_coef": "0.01", "--grpo.zero_variance_groups": "keep"}


def checked(lines: list[dict]) -> None:
    assert [line["sync/version"] for line in lines] == [1, 2, 3]
    assert all(line.get("policy/mismatch_abs", 0.0) < 0.05 for line in lines)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert all(0 < line["throughput/mfu"] < 1 and line["throughput/step_mfu"] > 0 for line in lines)
    assert all(line["memory/allocated_peak_gib"] >= line["memory/allocated_gib"] > 0 for line in lines)
    hours = [line["cost/gpu_hours"] for line in lines]
    assert 0 < hours[0] < hours[1] < hours[2]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_one_gpu_shared_with_the_server(compile, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    checked(train(tmp_path, BF16 | ({"--compile.enable": None} if compile else {}), own_server=True))


@TWO_GPUS
def test_weights_go_over_nccl_to_a_server_on_its_own_gpu(tmp_path):
    checked(train(tmp_path, BF16, own_server=True))


@TWO_GPUS
@pytest.mark.parametrize("sleeps", [False, True])
def test_two_ranks_with_a_server_on_each_gpu(sleeps, tmp_path):
    """One gets its weights by CUDA IPC, the other over NCCL."""
    flags = BF16 | {"--rollout.colocate": None} | ({"--rollout.sleep_while_training": None} if sleeps else {})
    lines = train(tmp_path, flags, 2, own_server=True)
    checked(lines)
    assert all(line["sync/servers_in_traffic"] == 2 for line in lines)
    assert all(len([name for name in line if name.endswith("/wake_s")]) == 2 * sleeps for line in lines)


@TWO_GPUS
@pytest.mark.parametrize("tp", [1, 2])
def test_two_gpus_train_as_one(tp, tmp_path):
    start = train(tmp_path / "start", BF16 | {"--training.steps": "1"}, own_server=True)
    assert start
    folder = str(tmp_path / "start" / "checkpoint" / "step-1" / "hf")
    flags = {"--model.hf_assets_path": folder, "--model.weights": "hf", "--sft.steps": "0", "--optimizer.lr": "1e-5"}
    flags |= {"--grpo.entropy_coef": "0.01", "--grpo.zero_variance_groups": "keep"}
    alone = train(tmp_path / "one", flags, own_server=True)
    sharded = train(tmp_path / "two", flags | {"--parallelism.tensor_parallel_degree": str(tp)}, 2, own_server=True)
    for one, two in zip(alone, sharded, strict=True):
        for name in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert two[name] == pytest.approx(one[name], rel=0.02, abs=2e-3), (one["step"], name)


@TWO_GPUS
def test_two_gpus_gather_in_the_background(tmp_path):
    """On a communicator of its own, beside the collectives of a training step that is not waited for."""
    flags = BF16 | BACKGROUND | {"--training.steps": "12", "--rollout.max_answer_tokens": "4"}
    flags |= {"--async_grpo.max_trajectory_age_steps": "3", "--async_grpo.run_ahead": "full"}
    lines = train(tmp_path, flags, 2, own_server=True)
    versions = [line["sync/version"] for line in lines]
    assert versions == sorted(versions)
    assert versions[-1] >= 8
    assert all(line["rollout/age_max"] <= 3 and line["train/grad_norm"] > 0 for line in lines)
    assert sum(line["pack/ahead"] for line in lines) >= 2


@TWO_GPUS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_nccl_peer_ends_the_run_in_bounded_time(number, tmp_path):
    flags = BF16 | {"--weight_sync.timeout_seconds": "10", "--rollout.request_timeout_seconds": "10"}
    on_gpu = "--device", "cuda:1", "--dtype", "bfloat16"
    with (
        serve_embedded(tmp_path, TINY_QWEN3, *on_gpu) as server,  # nobody starts it again
        endless(tmp_path / "run", flags | {"--rollout.urls": server.url}, launcher="torchrun") as run,
    ):
        os.kill(server.process.pid, number)
        started = time.monotonic()
        assert run.process.wait(90) != 0
        print(f"ended {time.monotonic() - started:.1f} s after the server was lost")
        assert "http://127.0.0.1:" in run.log


@TWO_GPUS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_gpus_leave_nothing_when_told_to_stop(number, tmp_path):
    with endless(tmp_path / "run", BF16, ranks=2, launcher="torchrun") as run:
        started = time.monotonic()
        run.process.send_signal(number)
        assert run.process.wait(GRACE_S - 5) != 0  # nobody had to be ended by force
        run.wait_until_gone(5)
        print(f"gone {time.monotonic() - started:.1f} s after the signal")
