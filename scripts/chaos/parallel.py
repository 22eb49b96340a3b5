"""Parts of the campaign that do not touch each other, in several processes: a large machine need not wait."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any


def in_processes(work: Callable[..., Any], arguments: Sequence[tuple], jobs: int) -> list[Any]:
    """`work(*arguments[i])` for each i, at most `jobs` at a time, in processes of their own. With one job: in this one.

    Args:
        work: Importable, with results that can be pickled.

    Raises:
        Broken, BrokenProcessPool: One of them failed or ended. The others are stopped first.
    """
    if jobs <= 1:
        return [work(*own) for own in arguments]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_in_order) as pool:
        results = [pool.submit(work, *own) for own in arguments]
        try:
            for result in as_completed(results):
                result.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return [result.result() for result in results]


def _end_in_order() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it stops what it started
