"""A run that is asked to stop, or that fails, saves its last step, and says how to go on (I12)."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from torchtitan.grpo.checkpoint.marker import step_of
from torchtitan.grpo.errors import PlainError, UserError, UserErrorOfAllRanks, in_words
from torchtitan.grpo.process.stopping import STOPPED, Stopped, StopRequested, asks_first, stopped
from torchtitan.grpo.run.run import Run
from torchtitan.tools.logging import logger


@contextlib.contextmanager
def save_when_stopped(run: Run) -> Iterator[None]:
    """Around the loop: whatever ends it, the last step that is trained is saved.

    After the first SIGTERM, SIGINT or SIGHUP on any rank:

    1. The rank that hears the signal asks rank 0 (`Broadcaster.request_stop`). That waits for no push any more, and
       trains no further step: `RolloutStream.take` raises StopRequested.
    2. Rank 0 sends that to the others, in place of the step's batch. So all ranks stop at the same step, and a run that
       is not stopped has no message more.
    3. Every rank saves the step before.

    An error of rank 0 for which the others wait takes the same way from 2 on, and is raised after the save. So does one
    of any rank that can wait until the step is done (`Ending.later`). Where there is one rank only, that holds
    for every error.

    The time after a signal is bounded (`stopping.SAVING_SHARE`), and a second one ends it. Then nothing is saved: what
    has been trained since the newest checkpoint is lost. With several ranks the same holds for an error on the way,
    which is often another rank's end; it is reported in one line.

    Raises:
        Stopped: With the status and the last line of the run. `stopping.STOPPED` if all that was trained is saved.
        UserErrorOfAllRanks: With rank 0's UserError, on the others. Another error of rank 0 is their last line.
    """
    asked = threading.Event()

    def on_stop(why: str) -> None:
        if why and run.ending.failure is None:  # another rank's
            run.ending.failure = PlainError(why)
        run.stop()

    run.broadcast.on_stop = on_stop

    def ask(number: int) -> bool:
        if run.step == 0 or not run.checkpointer.cfg.enable:
            return False
        asked.set()
        if run.is_rank0:
            why = f"{signal.Signals(number).name}: " if number else ""
            logger.warning(f"{why}saving after this step. A second signal ends the run at once")
        threading.Thread(target=run.broadcast.request_stop, name="stop-request", daemon=True).start()
        return True

    failure: BaseException | None = None
    with asks_first(ask):
        try:
            try:
                yield
                return
            except StopRequested as stop:
                failure = run.ending.failure
                if failure is None and stop.why:
                    words = f"error on rank 0: {stop.why}"
                    failure = UserErrorOfAllRanks(stop.why) if stop.refused else stopped(1, words)
            except Exception as error:
                first = run.ending.failure or error
                if run.broadcast.ranks > 1:
                    raise first from first.__cause__
                failure = first
            if failure is not None:
                _save_failed(run, failure)
                raise failure
            _save(run)
            raise stopped(STOPPED, _words(run, f"stopped at step {run.step}"))
        except SystemExit as interrupt:
            if isinstance(interrupt, Stopped) and interrupt.words:
                raise
            status = interrupt.code if isinstance(interrupt.code, int) else 1
            raise stopped(status, _words(run, f"stopped in step {run.step}, without saving it")) from None
        except Exception as error:
            if error is failure or not asked.is_set():
                raise
            what = f"stopped in step {run.step}, without saving it ({in_words(error)})"
            raise stopped(1, _words(run, what)) from error


def _save(run: Run) -> None:
    """The newest whole step becomes the run's. A step that was saved is not saved again."""
    if run.ending.trained is not None:
        run.step = run.ending.trained
        if run.step and run.checkpointer.cfg.enable:
            run.write_checkpoint(last=True)


def _save_failed(run: Run, failure: BaseException) -> None:
    """The same for a run that failed: an error here must not hide what ended it."""
    said = logger.warning if run.is_rank0 else logger.debug
    if run.ending.trained is None:
        return said(_words(run, f"the run ends amid the optimizer's part of step {run.step}, so no step can be saved"))
    run.stop()  # of several rollout processes, those that have not failed may still wait for answers
    try:
        _save(run)
    except Exception as error:
        said(_words(run, f"step {run.step} is not saved ({in_words(error)})"))
    else:
        if not run.step and isinstance(failure, UserError):
            return  # as a resume with other data: the same command would be refused again, and the error says more
        said(_words(run, f"the run ends with an error after step {run.step}"))


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
