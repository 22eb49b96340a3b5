import time

import pytest
import torch

from torchtitan.grpo.reporting.ledger import Ledger, shares, verdict


def test_stages_and_other_sum_to_the_step():
    ledger = Ledger("cpu")
    started = time.perf_counter()
    with ledger.stage("rollout"):
        time.sleep(0.03)
    for _ in range(2):
        with ledger.stage("train"):
            time.sleep(0.01)
    time.sleep(0.015)
    seconds = ledger.close_step()
    wall_s = time.perf_counter() - started

    assert set(seconds) == {"time/rollout_s", "time/train_s", "time/step_s", "time/other_s"}
    assert seconds["time/rollout_s"] >= 0.03
    assert seconds["time/train_s"] >= 0.02
    parts_s = seconds["time/rollout_s"] + seconds["time/train_s"] + seconds["time/other_s"]
    assert parts_s == pytest.approx(seconds["time/step_s"], abs=1e-9)
    assert 0.065 <= seconds["time/step_s"] <= wall_s


def test_steps_follow_each_other_without_a_gap_and_start_empty():
    ledger = Ledger("cpu")
    with ledger.stage("train"):
        pass
    ledger.close_step()
    time.sleep(0.02)  # logging, say: it belongs to the second step
    with ledger.stage("rollout"):
        pass
    seconds = ledger.close_step()
    assert "time/train_s" not in seconds
    assert seconds["time/other_s"] >= 0.02


def test_a_stage_that_raises_is_still_booked():
    ledger = Ledger("cpu")
    with pytest.raises(KeyError), ledger.stage("rollout"):
        time.sleep(0.01)
        raise KeyError
    assert ledger.close_step()["time/rollout_s"] >= 0.01


def test_seconds_of_others_are_moved_or_hidden():
    ledger, began = Ledger("cpu"), time.perf_counter()
    with ledger.stage("rollout"):
        time.sleep(0.05)
    spent_s = time.perf_counter() - began
    with ledger.stage("sync"):
        time.sleep(0.01)
    ledger.move("reward", 0.03, out_of="rollout")
    ledger.hide("sync", 7.0)
    seconds = ledger.close_step()

    assert seconds["time/reward_s"] == 0.03
    assert 0.02 <= seconds["time/rollout_s"] <= spent_s - 0.03
    assert seconds["time/sync_hidden_s"] == 7.0
    assert seconds["time/sync_s"] < 7.0
    parts = ("rollout", "reward", "sync", "other")
    assert sum(seconds[f"time/{part}_s"] for part in parts) == pytest.approx(seconds["time/step_s"], abs=1e-9)


def test_misuse_is_refused():
    ledger = Ledger("cpu")
    with pytest.raises(RuntimeError, match="rollout"), ledger.stage("rollout"):
        ledger.close_step()
    inside = pytest.raises(RuntimeError, match="'train' begins inside the stage 'rollout'")
    with inside, ledger.stage("rollout"), ledger.stage("train"):
        pass
    ledger.move("reward", 1.0, out_of="rolout")
    with pytest.raises(ValueError, match="rolout"):
        ledger.close_step()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"time/train_s": 6, "time/pack_s": 1, "time/rollout_s": 3}, "trainer-bound (trainer 70%, rollout 30%)"),
        ({"time/train_s": 2, "time/rollout_s": 8}, "rollout-bound (rollout 80%, trainer 20%)"),
        ({"time/sync_s": 5, "time/train_s": 3, "time/rollout_s": 2}, "sync-bound (sync 50%, trainer 30%, rollout 20%)"),
        ({"time/reward_s": 9, "time/train_s": 1}, "reward-bound (reward 90%, trainer 10%)"),
        ({"time/train_s": 5, "time/rollout_s": 4.8}, "balanced (trainer 51%, rollout 49%)"),
        ({}, ""),
    ],
)
def test_verdict(seconds, expected):
    assert verdict(seconds) == expected


def test_shares_leave_out_what_is_no_stage_of_the_step():
    beside = {
        "time/step_s": 99.0,
        "time/other_s": 9.0,
        "time/validate_s": 9.0,
        "time/checkpoint_s": 9.0,
        "time/rollout_hidden_s": 9.0,
        "time/rollout_host_s": 9.0,
        "sync/wire_s": 9.0,
    }
    assert shares(beside | {"time/train_s": 3.0, "time/rollout_s": 1.0}) == {
        "trainer": 0.75,
        "rollout": 0.25,
        "sync": 0.0,
        "reward": 0.0,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_work_is_booked_on_the_stage_that_launched_it():
    ledger = Ledger("cuda")
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):  # warm up
        x @ x
    torch.cuda.synchronize()
    with ledger.stage("train"):
        for _ in range(200):
            x @ x
    with ledger.stage("sync"):
        torch.cuda.synchronize()  # the host waits here for the stage before
    seconds = ledger.close_step()
    assert seconds["time/train_s"] > 5 * seconds["time/sync_s"]
    assert seconds["time/sync_host_s"] > seconds["time/sync_s"]
    parts = ("train", "sync", "other")
    assert sum(seconds[f"time/{part}_s"] for part in parts) == pytest.approx(seconds["time/step_s"], rel=0.05)
