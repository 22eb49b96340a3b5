"""Whether a run may begin in a folder that another has used."""

import time
from pathlib import Path

import pytest

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.marker import Marker
from torchtitan.grpo.commands.replay import ReplayTrainer
from torchtitan.grpo.config.torchtitan_keys import Checkpoint
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.folder_lock import only_run_in
from torchtitan.grpo.run.run_folder import check_folder, has_steps, own_folder

STEP = '{"step": 1, "reward/mean": 0.5}\n'


def a_checkpoint(dump: Path, step: int) -> None:
    folder = dump / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    Marker(step, 1, 1.0, ["model"], {}, step, {}).write(folder)


def test_a_folder_with_a_run_is_for_resuming_it(tmp_path):
    dump = tmp_path / "run"
    a_checkpoint(dump, 2)
    a_checkpoint(dump, 1)
    (dump / "metrics.jsonl").write_text(STEP)
    (tmp_path / "run-2").mkdir()
    said = rf"{dump} already holds a run with checkpoints of steps \[1, 2\]: continue it by --checkpoint.resume .* "
    with pytest.raises(UserError, match=said + rf"--job.dump_folder {dump}-3"):
        check_folder(Checkpoint(), dump)
    with pytest.raises(UserError, match="already holds a run"):
        check_folder(Checkpoint(enable=False), dump)
    check_folder(Checkpoint(resume=True), dump)
    check_folder(Checkpoint(resume="auto"), dump)
    assert (dump / "metrics.jsonl").read_text() == STEP
    with pytest.raises(UserError, match=r"load_step = 5: .* \[1, 2\]|load_step = 5: .* \[2, 1\]"):
        check_folder(Checkpoint(resume=True, load_step=5), dump)


def test_a_new_run_in_the_folder_that_one_is_in_is_told_another(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(STEP)
    monkeypatch.chdir(tmp_path / "run")
    for dump in ("", ".", "../run"):
        with pytest.raises(UserError, match=rf"--job.dump_folder ({tmp_path}|\.\.)/run-2 "):
            check_folder(Checkpoint(), dump)


@pytest.mark.parametrize(
    ("name", "text"), [("metrics.jsonl", STEP), ("samples.jsonl", STEP), ("metrics.jsonl", "[]\n")]
)
def test_a_run_without_a_checkpoint_can_only_begin_again_by_auto(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="holds a run, without a checkpoint: begin a new one elsewhere"):
        check_folder(Checkpoint(), tmp_path)
    with pytest.raises(UserError, match=r'holds no checkpoint.*resume = "auto"'):
        check_folder(Checkpoint(resume=True), tmp_path)
    check_folder(Checkpoint(resume="auto"), tmp_path)
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    "left", ["", '{"sft/step": 20}\n{"step": 0, "validation/greedy_reward": 0}\n', '{"step": 1, "to']
)
def test_what_a_run_left_that_trained_no_step_does_not_count(tmp_path, left):
    (tmp_path / "metrics.jsonl").write_text(left)
    check_folder(Checkpoint(), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_only_a_run_that_resumes_waits_for_another(tmp_path):
    began = time.monotonic()
    with (
        only_run_in(tmp_path),
        pytest.raises(UserError, match=rf"another run uses {tmp_path} \(host .*\): stop it"),
        own_folder(Checkpoint(), tmp_path),
    ):
        pass
    assert time.monotonic() - began < 5


def test_two_runs_with_one_folder_of_checkpoints_are_refused(tmp_path):
    shared = Checkpoint(folder=str(tmp_path / "shared"))
    with (
        own_folder(shared, tmp_path / "one"),
        pytest.raises(UserError, match=rf"another run uses {tmp_path}/shared .*set another \[checkpoint\] folder"),
        own_folder(shared, tmp_path / "two"),
    ):
        pass
    with own_folder(shared, tmp_path / "one"), own_folder(shared, tmp_path / "two", saves=False):
        pass  # a replay reads it
    of_one = Checkpoint(folder=str(tmp_path / "one" / "checkpoint"))
    with (
        own_folder(Checkpoint(), tmp_path / "one"),
        pytest.raises(UserError, match=r"another run uses .*set another \[checkpoint\] folder"),
        own_folder(of_one, tmp_path / "two"),
    ):
        pass


@pytest.mark.parametrize("folder", ["", ".", "ABSOLUTE"])
def test_checkpoints_may_be_in_the_runs_own_folder(tmp_path, folder):
    with own_folder(Checkpoint(folder=folder.replace("ABSOLUTE", str(tmp_path))), tmp_path):
        pass


def test_what_a_killed_save_has_left_is_removed_but_by_a_replay(tmp_path):
    folder = tmp_path / "checkpoint"
    for name in ("step-4.tmp", "step-2.replaced.tmp"):
        (folder / name / "dcp").mkdir(parents=True)
    with own_folder(Checkpoint(resume="auto"), tmp_path, saves=False):
        assert len(list(folder.iterdir())) == 2
    with own_folder(Checkpoint(resume="auto"), tmp_path):
        assert [path.name for path in folder.glob("step-*")] == ["step-2.replaced.tmp"], "perhaps the only whole one"


def test_a_replay_keeps_the_records_of_another_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=f"--out {tmp_path} already holds a run"):
        ReplayTrainer(tmp_path, tmp_path, 1, JobConfig())
    assert (tmp_path / "metrics.jsonl").read_text()
    assert not has_steps(tmp_path / "metrics.jsonl"), "no folder: refused as one that cannot be written"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    # The second refuses even root. The third is a byte that is no UTF-8, as a shell may give it.
    for dump in (tmp_path / "file", Path("/proc/sys"), tmp_path / "\udcff"):
        with pytest.raises(UserError, match=r"cannot be written to .*\[job\] dump_folder or \[checkpoint\] folder"):
            check_folder(Checkpoint(), dump)
