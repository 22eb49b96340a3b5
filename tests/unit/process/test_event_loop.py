"""An event loop on a thread of its own."""

import asyncio
import contextlib
import threading

from torchtitan.grpo.process import event_loop


def test_a_task_that_does_not_let_itself_be_cancelled_does_not_keep_the_thread(monkeypatch) -> None:
    monkeypatch.setattr(event_loop, "CLOSE_TIMEOUT_S", 1.0)
    thread, begun, over = event_loop.LoopThread("tests"), threading.Event(), threading.Event()

    async def stubborn() -> None:
        while not over.is_set():
            begun.set()
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.01)

    asyncio.run_coroutine_threadsafe(stubborn(), thread.loop)
    assert begun.wait(10)
    thread.close()
    over.set()
    assert thread.loop.is_closed()


def test_a_task_may_take_most_of_the_time_to_release_what_it_has(monkeypatch) -> None:
    """As an environment that ends a sandbox."""
    monkeypatch.setattr(event_loop, "CLOSE_TIMEOUT_S", 2.0)
    thread, begun, released = event_loop.LoopThread("tests"), threading.Event(), threading.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1.2)
            released.set()

    asyncio.run_coroutine_threadsafe(slow(), thread.loop)
    assert begun.wait(10)
    thread.close()
    assert released.is_set()
