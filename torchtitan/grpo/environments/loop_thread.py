"""An event loop on a thread of its own, for packages whose code may block it."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from torchtitan.grpo.process.stopping import run_loop

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines beside the collector's event loop. Its time limits hold, even while this one is blocked."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=run_loop, args=(self._loop,), name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, on another event loop. If the wait is cancelled, so is the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Wait for a coroutine, from a thread without an event loop.

        Raises:
            TimeoutError: It took longer, and is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what runs, and end the thread. Bounded: a loop that is blocked ends with the process."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            self.wait(_cancel_others(), CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
