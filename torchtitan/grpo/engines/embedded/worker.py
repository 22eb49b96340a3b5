"""The thread that owns a generator."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, get_args

from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.errors import said

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class GenerationWorker(threading.Thread):
    """Runs a generator's steps, and between two steps the functions that other threads pass to `call`.

    So nothing touches generator or model during a step, and the server is paused when a pause's future is done.

    Args:
        on_finished: Called on this thread with the complete requests.
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
        """Have the thread call `function` between two steps. The future has its result. Calls keep their order."""
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
        """Pause at a step boundary. Requests that arrive later wait.

        Args:
            mode: "abort" ends all requests with the tokens that they have, "wait" lets running ones finish, "keep"
                freezes them.
            clear_cache: Frozen requests are computed again from their first token on resume. Otherwise they continue
                with the keys and values of the old weights.
        """
        done = _uncancellable()

        def begin() -> None:
            if mode == "wait" and self.generator.running and not self.paused:
                self._draining.append((done, clear_cache))
                return
            if mode == "abort":
                self._on_finished(self.generator.drop())
            self._finish_pause(done, clear_cache)

        self.call(begin)
        return done

    def resume(self) -> None:
        """On this thread, by `call`."""
        for done, _ in self._draining:
            done.set_exception(RuntimeError("resumed before the running requests were done"))
        self._draining.clear()
        self.paused = False

    def close(self, timeout_s: float) -> None:
        """End all requests with the tokens that they have, and stop. Waits at most `timeout_s` for the current step."""
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
                self._on_finished(self.generator.drop())
                return
            if not self.paused and self.generator.busy:
                self._step()

    def _has_work(self) -> bool:
        return bool(self._closing or self._commands or (not self.paused and self.generator.busy))

    def _step(self) -> None:
        try:
            finished = self.generator.step(admit=not self._draining)
        except Exception as error:
            # Answer at once, since clients would wait for their timeouts. The next requests start afresh.
            logger.exception("generation failed")
            finished = self.generator.drop(f"generation failed: {said(error)}")
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
    """A future that a waiter cannot cancel while another thread is about to set it."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future
