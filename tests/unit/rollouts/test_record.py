"""A recorded step is read back as it was; the files on disk tell one history and keep to their bound."""

import errno
import json
import math
from pathlib import Path

import numpy as np
import pytest

from torchtitan.grpo.config.job_config import JobConfig, Rollout
from torchtitan.grpo.data.samples import Group, Prompt, Sample, TopTokens
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts import record
from torchtitan.grpo.rollouts.record import RolloutRecord, read_step, recorded_steps
from torchtitan.grpo.rollouts.replay import Replay

LOGPROB = float(np.float32(-0.1))
"""What the trainer makes of -0.1."""


def groups_of(step: int = 1, tokens: int = 3) -> list[Group]:
    """Two groups: one of an environment with masked tokens and two prompts, one plain with an empty answer."""
    first, second, third = (Prompt(i, [5, 6 + i], f"q{i} é", "4", {"level": i, "tags": ["a"]}) for i in range(3))
    masked = Sample(first, [7, 8, 9], [LOGPROB, 0.0, -2.5], [step - 1, step - 1, step], "stop", [True, False, True])
    masked.text, masked.rewards, masked.reward, masked.reward_failures = "a\ud800b", {"f": 0.1}, 1 / 3, {"g": "why"}
    masked.servers = [(0, "http://a:1"), (2, "http://b:1")]
    masked.teacher_logprobs = [LOGPROB, 0.0, -4.0]
    plain = Sample(second, [1] * tokens, [LOGPROB] * tokens, [step - 1] * tokens, "length")
    return [[masked, plain], [Sample(third, [], [], [], "abort"), Sample(third, [2], [-1.0], [0], "stop", reward=1.0)]]


def recorder(folder: Path, gib: float = 1.0) -> RolloutRecord:
    return RolloutRecord(Rollout(record_gib=gib, temperature=0.7), folder)


def config_of(**rollout) -> JobConfig:
    config = JobConfig()
    config.rollout.temperature = 0.7
    config.async_grpo.enabled = True
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


def replay_of(folder: Path, after: int = 0, config: JobConfig | None = None, vocab_size: int = 10) -> Replay:
    replay = Replay(folder, after)
    replay.fit(config or config_of(), vocab_size)
    return replay


def test_a_step_is_read_back_as_it_was(tmp_path):
    recorder(tmp_path).write(12, groups_of())
    [(step, path)] = recorded_steps(tmp_path).items()
    about, groups = read_step(path)
    assert (step, path.name, about["step"], about["temperature"]) == (12, "step-000012.npz", 12, 0.7)
    assert groups == groups_of()
    assert groups[1][0].prompt is groups[1][1].prompt
    with np.load(path, allow_pickle=False) as arrays:  # as someone without this project reads it
        assert arrays["token_ids"].tolist() == [7, 8, 9, 1, 1, 1, 2]
        assert arrays["logprobs"].dtype == np.float32
        assert json.loads(arrays["about"].tobytes())["groups"][0][0]["reward"] == 1 / 3


def test_a_teachers_tokens_are_read_back_and_a_replay_must_want_as_many(tmp_path):
    top = TopTokens(np.array([[1, 9], [2, -1]], np.int32), np.array([[-0.5, -2], [-0.25, -np.inf]], np.float32))
    taught, failed, empty = (Sample(Prompt(0, [1], ""), [2, 3][:n], [-1.0] * n, [0] * n, "stop") for n in (2, 1, 0))
    for sample in (taught, empty):
        sample.reward, sample.teacher_logprobs = 0.0, [-0.5, -0.25][: len(sample.token_ids)]
    taught.top = top
    recorder(tmp_path).write(1, [[failed, taught, empty]])
    [path] = recorded_steps(tmp_path).values()
    [[first, second, third]] = read_step(path)[1]
    assert first.top is None and third.top.ids.shape == (0, 2)
    for name in ("ids", "logprobs"):
        kept, own = getattr(second.top, name), getattr(top, name)
        assert kept.dtype == own.dtype and np.array_equal(kept, own)
    for top_k, vocab_size, message in (
        (3, 10, r"\[distill\] top_k = 3: .* has the 2 likeliest tokens"),
        (2, 9, r"\[model\] hf_assets_path: .* has token 9"),
    ):
        config = config_of()
        config.distill.top_k = top_k
        with pytest.raises(UserError, match=message):
            replay_of(tmp_path, config=config, vocab_size=vocab_size)
    config.distill.top_k, config.grpo.score_centering = 0, 3
    with pytest.raises(UserError, match=r"\[grpo\] score_centering = 3: .* has the 2 likeliest tokens"):
        replay_of(tmp_path, config=config)
    config.distill.top_k, config.grpo.score_centering = 2, 0
    assert replay_of(tmp_path, config=config).last_step == 1
    assert replay_of(tmp_path, vocab_size=9).last_step == 1, "a run without them does not read them"


def test_nothing_is_written_unless_it_is_asked_for(tmp_path):
    recorder(tmp_path, gib=0.0).write(1, groups_of())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"rollouts holds no recorded step: .*\[rollout\] record_gib"):
        recorded_steps(tmp_path)


def test_a_resumed_run_drops_the_steps_that_it_trains_again(tmp_path):
    before = recorder(tmp_path)
    for step in (1, 2, 3, 4):
        before.write(step, groups_of(step))
    folder = tmp_path / record.FOLDER
    (folder / "step-000003.tmp").touch()  # of a process that was killed
    (folder / "step-notes.npz").touch()  # somebody's own
    resumed = recorder(tmp_path)
    resumed.write(3, groups_of(tokens=9))
    assert list(recorded_steps(tmp_path)) == [1, 2, 3]
    assert read_step(folder / "step-000003.npz")[1] == groups_of(tokens=9)
    resumed.write(4, groups_of(4))
    assert list(recorded_steps(tmp_path)) == [1, 2, 3, 4] and not list(folder.glob("*.tmp"))


def test_the_oldest_steps_make_room(tmp_path):
    recorder(tmp_path / "one").write(1, groups_of())
    [path] = recorded_steps(tmp_path / "one").values()
    bounded = recorder(tmp_path, gib=2.5 * path.stat().st_size / 2**30)
    for step in range(1, 5):
        bounded.write(step, groups_of())
    assert list(recorded_steps(tmp_path)) == [3, 4]
    recorder(tmp_path, gib=1e-9).write(5, groups_of())  # smaller than one step: the newest stays
    assert list(recorded_steps(tmp_path)) == [5]


def test_a_full_disk_costs_a_step_of_the_record_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(path: Path, arrays: dict) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = recorder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(record, "_save", full)
        writer.write(1, groups_of())
    assert "step 1 is not recorded" in caplog.text and "No space left" in caplog.text
    assert list((tmp_path / record.FOLDER).iterdir()) == []
    writer.write(2, groups_of())
    assert list(recorded_steps(tmp_path)) == [2]


def test_torn_files_are_passed_over_and_damaged_ones_named(tmp_path, caplog):
    writer = recorder(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, groups_of(step))
    torn, damaged = (tmp_path / record.FOLDER / f"step-{step:06d}.npz" for step in (3, 2))
    torn.write_bytes(torn.read_bytes()[:-30])
    assert list(recorded_steps(tmp_path)) == [1, 2] and f"{torn} is torn" in caplog.text
    whole, found = damaged.read_bytes(), 0
    for place in range(0, len(whole), 9):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert read_step(damaged)[1] == groups_of(2), "the byte is not of the data"
        except UserError as error:
            assert f"{damaged} is damaged" in str(error)
            found += 1
    assert found > 100


def test_a_replay_gives_each_step_its_groups_with_the_ages_that_they_had(tmp_path):
    writer = recorder(tmp_path)
    for step in (4, 5, 7):
        writer.write(step, [[Sample(Prompt(0, [1], ""), [2, 3], [-1.0, -1.0], [step - 2, step - 1], "stop")]])
    replay = replay_of(tmp_path)
    assert replay.last_step == 3
    for version in (0, 1, 2):
        [[sample]] = replay.take(version)
        assert [version - sampled_by for sampled_by in sample.versions] == [1, 0]

    resumed = replay_of(tmp_path, after=4)
    assert resumed.last_step == 6
    assert [resumed.take(version)[0][0].versions for version in (4, 5)] == [[3, 4], [4, 5]]
    with pytest.raises(UserError, match="no recorded step after 7: the last one is 7"):
        Replay(tmp_path, after=7)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("rollout", "temperature", 1.0, r"\[rollout\] temperature = 1, and .* was sampled at 0.7"),
        ("training", "seq_len", 4, r"\[training\] seq_len = 4 is under the 5 tokens"),
        ("async_grpo", "enabled", False, r"max_trajectory_age_steps: .* a token of age 1, and 0 is allowed"),
        (None, "vocab_size", 9, r"\[model\] hf_assets_path: .* has token 9, and this model has 9 tokens"),
    ],
)
def test_a_record_that_does_not_fit_the_run_is_refused(tmp_path, section, key, value, message):
    recorder(tmp_path).write(1, [[Sample(Prompt(0, [1, 2], ""), [9, 3, 4], [-1.0] * 3, [-1, 0, 0], "stop")]])
    config = config_of()
    if section:
        setattr(getattr(config, section), key, value)
    with pytest.raises(UserError, match=message):
        replay_of(tmp_path, config=config, vocab_size=10 if section else value)


def test_numbers_that_are_no_numbers_survive(tmp_path):
    recorder(tmp_path).write(1, [[Sample(Prompt(0, [1], ""), [2], [-1.0], [0], "stop", reward=math.nan)]])
    [path] = recorded_steps(tmp_path).values()
    assert math.isnan(read_step(path)[1][0][0].reward)
