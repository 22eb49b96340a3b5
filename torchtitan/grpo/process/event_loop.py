"""An event loop on a thread of its own, and coroutines that stand or fall together."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torchtitan.grpo.process.stopping import run_loop

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
CANCEL_S = 1.0


async def cancel_others() -> None:
    """Cancel every other task of this event loop, and wait until they have ended, which may take most of the time that
    `LoopThread.close` has. One may go on all the same."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=0.8 * CLOSE_TIMEOUT_S)


class LoopThread:
    """Runs coroutines on an event loop of its own. Time limits of others hold, even while this one is blocked."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._blocked = False
        self._thread = threading.Thread(target=run_loop, args=(self.loop,), name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, on another event loop. If the wait is cancelled, so is the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Wait for a coroutine, from a thread without an event loop.

        Raises:
            TimeoutError: It took longer, and is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self, ending: Callable[[], Coroutine[Any, Any, None]] = cancel_others) -> None:
        """Wait for `ending`, and end the thread. Bounded: a loop that is blocked ends with the process."""
        if self.loop.is_closed() or self._blocked:
            return
        try:
            self.wait(ending(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._blocked = True
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


async def left_if_cancelled(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result. If the wait is cancelled, so is the coroutine. One that goes on all the same for CANCEL_S is left."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, though nobody waits
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_S)
        raise
    return task.result()


async def all_of(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. As soon as one fails, the others are cancelled, and its error is raised.

    `asyncio.TaskGroup` forgets that it was cancelled if one of them then fails.
    """
    if not coroutines:
        return []
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        errors = [error for task in ended if (error := task.exception())]
        if errors:
            raise errors[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]
