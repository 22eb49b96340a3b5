"""Disks that are full, folders that cannot be written, and files that are not what was written.

A torn checkpoint is named and never loaded. A save that fails leaves the checkpoints before it whole.
"""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.checkpoint_worker import WORKER, TinyTrainer, saved_at, slow_disk
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import attempt, embedded_url, steps, train
from torchtitan.grpo.checkpoint.marker import complete_steps, damages, read_marker
from torchtitan.grpo.checkpoint.together import StageFailed
from torchtitan.grpo.checkpoint.writing import Writer
from torchtitan.grpo.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- torn checkpoints

FILES = ["complete.json", "dcp/.metadata", "dcp/__0_0.distcp", "drawn.msgpack", "rng-rank-0.pt", "trainer.json"]
UNREAD = [
    "hf/README.md",
    "hf/config.json",
    "hf/model.safetensors",
    "hf/tokenizer.json",
    "hf/tokenizer_config.json",
    "run_config.json",
    "validation.json",
]
"""What a run that resumes does not need."""


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    """A run with whole checkpoints of steps 1 and 2."""
    dump = tmp_path_factory.mktemp("run")
    trainer = saved_at(dump, 1, export_dtype="float32")
    trainer.train_step()
    trainer.checkpointer.validated(2, {"validation/greedy_reward": 1.0})
    trainer.checkpointer.save(2)
    return dump


@pytest.fixture(scope="module")
def resumed(dump) -> TinyTrainer:
    return TinyTrainer(dump, resume=True)


def errors(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)


def flip(content: bytes) -> bytes:
    """One bit is another."""
    position = random.Random(len(content)).randrange(8 * len(content))
    damaged = bytearray(content)
    damaged[position // 8] ^= 1 << position % 8
    return bytes(damaged)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {"flipped": flip, "cut": lambda content: content[:-1]}


@pytest.mark.parametrize("name", FILES)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(dump, resumed, name, caplog):
    path = dump / "checkpoint" / "step-2"
    whole = (path / name).read_bytes()
    try:
        for damage in (*DAMAGE.values(), None):
            (path / name).unlink()
            if damage:
                (path / name).write_bytes(damage(whole))
            caplog.clear()
            assert resumed.checkpointer.load_latest() == resumed.step == 1
            if damage or name != "complete.json":  # without it, the folder is no checkpoint
                assert f"{path} is torn: " in errors(caplog) and name in errors(caplog)
    finally:
        (path / name).write_bytes(whole)
    caplog.clear()
    assert resumed.checkpointer.load_latest() == resumed.step == 2 and not errors(caplog)


@pytest.mark.parametrize("name", [*UNREAD, "hf"])
def test_a_damaged_export_or_note_is_a_warning(dump, resumed, name, caplog):
    """Also if the whole folder `hf` was moved elsewhere."""
    path, away = dump / "checkpoint" / "step-2", dump / "away"
    for damage in (flip, None):
        (path / name).rename(away)
        if damage and away.is_file():
            (path / name).write_bytes(damage(away.read_bytes()))
        caplog.clear()
        try:
            assert resumed.checkpointer.load_latest() == resumed.step == 2
        finally:
            (path / name).unlink(missing_ok=True)
            away.rename(path / name)
        assert not errors(caplog) and f"In {path}, {name}" in caplog.text and "does not need it" in caplog.text


def test_every_flipped_bit_is_found(dump):
    path = dump / "checkpoint" / "step-2"
    marker = read_marker(path)
    written = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert {*FILES, *UNREAD} == written == {*marker.files, "complete.json"}
    for name in marker.files:
        whole = (path / name).read_bytes()
        for seed in range(20):
            damaged = bytearray(whole)
            damaged[random.Random(seed).randrange(len(whole))] ^= 1 << seed % 8
            (path / name).write_bytes(damaged)
            assert damages(path, marker) == {name: "has another checksum than when it was written"}
        (path / name).write_bytes(whole)
    assert not damages(path, marker)


def test_a_broken_marker_of_an_older_checkpoint_is_a_warning(dump, resumed, caplog):
    marker = dump / "checkpoint" / "step-1" / "complete.json"
    whole = marker.read_bytes()
    marker.write_bytes(flip(whole))
    assert resumed.checkpointer.load_latest() == 2
    assert f"{marker.parent} is torn: its complete.json " in caplog.text and not errors(caplog)
    marker.write_bytes(whole)


def test_the_checkpoint_of_load_step_is_not_replaced_by_another(dump):
    path = dump / "checkpoint" / "step-2"
    chosen = TinyTrainer(dump, resume=True, load_step=2)
    for name in ("trainer.json", "complete.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(flip(whole))
        with pytest.raises(UserError, match=rf"step-2 is torn: .*{name} .*choose another by .checkpoint. load_step"):
            chosen.checkpointer.load_latest()
        (path / name).write_bytes(whole)
    assert chosen.checkpointer.load_latest() == 2


def test_without_a_whole_checkpoint_the_run_ends_and_names_each(tmp_path):
    saved_at(tmp_path, 1, 2)
    for step, name in ((1, "rng-rank-0.pt"), (2, "complete.json")):
        file = tmp_path / "checkpoint" / f"step-{step}" / name
        file.write_bytes(flip(file.read_bytes()))
    with pytest.raises(UserError, match=r"step-2 is torn: its complete.json .*step-1 is torn: rng-rank-0.pt .*\[job\]"):
        TinyTrainer(tmp_path, resume=True).checkpointer.load_latest()


def test_a_torn_checkpoint_does_not_count_among_those_kept(tmp_path):
    saved_at(tmp_path, 1, 2)
    torn = tmp_path / "checkpoint" / "step-2" / "trainer.json"
    torn.write_bytes(flip(torn.read_bytes()))
    resumed = TinyTrainer(tmp_path, resume=True)
    assert resumed.checkpointer.load_latest() == 1
    resumed.step = 3
    resumed.checkpointer.save(3)
    assert complete_steps(tmp_path / "checkpoint") == [1, 2, 3]
    resumed.step = 2
    resumed.checkpointer.save(2)  # whole again, and the newest
    assert complete_steps(tmp_path / "checkpoint") == [3, 2]


# ------------------------------------------------------------------------------------------- saves that fail


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> TinyTrainer:
    return saved_at(tmp_path_factory.mktemp("failing"), 1, export_dtype="float32")


def fails_then_succeeds(
    trainer: TinyTrainer, expected: str, mend: Callable[[], None], caplog, cause: str = os.strerror(errno.ENOSPC)
) -> None:
    """The next save fails as expected, and training goes on; once it is mended, the one after succeeds."""
    folder, before = trainer.checkpointer.folder, trainer.step
    failed = trainer.checkpointer.metrics()["checkpoint/failed"]
    weights = trainer.digest()
    caplog.clear()
    trainer.step += 1
    trainer.checkpointer.save(trainer.step)
    assert trainer.checkpointer.metrics()["checkpoint/failed"] == failed + 1
    said = errors(caplog)
    assert expected in said and cause in said and "Training goes on" in said, said
    newest = f"The newest checkpoint is {folder}/step-{before}" if complete_steps(folder) else "there is no checkpoint"
    assert newest in said
    with pytest.raises(StageFailed, match="checkpoint: "):
        trainer.checkpointer.save(trainer.step, last=True)
    mend()
    assert not list(folder.glob("*.tmp")), "what was written is gone, for the disk may be full"
    assert complete_steps(folder)[-1] == before
    assert damages(folder / f"step-{before}", read_marker(folder / f"step-{before}")) == {}
    assert trainer.digest() == weights
    trainer.checkpointer.save(trainer.step)
    assert complete_steps(folder)[-1] == trainer.step


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("dcp/__0_0.distcp", "writing {}/dcp"),
        ("dcp/.metadata.tmp", "writing {}/dcp"),
        ("hf/config.json", "writing {}/hf"),
        ("rng-rank-0.pt", "writing {}/rng-rank-0.pt"),
        ("trainer.json", "writing {}/trainer.json"),
        ("drawn.msgpack", "writing {}/trainer.json and the files beside it"),
        ("complete.json", "completing "),
    ],
)
def test_a_full_disk_in_any_stage_of_a_save(trainer, name, stage, monkeypatch, caplog):
    """What is written to /dev/full is refused by the kernel, as by a full disk."""
    clear = Writer._clear

    def clear_and_aim(self: Writer, unfinished: Path) -> None:
        clear(self, unfinished)
        (unfinished / name).parent.mkdir(exist_ok=True)
        (unfinished / name).symlink_to("/dev/full")

    monkeypatch.setattr(Writer, "_clear", clear_and_aim)
    unfinished = trainer.checkpointer.folder / f"step-{trainer.step + 1}.tmp"
    fails_then_succeeds(trainer, f"checkpoint: {stage.format(unfinished)}", monkeypatch.undo, caplog)


def test_a_signal_inside_a_save_still_ends_the_run(trainer, monkeypatch):
    """DCP catches the SystemExit that a signal raises there."""
    unfinished = trainer.checkpointer.folder / f"step-{trainer.step + 1}.tmp"
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit):
            trainer.checkpointer.save(trainer.step + 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in (unfinished / "dcp").iterdir()] == ["__0_0.distcp"], "inside DCP"
    shutil.rmtree(unfinished)


def test_a_folder_that_cannot_be_written(trainer, caplog):
    folder = trainer.checkpointer.folder
    folder.rename(folder.with_name("away"))
    folder.symlink_to("/proc/sys")  # it refuses even root

    def mend() -> None:
        folder.unlink()
        folder.with_name("away").rename(folder)

    fails_then_succeeds(trainer, f"checkpoint: clearing {folder}", mend, caplog, "Error")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(("part", "file"), [("dcp", "dcp/__0_0.distcp"), ("hf", "hf/model.safetensors")])
def test_a_disk_that_fills_up_and_has_room_again(small_disk, part, file, caplog):
    """It is full in the middle of a large file."""
    trainer = saved_at(small_disk / "run", 1, export_dtype="float32")
    disk, ballast = os.statvfs(small_disk), small_disk / "ballast"
    sizes = read_marker(trainer.checkpointer.folder / "step-1").files
    pages = {name: -(-size // disk.f_frsize) for name, size in sizes.items()}
    before = sum(count for name, count in pages.items() if name.startswith("dcp/")) if part == "hf" else 0
    ballast.write_bytes(bytes((disk.f_bavail - before - pages[file] // 2) * disk.f_frsize))
    unfinished = trainer.checkpointer.folder / "step-2.tmp"
    fails_then_succeeds(trainer, f"checkpoint: writing {unfinished / part}", ballast.unlink, caplog)


def test_a_full_disk_in_the_background_is_said_at_the_next_step(tmp_path, monkeypatch, caplog):
    trainer = saved_at(tmp_path, 1, async_mode="async", export_dtype="float32")
    checkpointer = trainer.checkpointer
    checkpointer.finish()
    clear = Writer._clear

    def clear_and_aim(self: Writer, unfinished: Path) -> None:
        clear(self, unfinished)
        (unfinished / "dcp").mkdir()
        (unfinished / "dcp" / "__0_0.distcp").symlink_to("/dev/full")

    monkeypatch.setattr(Writer, "_clear", clear_and_aim)
    trainer.train_step()
    checkpointer.save(2)
    trainer.train_step()
    deadline = time.monotonic() + 30
    while not checkpointer.metrics()["checkpoint/failed"] and time.monotonic() < deadline:
        time.sleep(0.01)
    said = errors(caplog)
    assert os.strerror(errno.ENOSPC) in said and "step-2.tmp/dcp" in said and "Training goes on" in said
    assert [path.name for path in checkpointer.folder.iterdir()] == ["step-1"]
    checkpointer.save(3)
    with pytest.raises(StageFailed, match="No space left"):  # after that of step 3, which is said too
        checkpointer.save(4, last=True)
    assert checkpointer.metrics()["checkpoint/failed"] == 2
    monkeypatch.undo()
    checkpointer.save(4)
    checkpointer.finish()
    assert complete_steps(checkpointer.folder) == [1, 4]


def test_a_write_that_does_not_end_is_waited_for_in_bounded_time(tmp_path):
    trainer = TinyTrainer(tmp_path, async_mode="async")
    with slow_disk() as may_write:
        trainer.checkpointer.save(1)
        trainer.checkpointer.timeout_s = 0.05
        with pytest.raises(RuntimeError, match=r"waited 0.05 s .* for its thread that writes .*step-1"):
            trainer.checkpointer.save(2)
        may_write.set()


@pytest.mark.parametrize(("error", "saved"), [(UserError, [1]), (SystemExit, [])])
def test_an_error_elsewhere_leaves_time_for_the_checkpoint_being_written_and_a_signal_does_not(tmp_path, error, saved):
    trainer = TinyTrainer(tmp_path, async_mode="async")
    with slow_disk() as may_write:
        trainer.checkpointer.save(1)
        written = threading.Timer(0.1 if saved else 5.0, may_write.set)
        written.start()
        trainer.checkpointer.close(error, error(), None)
        assert complete_steps(trainer.checkpointer.folder) == saved
        written.cancel()
        may_write.set()


def test_a_run_goes_on_after_a_failed_save_and_the_last_one_must_succeed(tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    folder.mkdir(parents=True)
    obstacles = [folder / "step-2.tmp", folder / "step-4.tmp"]
    for obstacle in obstacles:
        obstacle.write_text("a file, where a save makes a folder")
    flags: dict[str, str | None] = {"--training.steps": "4", "--checkpoint.interval": "1", "--sft.steps": "0"}
    flags |= {"--rollout.urls": embedded_url(), "--validation.no-enable": None, "--checkpoint.export_dtype": "none"}
    status, said = attempt(tmp_path / "run", flags)
    assert status != 0
    assert f"checkpoint: clearing {obstacles[0]} failed on rank 0: FileExistsError" in said
    assert said.count("Training goes on, and the next save is due in 1 steps") == 1
    assert f"StageFailed: checkpoint: clearing {obstacles[1]} failed" in said
    assert [line["checkpoint/failed"] for line in steps(tmp_path / "run")] == [0, 0, 1, 1]
    assert complete_steps(folder) == [1, 3]
    for obstacle in obstacles:
        obstacle.unlink()
    train(tmp_path / "run", flags | {"--checkpoint.resume": None})
    assert complete_steps(folder) == [3, 4]


# ------------------------------------------------------------------------------------------ a rank that fails


def test_no_rank_waits_for_one_that_failed(tmp_path):
    ranks = Ranks(2, WORKER, "fail-in-save", tmp_path / "dump", tmp_path / "learned", log=tmp_path / "log")
    ranks.check(60)
    learned = [json.loads((tmp_path / f"learned-{rank}").read_text()) for rank in (0, 1)]
    for first, failed, again, late, inside in learned:
        assert first[0] == again[0] == "", "a failure of one rank's own leaves no rank in a collective"
        assert "collecting weights and optimizer state failed on rank 1: OSError: broken on purpose" in failed[0]
        assert "after sleeping, rank" in late[0] and late[1] < 5
        assert "gathering for " in inside[0] and " failed on rank" in inside[0] and "the run cannot go on" in inside[0]
        assert failed[1] < 5 and inside[1] < 5
    assert "broken on purpose" in learned[1][-1][0]
    assert "Ranks 1 failed to pass monitoredBarrier" in learned[0][3][0], "rank 0 names the one that is late"
    assert complete_steps(tmp_path / "dump" / "checkpoint") == [1, 3]


def test_what_fails_in_the_threads_of_ranks_is_learned_by_all(tmp_path):
    ranks = Ranks(2, WORKER, "fail-in-thread", tmp_path / "dump", tmp_path / "learned", log=tmp_path / "log")
    ranks.check(60)
    for rank in (0, 1):
        *saves, error = json.loads((tmp_path / f"learned-{rank}").read_text())
        assert saves == [[1, 0], [2, 1]]
        assert "writing" in error and "rank" in error, error
    assert "the run cannot go on: OSError: broken on purpose" in error
    assert complete_steps(tmp_path / "dump" / "checkpoint") == [1]
