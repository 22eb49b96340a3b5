"""Parts of the campaign that do not touch each other, in several processes: a large machine need not wait."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from chaos.processes import Broken


def in_processes(work: Callable[..., Any], arguments: Sequence[tuple], jobs: int) -> list[Any]:
    """`work(*arguments[i])` for each i, at most `jobs` at a time, in processes of their own. With one job: in this one.

    Args:
        work: Importable, with results that can be pickled.

    Raises:
        Broken: One of them failed or ended. The others are stopped first.
    """
    if jobs <= 1:
        return [work(*own) for own in arguments]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_stop_in_order, max_tasks_per_child=1) as pool:
        futures = [pool.submit(work, *own) for own in arguments]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException as error:
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise Broken("a part has ended by itself") from error
            raise
    return [future.result() for future in futures]


def _stop_in_order() -> None:
    """SIGTERM raises, so that a part stops what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
