"""The rollout process: it reads what the trainer says, and answers. A child of rank 0 that needs no torch.

`run/rollout_process.py` is its other side, and `run/rollout_worker.py` the work. The worker's verbs run one after
another on the main thread, the collector's event loop is a thread of its own, and a third thread reads what the trainer
says: calls in their order, changes of the servers, and questions that must not wait.
"""

import asyncio
import errno
import faulthandler
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

from transformers.utils import is_torch_available

from torchtitan.grpo.config.share import Share
from torchtitan.grpo.config.values import from_values
from torchtitan.grpo.data.overview import overview
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import PlainError, in_words, text_of
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.process.channel import Channel, ChannelClosed
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.stacks import stacks
from torchtitan.grpo.run.rollout_worker import Model, RolloutWorker
from torchtitan.grpo.weight_wire.version_names import join_run

BEAT_S = 1.0
HELD_S = 3600.0
"""How long anything may hold the interpreter when the trainer is gone: one that lives ends the process sooner. Time in
which a container is paused counts here, and not there."""
NO_MEMORY = errno.ENOMEM
"""Exit status of a process that lacks memory."""
_PROBE_BYTES = 2**20
_CLOSE_S = 10.0
_FLUSH_S = 2.0
_SWITCH_S = 0.0005
_AT_ONCE = ("stop", "describe")
"""What does not wait until the main thread is free."""
_OF_FLEET = {name: name for name in ("requests_in_flight", "versions_in_use")} | {"servers": "apply"}
"""Nor does this, which methods of the fleet do on the event loop, in order."""


class Service:
    """Answers the trainer, until it says "close" or is gone. Then everything is released, and the process ends.

    A message is [number, verb, newest version, arguments]. A reply is [number, "ok", value] or [number, "error", kind,
    words, traceback]. Number 0 wants no reply, and is an event's: [0, name, values].
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.resources = ExitStack()
        self.worker: RolloutWorker | None = None
        self._overview: list[str] = []
        self._stops = False
        self._is_orphan = False
        self._calls: queue.SimpleQueue[tuple[int, str, int, list[Any], list[memoryview]] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """On the main thread, where verbs run one after another."""
        threading.Thread(target=self._read, name="trainer-reader", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        while (call := self._calls.get()) is not None:
            number, verb, newest, arguments, files = call
            try:
                if self.worker is not None:
                    self.worker.newest = max(self.worker.newest, newest)
                made = self._answer(verb, arguments, files)
                value, files_made = made if isinstance(made, tuple) else (made, [])
                self.channel.send([number, "ok", value], *files_made)
            except BaseException as error:  # a user's module may call sys.exit
                if lacks_memory(error):
                    end_without_memory()
                self._send_error(number, error)
        self.resources.close()
        self.channel.close(_FLUSH_S)

    def leave(self, status: int) -> NoReturn:
        """End the process; an environment's threads may still run. If the trainer has gone, nobody else ends what an
        environment has started."""
        if self._is_orphan and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(status)

    def _answer(self, verb: str, arguments: list[Any], files: list[memoryview]) -> Any:
        if verb == "prepare":
            return self._prepare(*arguments)
        assert self.worker is not None
        if verb == "connect":
            self.worker.connect(Layout(*arguments))
            self.worker.collector.on_loop(lambda: asyncio.get_running_loop().set_exception_handler(_on_loop_error))
            return self._stop(0) if self._stops else None
        return getattr(self.worker, verb)(*arguments, *files)

    def _prepare(
        self, values: dict[str, Any], vocab_size: int, end_token_ids: list[int], routes: list[int], share: list[int]
    ) -> list[str]:
        if self.worker is not None:  # asked again, after it took another's place
            return self._overview
        config, model = from_values(values), Model(vocab_size, end_token_ids, RouteShape(*routes) if routes else None)
        tokenizer = load_tokenizer(config.model.hf_assets_path, config.data.chat_template_file, vocab_size)
        show_torch()
        self.worker = RolloutWorker(config, tokenizer, model, self.resources, self._event, Share(*share))
        self._overview = overview(self.worker.prompts, self.worker.held_out, tokenizer)
        return self._overview

    def _event(self, name: str, *values: Any) -> None:
        self.channel.send([0, name, list(values)])

    def _send_error(self, number: int, error: BaseException) -> None:
        kinds, trace = [kind.__name__ for kind in type(error).__mro__], ""
        with suppress(Exception):  # it reads attributes of foreign errors
            trace = "".join(traceback.format_exception(error))
        words = text_of(error) if isinstance(error, PlainError) else in_words(error)  # it may hold lines of Python
        self.channel.send([number, "error", kinds, words, trace])

    def _read(self) -> None:
        try:
            while True:
                (number, verb, newest, arguments), files = self.channel.receive()
                if verb == "close":
                    break
                if verb in _AT_ONCE or verb in _OF_FLEET:
                    try:
                        self._answer_at_once(number, verb, *arguments)
                    except Exception as error:  # a description may meet what changes meanwhile
                        self._send_error(number, error)
                else:
                    self._calls.put((number, verb, newest, arguments, files))
        except ChannelClosed:
            self._is_orphan = True
        except BaseException as error:  # without this thread nobody would hear the trainer
            self._send_error(0, error)
        threading.Timer(_CLOSE_S, self.leave, [1]).start()
        self._stop(0)
        self._calls.put(None)

    def _beat(self) -> None:
        while True:
            self._event("beat", self.worker.scored if self.worker else 0)
            with suppress(RuntimeError):  # the machine may have no thread for it now
                faulthandler.dump_traceback_later(HELD_S, exit=True, file=2)  # none would notice the trainer's end
            time.sleep(BEAT_S)

    # --------------------------------------------------------------- what does not wait until the main thread is free

    def _answer_at_once(self, number: int, verb: str, *arguments: Any) -> None:
        if verb in _AT_ONCE:
            getattr(self, f"_{verb}")(number)
            return
        assert self.worker is not None
        call = partial(getattr(self.worker.fleet, _OF_FLEET[verb]), *arguments)
        self.worker.collector.on_loop(partial(self._on_loop, number, call))

    def _stop(self, number: int) -> None:
        self._stops = True  # there may be no stream yet
        if self.worker is not None and self.worker.stream is not None:
            self.worker.stream.stop()

    def _describe(self, number: int) -> None:
        said = self.worker.describe() if self.worker else "rollouts: reading data"
        self.channel.send([number, "ok", f"{said}\nin the rollout process:\n{stacks()}"])

    def _on_loop(self, number: int, call: Callable[[], Any]) -> None:
        try:
            value = call()
        except Exception as error:
            self._send_error(number, error)
        else:
            if number:
                self.channel.send([number, "ok", value])


def lacks_memory(error: BaseException) -> bool:
    """Whether the system refuses this process memory, or a thread, whose stack is memory. It is no fault of the run's
    data or settings, and another process may have what this one lacks."""
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_thread = isinstance(error, RuntimeError) and "can't start new thread" in text_of(error)
    return isinstance(error, MemoryError) or of_system or of_thread or _no_memory_left()


def _no_memory_left() -> bool:
    """Errors of many kinds may tell of it: of an import, for one."""
    try:
        mmap.mmap(-1, _PROBE_BYTES).close()
    except OSError:
        return True
    return False


def end_without_memory() -> NoReturn:
    """End at once: releasing what is open may need memory. The trainer starts another process."""
    os._exit(NO_MEMORY)


def show_torch() -> None:
    """It was hidden while this module and a tokenizer were loaded. Environments may use it."""
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]
        if forget := getattr(is_torch_available, "cache_clear", None):
            forget()


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A connection that gets no memory for what comes only looks like one that its server has closed."""
    if "transport" in context and "exception" in context and lacks_memory(context["exception"]):
        end_without_memory()
    loop.default_exception_handler(context)


def _on_thread_error(error: threading.ExceptHookArgs) -> None:
    if error.exc_value is not None and lacks_memory(error.exc_value):
        end_without_memory()
    threading.__excepthook__(error)


def main(descriptor: int, run: str) -> None:
    """The process. `descriptor` is its end of the trainer's pair of sockets, and `run` the trainer's name."""
    join_run(run)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are the trainer's: it closes this process
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that are started here would inherit
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it is, when the trainer takes it for frozen
    threading.excepthook = _on_thread_error
    init_log_lines(is_continued=True)
    sys.setswitchinterval(_SWITCH_S)
    service = Service(Channel(socket.socket(fileno=descriptor), "rollouts"))
    service.run()
    sys.stdout.flush()
    service.leave(0)
