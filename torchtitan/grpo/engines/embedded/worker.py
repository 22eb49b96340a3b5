"""The thread that owns a generator."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from torchtitan.grpo.engines.embedded.generator import Generator, Request

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]


class GenerationWorker(threading.Thread):
    """Runs a generator's steps, and between two steps whatever other threads ask for with `call`.

    So nothing ever touches generator or model while a step is under way, and a pause is over when its future is.

    Args:
        on_finished: Called on this thread with the requests that are complete.
    """

    def __init__(self, generator: Generator, on_finished: Callable[[list[Request]], None]) -> None:
        super().__init__(name="generation", daemon=True)
        self.generator = generator
        self.paused = False
        self._on_finished = on_finished
        self._commands: list[tuple[Future, Callable[[], Any]]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._draining: list[tuple[Future, bool]] = []

    def call(self, function: Callable[[], Any]) -> Future:
        """Have the thread call `function` between two steps; the future has its result. Calls keep their order."""
        future = _uncancellable()
        with self._changed:
            if self._closing:
                future.set_exception(RuntimeError("the server is shutting down"))
                return future
            self._commands.append((future, function))
            self._changed.notify()
        return future

    def add(self, requests: list[Request]) -> Future:
        return self.call(lambda: self.generator.add(requests))

    def pause(self, mode: PauseMode, clear_cache: bool) -> Future:
        """Stop at a step boundary: "abort" ends all requests with what they have, "wait" lets those running finish,
        "keep" freezes them. Requests that come later wait. With `clear_cache` frozen requests are computed anew
        from their first token on resume, else they go on with the keys and values of the old weights."""
        done = _uncancellable()

        def begin() -> None:
            if mode == "wait" and self.generator.running and not self.paused:
                self._draining.append((done, clear_cache))
                return
            if mode == "abort":
                self._on_finished(self.generator.drop("abort"))
            self._finish_pause(done, clear_cache)

        self.call(begin)
        return done

    def resume(self) -> Future:
        def resume() -> None:
            for done, _ in self._draining:
                done.set_exception(RuntimeError("resumed before the running requests were done"))
            self._draining.clear()
            self.paused = False

        return self.call(resume)

    def close(self, timeout_s: float) -> None:
        """End all requests with what they have and stop; waits at most `timeout_s` for the step under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.join(timeout_s)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                commands, self._commands = self._commands, []
                closing = self._closing
            for future, function in commands:
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            if closing:
                self._on_finished(self.generator.drop("abort"))
                return
            if not self.paused and self.generator.busy:
                self._step()

    def _has_work(self) -> bool:
        return bool(self._closing or self._commands or (not self.paused and self.generator.busy))

    def _step(self) -> None:
        try:
            finished = self.generator.step(admit=not self._draining)
        except Exception as error:
            # Without an answer every client would wait for its own timeout. The next requests start afresh.
            logger.exception("generation failed")
            finished = self.generator.drop("abort", error=f"generation failed: {error}")
        self._on_finished(finished)
        if self._draining and not self.generator.running:
            for done, clear_cache in self._draining:
                self._finish_pause(done, clear_cache)
            self._draining.clear()

    def _finish_pause(self, done: Future, clear_cache: bool) -> None:
        self.paused = True
        if clear_cache:
            self.generator.preempt()
        done.set_result(None)


def _uncancellable() -> Future:
    """A future that a waiter who gives up cannot take from under the thread that will set it."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future
