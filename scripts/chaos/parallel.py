"""Parts of the campaign that do not touch each other, in several processes: a large machine need not wait."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from chaos.processes import Broken

STOP_S = 60.0


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
    results: dict[int, Any] = {}
    waiting, running = list(enumerate(arguments)), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, own = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(theirs, work, own))
                process.start()
                theirs.close()
                running[ours] = index, process
            for connection in wait(list(running)):
                index, process = running[connection]
                try:
                    failure, results[index] = connection.recv()
                except EOFError:
                    process.join(STOP_S)
                    failure = f"part {index} ended with exit status {process.exitcode}"
                if failure:
                    raise Broken(failure)
                process.join(STOP_S)
                del running[connection]
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join(STOP_S)
    return [results[index] for index in range(len(arguments))]


def _run(connection: Connection, work: Callable[..., Any], arguments: tuple) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it stops what it started
    try:
        connection.send(("", work(*arguments)))
    except Broken as error:
        connection.send((str(error), None))
