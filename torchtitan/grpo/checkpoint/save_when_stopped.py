"""A run that is asked to stop saves its last step, and says how to go on."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

from torchtitan.grpo.broadcast import Broadcaster
from torchtitan.grpo.checkpoint.checkpointer import Checkpointer
from torchtitan.grpo.checkpoint.marker import step_of
from torchtitan.grpo.rollouts.stream import RolloutStream
from torchtitan.grpo.stopping import STOPPED, Stopped, StopRequested, asks_first, stopped
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.tools.logging import logger


class Run(Protocol):
    """What is asked of the trainer.

    Attributes:
        step: The step that is under way; 0 before the first.
        rollouts: On rank 0.
    """

    step: int
    is_rank0: bool
    broadcast: Broadcaster
    rollouts: RolloutStream
    weight_sync: WeightSync
    checkpointer: Checkpointer

    def write_checkpoint(self, last: bool) -> None: ...


@contextlib.contextmanager
def save_when_stopped(run: Run) -> Iterator[None]:
    """Around the loop: after the first SIGTERM or SIGINT on any rank, end the step, save, and leave with Stopped.

    1. The rank that hears the signal asks rank 0 (`Broadcaster.request_stop`). That waits for no push any more, and
       trains no further step: `RolloutStream.take` raises StopRequested.
    2. Here rank 0 sends that to the others, in place of the step's batch. So all ranks stop at the same step, and a
       run that is not stopped has no message more.
    3. Every rank saves the step before.

    The time for all of that is bounded (`stopping.SAVING_SHARE`), and a second signal ends it. Then nothing is saved,
    and what has been trained since the newest checkpoint is lost. The same holds for an error on the way, which is
    often another rank's end; it is reported in one line.

    Raises:
        Stopped: With the status and the last line of the run. `stopping.STOPPED` if all that was trained is saved.
    """
    asked = threading.Event()

    def on_stop() -> None:
        run.weight_sync.stop_waiting()
        run.rollouts.stop()

    run.broadcast.on_stop = on_stop

    def ask(number: int) -> bool:
        if run.step == 0 or not run.checkpointer.cfg.enable:
            return False
        asked.set()
        if run.is_rank0:
            logger.warning(f"{signal.Signals(number).name}: saving after this step. A second one ends the run at once")
        threading.Thread(target=run.broadcast.request_stop, name="stop-request", daemon=True).start()
        return True

    with asks_first(ask):
        try:
            try:
                yield
            except StopRequested:
                run.broadcast.stop_all()
                run.step -= 1  # the step under way has not begun to train
                if run.step:
                    run.write_checkpoint(last=True)
                raise stopped(STOPPED, _words(run, f"stopped at step {run.step}")) from None
        except Stopped:
            raise
        except SystemExit as interrupt:
            status = interrupt.code if isinstance(interrupt.code, int) else 1
            raise stopped(status, _words(run, f"stopped in step {run.step}, without saving it")) from None
        except Exception as error:
            if not asked.is_set():
                raise
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise stopped(1, _words(run, f"stopped in step {run.step}, without saving it ({what})")) from error


def _words(run: Run, what: str) -> str:
    """The last line of a stopped run, on rank 0."""
    cfg = run.checkpointer.cfg
    if not run.is_rank0:
        return ""
    if not cfg.enable:
        return f"{what}: checkpoints are off ([checkpoint] enable)"
    newest = run.checkpointer.newest()
    if newest is None:
        return f"{what}: there is no checkpoint yet"
    how = "by the same command" if cfg.resume else "with --checkpoint.resume"
    return f"{what}, newest checkpoint {step_of(newest)} in {newest.parent}, resume {how}"
