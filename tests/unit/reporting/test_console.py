import logging
import re

import pytest

from tests.helpers import ROOT
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.reporting.console import Console, duration, step_warnings

STEP = {
    "reward/mean": 0.5,
    "throughput/answer_tokens_per_s": 3211.4,
    "rollout/age_mean": 1.25,
    "time/rollout_s": 80.0,
    "time/train_s": 19.0,
    "time/other_s": 1.0,
    "time/step_s": 100.0,
}


def config_of(*arguments: str) -> JobConfig:
    return load_config(["--model.hf_assets_path", str(ROOT / "train_configs" / "tiny_qwen3"), *arguments])


def test_a_step_is_one_line(caplog):
    console = Console(config_of(), 5)
    with caplog.at_level(logging.INFO):
        console.log(20, {"sft/loss": 1.5}, "sft/step")
        console.log(1, STEP | {"validation/greedy_reward": 0.25})
        console.log(2, {"reward/mean": 1.0})
    sft, step, next_step = (record.getMessage() for record in caplog.records)
    assert step == (
        "step 1/5  eta 0:06:40  reward 0.500  held-out 0.250  tokens/s 3,211  s/step 100.00"
        "  rollout-bound (rollout 81%, trainer 19%)"
    )
    assert sft == "sft step 20/0  loss 1.5"
    assert re.fullmatch(r"step 2/5  eta \d:\d\d:\d\d  reward 1.000  held-out 0.250", next_step)


def test_warnings_stand_before_the_verdict(caplog):
    console = Console(config_of("--async_grpo.enabled"), 5)
    with caplog.at_level(logging.INFO):
        console.log(1, STEP | {"reward/failures": 4096})
    assert "  s/step 100.00  age 1.2  4096 scores failed  rollout-bound (" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("values", "other_signal", "expected"),
    [
        ({"reward/failures": 0, "reward/zero_variance_fraction": 0.9, "train/answer_tokens": 7.0}, False, ""),
        ({"reward/failures": 3}, False, "  3 scores failed"),
        ({"reward/zero_variance_fraction": 1.0}, False, "  no signal (100% of groups have equal rewards)"),
        ({"reward/zero_variance_fraction": 1.0, "train/answer_tokens": 7.0}, True, ""),
        (
            {"reward/zero_variance_fraction": 0.75, "train/answer_tokens": 0.0},
            True,
            "  no signal (75% of groups have equal rewards)",
        ),
        (
            {"reward/zero_variance_fraction": 0.75, "rollout/truncated_fraction": 1.0, "train/answer_tokens": 0.0},
            False,
            "  no signal (75% of groups have equal rewards, 100% of answers hit the limit)",
        ),
        ({"train/answer_tokens": 0.0}, False, "  no signal"),
        ({}, False, ""),
    ],
)
def test_warnings_of_a_step(values, other_signal, expected):
    assert step_warnings(values, other_signal) == expected


@pytest.mark.parametrize(("placement", "says_so"), [("loss", True), ("reward", False)])
def test_equal_rewards_are_no_missing_signal_if_a_kl_is_subtracted_from_them(placement, says_so, caplog):
    console = Console(config_of("--grpo.kl_coef", "0.1", "--grpo.kl_placement", placement), 5)
    with caplog.at_level(logging.INFO):
        console.log(1, STEP | {"reward/zero_variance_fraction": 1.0, "train/answer_tokens": 7.0})
    assert ("no signal" in caplog.text) is says_so


def test_duration():
    assert [duration(seconds) for seconds in (0.4, 400, 86399, 86400 * 3 + 4 * 3600 + 59)] == [
        "0:00:00",
        "0:06:40",
        "23:59:59",
        "3d 04h",
    ]
