"""A run does not begin where not even its first checkpoint fits, by what the disk of this test says."""

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import TINY_QWEN3
from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.disk import check_disk, disk_lines, free_bytes
from torchtitan.grpo.checkpoint.marker import Marker
from torchtitan.grpo.commands import replay
from torchtitan.grpo.config.jobs import of_replay
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import ModelSource, resolve_model

SHAPE = json.loads((TINY_QWEN3 / "config.json").read_text())


def a_run(folder: Path, checkpoint_bytes: int, *flags: str, steps: int = 100) -> tuple[JobConfig, ModelSource]:
    """Its checkpoints take so many bytes: its embedding takes most of them. No memory is needed for that."""
    each = SHAPE["hidden_size"] * 16 * (1 if SHAPE["tie_word_embeddings"] else 2)  # with AdamW's moments and the export
    (folder / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": checkpoint_bytes // each}))
    lengths = ["--training.seq_len", "64", "--data.max_prompt_tokens", "16", "--rollout.max_answer_tokens", "16"]
    names = ["--model.hf_assets_path", str(folder), "--job.dump_folder", str(folder / "run")]
    config = load_config([*names, *lengths, "--training.steps", str(steps), *flags], dry_run="cpu")
    (folder / "run" / "checkpoint").mkdir(parents=True, exist_ok=True)
    return config, resolve_model(config.model, 64, config.lora)


def saved(run: Path, step: int) -> None:
    """A complete checkpoint."""
    folder = run / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    Marker(step, 1, float(step), [], {}, step, {}).write(folder)


def test_a_disk_without_room_for_one_checkpoint_is_refused_with_both_sizes(tmp_path):
    random, free = torch.get_rng_state(), free_bytes(tmp_path)
    with pytest.raises(
        UserError, match=r"\[job\] dump_folder: a checkpoint takes .* MiB \((\d+) bytes\), and"
    ) as refused:
        check_disk(*a_run(tmp_path, 2 * free))
    message = str(refused.value)
    needed, said_free = (int(part.split(" bytes")[0]) for part in message.split("(")[1:])
    assert needed == pytest.approx(2 * free, rel=0.01) and said_free == pytest.approx(free, rel=0.1)
    assert str(tmp_path / "run" / "checkpoint") in message and "another disk" in message and "export_dtype" in message
    assert torch.equal(torch.get_rng_state(), random), "the ranks that do not check must draw the same weights"
    check_disk(*a_run(tmp_path, 2 * free, "--checkpoint.no-enable"))


@pytest.mark.parametrize(("share", "flags", "warned"), [
    (0.5, [], "room for 1 checkpoint of"),
    (0.2, [], ""),
    (0.5, ["--checkpoint.interval", "100"], ""),
    (0.2, ["--checkpoint.keep_latest_k", "0"], "will have 5 more at once"),
    (0.27, ["--validation.enable", "--checkpoint.keep_best", "validation/greedy_reward"], "will have 4 more at once"),
])  # fmt: skip
def test_a_disk_that_the_run_would_fill_later_is_a_warning(tmp_path, caplog, share, flags, warned):
    check_disk(*a_run(tmp_path, int(share * free_bytes(tmp_path)), *flags))
    assert warned in caplog.text and bool(warned) == ("keep_latest_k" in caplog.text)


def test_checkpoints_that_are_there_take_no_more_room_and_a_run_at_its_end_saves_none(tmp_path, caplog):
    free = free_bytes(tmp_path)
    for step in (20, 40):
        saved(tmp_path / "run", step)
    check_disk(*a_run(tmp_path, int(0.5 * free), "--checkpoint.resume"))
    assert "more at once" not in caplog.text
    check_disk(*a_run(tmp_path, 2 * free, "--checkpoint.resume", steps=40))


@pytest.mark.parametrize("disk", [{"f_blocks": 0, "f_bavail": 0, "f_bfree": 0}, {"f_bavail": 0, "f_bfree": 0}, None])
def test_a_disk_that_does_not_say_what_is_free_is_not_refused(tmp_path, monkeypatch, disk):
    run, real = a_run(tmp_path, 1 << 60), os.statvfs

    def says(path: Path) -> SimpleNamespace:
        if disk is None:
            raise OSError(95, "Operation not supported")
        return SimpleNamespace(
            **{name: getattr(real(path), name) for name in dir(real(path)) if name[:2] == "f_"} | disk
        )

    monkeypatch.setattr(os, "statvfs", says)
    check_disk(*run)


def test_the_dry_run_counts_the_best_checkpoint_too(tmp_path):
    config, _ = a_run(tmp_path, 1 << 20, "--validation.enable", "--checkpoint.keep_best", "validation/greedy_reward")
    assert "at most 4 at once" in disk_lines(config, 10, 10)[-2]


def test_the_dry_run_compares_with_what_is_free_and_makes_no_folder(tmp_path, monkeypatch):
    config, _ = a_run(tmp_path, 1 << 20)
    config.job.dump_folder = str(tmp_path / "not" / "there")
    each = 16 * 10  # weights, AdamW's moments and export, of ten parameters
    for free, says in ((3 * each, "all fit"), (2 * each, "2 fit"), (each - 1, "does NOT fit"), (None, "at once")):
        monkeypatch.setattr("torchtitan.grpo.checkpoint.disk.free_bytes", lambda folder, free=free: free)
        assert says in disk_lines(config, 10, 10)[-1]
    asked = []
    monkeypatch.setattr("torchtitan.grpo.checkpoint.disk.free_bytes", asked.append)
    disk_lines(config, 10, 10)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    config.checkpoint.folder = str(elsewhere)
    assert disk_lines(config, 10, 10)[0].endswith(f", in {elsewhere}")
    assert asked == [tmp_path, elsewhere] and not (tmp_path / "not").exists()


def test_a_replay_from_a_checkpoint_needs_no_room_for_one(tmp_path, monkeypatch):
    lengths = ["--training.seq_len", "64", "--data.max_prompt_tokens", "16", "--rollout.max_answer_tokens", "16"]
    names = ["--model.hf_assets_path", str(TINY_QWEN3), "--model.weights", "random", "--job.dump_folder", str(tmp_path)]
    config = load_config([*names, *lengths, "--training.steps", "4"], dry_run="cpu")
    saved(tmp_path, 2)
    monkeypatch.setattr("torchtitan.grpo.checkpoint.disk.free_bytes", lambda folder: 0)

    def rollouts(*_: object) -> None:
        raise LookupError("the model is read")

    monkeypatch.setattr(replay, "RolloutWorker", rollouts)
    trainer = object.__new__(replay.ReplayTrainer)
    trainer.config, trainer.is_rank0 = of_replay(config, tmp_path, None, after=2), True
    trainer.device = torch.device("cpu")
    with contextlib.ExitStack() as trainer.resources, pytest.raises(LookupError, match="the model is read"):
        trainer.set_up()
