"""A run that fails saves its last whole step, once, and then ends by what failed."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpoint_worker import TinyTrainer, slow_disk
from torchtitan.grpo.checkpoint.marker import complete_steps
from torchtitan.grpo.checkpoint.writing import Writer
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.disk_full import is_disk_full
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.run.broadcast import Broadcaster
from torchtitan.grpo.run.ending import Ending
from torchtitan.grpo.run.save_when_stopped import save_when_stopped
from torchtitan.grpo.run.watchdog import Progress


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run(TinyTrainer):
    is_rank0 = True

    def __init__(self, dump: Path, **checkpoint) -> None:
        super().__init__(dump, **checkpoint)
        self.broadcast = Broadcaster(Progress(Ledger(torch.device("cpu"))), 10)
        self.ending = Ending(self.broadcast)

    def stop(self) -> None:
        """Nothing is waited for."""
        self.is_stopped = True

    def write_checkpoint(self, last: bool) -> None:
        self.checkpointer.save(self.step, last)

    def train_until(self, step: int, error: Exception) -> None:
        """Train steps up to this one; the answers of the next one end in the error."""
        with save_when_stopped(self):
            while self.step < step:
                self.train_step()
                self.ending.trained = self.step
                if self.step == step and self.checkpointer.cfg.interval == 1:
                    self.checkpointer.save(step)
            self.step += 1
            raise error


@pytest.mark.parametrize(
    ("error", "checkpoint"),
    [
        (UserError("the judge is gone"), {"interval": 1}),
        (EngineError("no server is left"), {"interval": 1, "async_mode": "async"}),
        (OSError("the data is gone"), {"interval": 20}),
    ],
)
def test_the_last_whole_step_is_saved_once_whether_its_save_is_done_under_way_or_not_due(tmp_path, error, checkpoint):
    run, complete, written = Run(tmp_path, **checkpoint), Writer._complete, []
    patched = patch.object(Writer, "_complete", lambda *a: (written.append(a[3].step), complete(*a)))
    with slow_disk() as may_write, patched, pytest.raises(type(error)) as raised:
        threading.Timer(0.1, may_write.set).start()
        run.train_until(2, error)
    assert raised.value is error and not is_disk_full(error)
    assert run.is_stopped, "or the state would be asked of a rollout process that still takes the next step"
    assert written == complete_steps(run.checkpointer.folder) == [2] and run.step == 2


def test_an_error_after_the_signal_costs_a_run_of_one_rank_no_step(tmp_path, monkeypatch):
    asks = []
    monkeypatch.setattr(
        "torchtitan.grpo.run.save_when_stopped.asks_first", lambda ask: contextlib.nullcontext(asks.append(ask))
    )
    run = Run(tmp_path, interval=100)

    def asked(step: int) -> None:
        TinyTrainer.train_step(run)
        if step == 2:
            assert asks[0](signal.SIGTERM)

    monkeypatch.setattr(run, "train_step", lambda: asked(run.step + 1))
    with pytest.raises(RuntimeError, match="of the loss"):
        run.train_until(3, RuntimeError("of the loss"))
    assert complete_steps(tmp_path / "checkpoint") == [3]


def test_a_save_under_way_that_fails_is_made_again(tmp_path):
    run, clear = Run(tmp_path, interval=1, async_mode="async"), Writer._clear

    def fail_once(self: Writer, unfinished: Path) -> None:
        Writer._clear = clear
        clear(self, unfinished)
        raise OSError(28, os.strerror(28))

    with patch.object(Writer, "_clear", fail_once), pytest.raises(UserError, match="the judge"):
        run.train_until(1, UserError("the judge is gone"))
    assert complete_steps(run.checkpointer.folder) == [1]


def test_a_refused_resume_is_not_told_to_resume_by_the_same_command(tmp_path, caplog):
    Run(tmp_path).checkpointer.save(2)
    run = Run(tmp_path, resume=True)
    for step, error, said in (
        (0, UserError("other prompts"), 0),
        (0, EngineError("no server"), 1),
        (3, UserError(""), 1),
    ):
        caplog.clear()
        with pytest.raises(type(error)):
            run.train_until(step, error)
        assert caplog.text.count("by the same command") == said, caplog.text


def test_without_checkpoints_and_without_a_step_nothing_is_saved(tmp_path):
    for enable, step in ((False, 2), (True, 0)):
        run = Run(tmp_path, enable=enable, interval=20)
        with pytest.raises(UserError):
            run.train_until(step, UserError("the judge is gone"))
        assert not complete_steps(run.checkpointer.folder)
