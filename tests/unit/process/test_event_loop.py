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
