import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import ROOT
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.losses import mismatch_sums, policy_loss
from torchtitan.grpo.reporting.step_metrics import policy_metrics, rollout_metrics, validation_metrics
from torchtitan.grpo.reporting.writers import PROGRESS, MetricsLogger, SampleLog


def config_of(*arguments: str) -> JobConfig:
    model = str(ROOT / "train_configs" / "tiny_qwen3")
    return load_config(["--model.hf_assets_path", model, "--metrics.disable_color_printing", *arguments])


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def group_of(rewards: list[float], index: int = 0) -> Group:
    prompt = Prompt(index=index, token_ids=[1, 2], text="1+1=", answer="2")
    return [
        Sample(prompt, [5, 6], [-0.1, -0.2], [3, 4], "stop", text=f"answer {i}", rewards={"match": r}, reward=r)
        for i, r in enumerate(rewards)
    ]


@pytest.fixture
def run(tmp_path):
    """Builds loggers of one run folder, as a run and its resumes would, and closes them."""
    loggers = []

    def start(*arguments: str, rank0: bool = True, total_steps: int = 10) -> MetricsLogger:
        loggers.append(MetricsLogger(config_of(*arguments), tmp_path, rank0, total_steps))
        return loggers[-1]

    yield start
    for logger in loggers:
        logger.close()


def test_every_step_is_one_line_readable_at_once(run, tmp_path):
    metrics = run()
    metrics.log(1, {"reward/mean": 0.5, "policy/kl": torch.tensor(0.25), "rollout/tokens": 7})
    metrics.log(1, {"greedy_reward": 0.75}, prefix="validation")
    metrics.log(2, {"reward/mean": 1})
    assert records(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "reward/mean": 0.5,
            "policy/kl": 0.25,
            "rollout/tokens": 7,
            "validation/greedy_reward": 0.75,
        },
        {"step": 2, "reward/mean": 1},
    ]


def test_a_resumed_run_replaces_the_steps_that_it_repeats(run, tmp_path):
    before = run()
    before.log(1, {"loss": 3.0}, prefix="sft")
    for step in (1, 2, 3, 4):
        before.log(step, {"reward/mean": step / 10})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rewa')  # cut off by a crash

    resumed = run()
    resumed.log(3, {"reward/mean": 0.9})
    resumed.log(4, {"reward/mean": 1.0})
    assert records(tmp_path / "metrics.jsonl") == [
        {"sft/step": 1, "sft/loss": 3.0},
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 3, "reward/mean": 0.9},
        {"step": 4, "reward/mean": 1.0},
    ]


def test_what_is_no_finite_number_is_left_out_and_warned_of_once(run, tmp_path, caplog):
    metrics = run()
    bad = {
        "policy/kl": math.nan,
        "train/grad_norm": torch.tensor(math.inf),
        "a/vector": torch.zeros(2),
        "a/text": "high",
        "a/none": None,
    }
    with caplog.at_level(logging.WARNING):
        metrics.log(1, bad | {"reward/mean": torch.tensor([0.5])})
        metrics.log(2, bad)
    assert records(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}, {"step": 2}]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == len(bad)
    assert all(any(f"metric {name} " in message for message in warned) for name in bad)


def test_tensorboard_gets_every_log_freq_th_step_and_validation(run, tmp_path):
    arguments = ("--metrics.enable_tensorboard", "--metrics.log_freq", "2")
    first = run(*arguments)
    for step in (1, 2, 3, 4):
        first.log(step, {"reward/mean": step / 10})
    first.log(3, {"greedy_reward": 0.3}, prefix="validation")
    first.close()
    resumed = run(*arguments)
    resumed.log(4, {"reward/mean": 0.8})
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 4]
    # Step 4 of the run that crashed is not shown beside the repeated one.
    assert events.Scalars("reward/mean")[-1].value == pytest.approx(0.8)
    assert [event.step for event in events.Scalars("validation/greedy_reward")] == [3]


def test_progress_line(run, caplog):
    metrics = run(total_steps=5)
    step = {name: 0.5 for name, _, _ in PROGRESS if not name.startswith("validation/")}
    times = {"time/rollout_s": 80.0, "time/train_s": 19.0, "time/other_s": 1.0}
    metrics.log(0, {"greedy_reward": 0.25}, prefix="validation")
    with caplog.at_level(logging.INFO):
        metrics.log(1, step | times | {"time/step_s": 100.0})
    line = caplog.records[-1].getMessage()
    assert line.startswith("step 1/5  eta 0:06:40  reward 0.500  held-out 0.250  ")
    assert all(f"  {label} " in line for _, label, _ in PROGRESS)
    assert "100.00 s (rollout 80.00, train 19.00, other 1.00)" in line
    assert line.endswith("rollout-bound (rollout 81%, trainer 19%)")


def test_other_ranks_write_nothing(run, tmp_path):
    metrics = run("--metrics.enable_tensorboard", rank0=False)
    metrics.log(1, {"reward/mean": 0.5})
    samples = SampleLog(config_of(), tmp_path, rank0=False)
    samples.log(1, [group_of([1.0])], [[0.0]])
    samples.close()
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_is_missing_is_named_with_its_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"\[metrics\] enable_wandb.*torchtitan-grpo\[wandb\]"):
        run("--metrics.enable_wandb")


def test_wandb_run_is_written(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics = run("--metrics.enable_wandb", "--metrics.log_freq", "1")
    metrics.log(1, {"loss": 3.0}, prefix="sft")
    metrics.log(1, {"reward/mean": 0.5})
    metrics.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert all(name in content for name in (b"reward/mean", b"sft/loss", b"sft/step"))


def test_samples_are_spread_over_groups_and_resume(tmp_path):
    samples = SampleLog(config_of("--metrics.samples_per_step", "2"), tmp_path, rank0=True)
    groups = [group_of([0.0, 1.0, 0.5], index) for index in (10, 11)]
    advantages = [[-1.0, 1.0, 0.0], [-1.5, 1.5, 0.0]]
    for step in (1, 2):
        samples.log(step, groups, advantages)
    samples.close()
    written = records(tmp_path / "samples.jsonl")
    assert [(r["step"], r["prompt_index"], r["answer"]) for r in written] == [
        (1, 10, "answer 1"),
        (1, 11, "answer 1"),
        (2, 10, "answer 2"),
        (2, 11, "answer 2"),
    ]
    assert written[1] == {
        "step": 1,
        "prompt_index": 11,
        "prompt": "1+1=",
        "answer": "answer 1",
        "reference": "2",
        "reward": 1.0,
        "rewards": {"match": 1.0},
        "reward_failures": [],
        "advantage": 1.5,
        "finish_reason": "stop",
        "answer_tokens": 2,
        "versions": [3, 4],
    }
    resumed = SampleLog(config_of("--metrics.samples_per_step", "9"), tmp_path, rank0=True)
    resumed.log(2, groups[:1], advantages[:1])
    resumed.close()
    assert [r["step"] for r in records(tmp_path / "samples.jsonl")] == [1, 1, 2, 2, 2]


def test_text_that_is_no_valid_unicode_is_written(tmp_path):
    samples = SampleLog(config_of(), tmp_path, rank0=True)
    group = group_of([1.0])
    group[0].text = "half \ud83d of a pair, line\u2028separator"
    samples.log(1, [group], [[0.0]])
    samples.close()
    (record,) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert record["answer"] == group[0].text


def test_metrics_are_documented():
    documented = set(re.findall(r"`([a-z]+/[a-z_/<>0-9]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    groups = [group_of([0.0, 1.0])]
    names = {name for name, _, _ in PROGRESS}
    names |= set(rollout_metrics(groups, 0, 0)) | set(validation_metrics(groups, groups, 1.0))
    per_token = torch.zeros(2)
    optional = {"importance": per_token, "reference_logprobs": per_token, "entropy": per_token}
    sample_ids = torch.zeros(2, dtype=torch.int64)
    loss, sums = policy_loss(per_token, per_token, per_token, per_token, sample_ids, config_of().grpo, **optional)
    sums |= mismatch_sums(per_token, per_token, per_token) | {"server_tokens": [1], "server_mismatch_abs_sum": [0]}
    names |= set(policy_metrics({"loss": loss} | sums, ["http://<host>:<port>"]))
    names = {name.replace("reward/match", "reward/<function>").replace("pass_at_2", "pass_at_<k>") for name in names}
    assert names <= documented
