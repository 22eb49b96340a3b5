"""The rollout process: everything from prompts to packed rows. A child of rank 0 that needs no torch.

`run/rollouts.py` is its other side. The worker's verbs run one after another on the main thread, the collector's event
loop is a thread of its own, and a third thread reads what the trainer says: calls in their order, changes of the
servers, and questions that must not wait.
"""

import asyncio
import errno
import faulthandler
import itertools
import logging
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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import PreTrainedTokenizerBase
from transformers.utils import is_torch_available

from torchtitan.grpo.config.batch import requests_at_once
from torchtitan.grpo.config.values import from_values
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.prompts import PromptSource, load_tokenizer, sft_pairs
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.endpoint.server import serve
from torchtitan.grpo.engines.fleet_mirror import FleetMirror
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.registry import server_maker
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.errors import in_words
from torchtitan.grpo.policy.advantages import reward_advantages
from torchtitan.grpo.policy.batch import has_signal, shaped_reward, split, supervised_samples, training_samples
from torchtitan.grpo.policy.packing import Layout, packing_metrics
from torchtitan.grpo.policy.rows import PackedRow, documents, encoded
from torchtitan.grpo.process.channel import Buffer, Channel, ChannelClosed
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.random_numbers import seed_python
from torchtitan.grpo.process.stacks import stacks
from torchtitan.grpo.reporting.sample_log import SampleLog
from torchtitan.grpo.reporting.step_metrics import rollout_metrics, validation_metrics
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.rollouts.record import RolloutRecord
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.rollouts.stream import RolloutStream
from torchtitan.grpo.rollouts.teachers.connect import connect_teachers
from torchtitan.grpo.weight_wire.version_names import join_run

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)

BEAT_S = 1.0
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
Files = list[list[Buffer]]
Event = Callable[..., None]


@dataclass(frozen=True)
class Model:
    """What rollouts have to know of the model.

    Attributes:
        routes: With routing replay: the shape of a sampler's routes.
    """

    vocab_size: int
    end_token_ids: list[int]
    routes: RouteShape | None = None


class TrainersTables:
    """Where `SampleLog` sends its tables: to the trainer, which has the loggers."""

    enabled = True

    def __init__(self, event: Event) -> None:
        self._event = event

    def table(self, name: str, step: int, records: list[dict[str, Any]]) -> None:
        self._event("table", name, step, records)


class RolloutWorker:
    """Prompts, rewards, environments, teachers, and the stream of groups from servers to rows.

    It is made before the trainer's process group: bad data, reward functions and environments are refused before any
    GPU time is spent. Then come `start`, `connect`, and every other verb as often as it is wanted. A verb returns a
    MessagePack value, and files where it has large bytes.

    Args:
        resources: Closes what is opened.
        event: Tells the trainer something, by name and values. It never waits.
    """

    def __init__(
        self,
        config: "JobConfig",
        tokenizer: PreTrainedTokenizerBase,
        model: Model,
        resources: ExitStack,
        event: Event = lambda *_: None,
    ) -> None:
        self.config, self.tokenizer, self.model, self.resources = config, tokenizer, model, resources
        self._event = event
        self.newest = 0
        """The newest version that a server can have, before the trainer calls again."""
        self.stream: RolloutStream | None = None
        rewards = RewardRunner(config.reward, config.rollout, config.distill, folder=config.job.dump_folder)
        self.rewards = resources.enter_context(rewards)
        self.environments = resources.enter_context(loaded_environments(config))
        rows, make = self.environments.rows, partial(PromptSource, vocab_size=model.vocab_size)
        self.held_out = load_held_out(config, tokenizer, make, rows) if config.validation.enable else []
        self.prompts = load_training(config, tokenizer, self.held_out, make, rows)
        self.rewards.check(self.prompts.first(2), refuse=not config.rollout.environment)

    def start(self) -> None:
        """Check the teachers, while the servers of the run do not exist yet."""
        self.teachers = connect_teachers(self.config, self.tokenizer, self.model.vocab_size)

    def connect(self, layout: Layout) -> None:
        """Open what asks the servers, which `fleet.apply` makes known. Rows are cut by `layout`."""
        if self.stream is not None:
            return  # its trainer does not know that it was told before
        config, rollout, dump = self.config, self.config.rollout, self.config.job.dump_folder
        seed_python(config.debug.seed or 0)
        self.layout = layout
        self.record = RolloutRecord(rollout, dump)
        self.samples = SampleLog(config, dump, TrainersTables(self._event), self.tokenizer)
        self.resources.callback(self.samples.close)
        make = server_maker(config, lambda: self.newest, self.model.vocab_size)
        self.fleet = FleetMirror(make, partial(self._event, "server"))
        self.check = SamplerCheck(config, None)
        self.collector = Collector(
            self.fleet,
            self.rewards,
            self.tokenizer,
            requests_at_once(rollout),
            rollout.request_timeout_seconds,
            self.environments,
            rollout.group_timeout_seconds,
        )
        self.collector.on_loop(lambda: asyncio.get_running_loop().set_exception_handler(_on_loop_error))
        self.resources.callback(self.collector.close)
        serve(config, self.collector)
        self.stream = RolloutStream(
            self.collector,
            self.prompts,
            self._sampling(config.grpo.group_size, rollout.temperature),
            config.grpo,
            config.async_grpo,
            rollout,
            config.training.steps,
            lambda group: has_signal(group, config.grpo, rollout.max_answer_tokens, config.distill),
            config.reward.max_failed_fraction,
            self.teachers,
            self.layout.row_tokens,
        )

    def pairs(self) -> tuple[Any, Files]:
        """The next batch of the warm start, packed: one file with each rank's rows, and one with the state."""
        prompts = self.prompts.next(self.config.sft.batch_size)
        column = self.config.sft.target_column
        documents = sft_pairs(prompts, self.config.data, column, self.tokenizer, self.model.vocab_size)
        parts = encoded(self.layout.pack(supervised_samples(documents)))
        return [len(part) for part in parts], [parts, self._state()]

    def take(self, step: int) -> tuple[Any, Files]:
        """What this step trains on: see `rollouts.Taken`, one file with the rows of each minibatch and rank, and one
        with the state after it."""
        assert self.stream is not None
        seconds: dict[str, float] = {}
        groups = self.stream.take(step - 1)
        seconds["reward"] = self.stream.take_scoring_seconds()
        began = time.monotonic()
        if self.config.rollout.record_gib:
            self.record.write(step, groups)
            seconds["record"] = time.monotonic() - began
        began = time.monotonic()
        packed = Packed.of(groups, step - 1, self.config, self.check, self.layout)
        parts = [encoded(rows_by_rank) for rows_by_rank in packed.minibatches]
        sizes = [[len(part) for part in of_ranks] for of_ranks in parts]
        seconds["pack"] = time.monotonic() - began
        self.newest = max(self.newest, step)  # it is trained and published, and the next call may come later
        value = [
            packed.rewards,
            packed.advantages,
            packed.servers,
            packed.metrics,
            documents(packed.minibatches),
            sizes,
            seconds,
            self.samples.chosen(step, groups),
        ]
        return value, [list(itertools.chain.from_iterable(parts)), self._state()]

    def is_ready(self) -> bool:
        assert self.stream is not None
        return self.stream.is_ready()

    def validate(self, step: int) -> dict[str, float]:
        config = self.config
        with self.collector.unless_stopped():
            # It waits for servers that do not have this version yet.
            answers = answer_held_out(self.collector, self.held_out, self._sampling(1, 0.0), step)
            self.samples.log_validation(step, answers)
            check_failures([group for each in answers for group in each.groups], config.reward.max_failed_fraction)
            return validation_metrics(answers, config.reward)
        return {}

    def metrics(self) -> list[Any]:
        """Counts of groups, and the seconds in which each server had a request since the last call."""
        assert self.stream is not None
        return [self.stream.metrics(), self.collector.take_busy_seconds()]

    def log(self, step: int, chosen: list[tuple[int, dict[str, Any]]], advantages: list[list[float]]) -> None:
        """Write the answers that `take` has chosen."""
        self.samples.write(step, chosen, advantages)

    def state(self, step: int) -> tuple[Any, Files]:
        """One file with the state to resume from after this step."""
        assert self.stream is not None
        return None, [[self.stream.state_dict(step)]]

    def load_state(self, state: Buffer) -> None:
        assert self.stream is not None
        self.stream.load_state_dict(state)

    def _state(self) -> list[Buffer]:
        return [] if self.stream is None else [self.stream.state_now()]

    def describe(self) -> str:
        """What is waited for. For any thread, and without a lock."""
        if self.stream is None:
            return "rollouts: not connected yet"
        return f"{self.fleet.describe()}\n  {self.collector.describe()}"

    def _sampling(self, n: int, temperature: float) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            n,
            temperature,
            rollout.max_answer_tokens,
            (*self.model.end_token_ids, *rollout.stop_token_ids),
            self.config.debug.seed or 0,
            stop=tuple(rollout.stop),
            routes=self.model.routes if temperature else None,  # held-out answers need none
            vocab_size=self.model.vocab_size,
        )


@dataclass
class Packed:
    """A step's answers, packed. `minibatches` are rows by rank; the rest is as in `rollouts.Taken`."""

    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: list[list[list[PackedRow]]]
    metrics: dict[str, float]

    @classmethod
    def of(
        cls, groups: list[Group], version: int, config: "JobConfig", check: SamplerCheck, layout: Layout
    ) -> "Packed":
        """Rewards become advantages, and answers packed rows, of a step that trains weights of this version."""
        grpo, limit = config.grpo, config.rollout.max_answer_tokens
        rewards = [[shaped_reward(sample, grpo, limit) for sample in group] for group in groups]
        metrics = rollout_metrics(groups, rewards, version, config.async_grpo.max_age)
        advantages = reward_advantages(rewards, grpo, config.distill)
        servers = check.servers(groups, version)
        minibatches: list[list[list[PackedRow]]] = []
        for part in split(len(groups), grpo.minibatches):
            # The sampler's log-probabilities meet a policy that the first minibatch has changed.
            compared = servers if not minibatches or grpo.proximal_logprobs == "recompute" else ()
            own = [groups[i] for i in part], [advantages[i] for i in part]
            token_servers = partial(check.token_servers, compared)
            minibatches.append(layout.pack(training_samples(*own, version, grpo, limit, token_servers, config.distill)))
        metrics |= packing_metrics(minibatches, layout.attention_tokens)
        return cls(rewards, advantages, servers, minibatches, metrics)


class Service:
    """Answers the trainer, until it says "close" or is gone. Then everything is released, and the process ends.

    A message is [number, verb, newest version, arguments]. A reply is [number, "ok", value] or [number, "error", kind,
    words, traceback]. Number 0 wants no reply, and is an event's: [0, name, values].
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.resources = ExitStack()
        self.worker: RolloutWorker | None = None
        self._stops = False
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

    def _answer(self, verb: str, arguments: list[Any], files: list[memoryview]) -> Any:
        if verb == "prepare":
            return self._prepare(*arguments)
        assert self.worker is not None
        if verb == "connect":
            self.worker.connect(Layout(*arguments))
            return self._stop(0) if self._stops else None
        return getattr(self.worker, verb)(*arguments, *files)

    def _prepare(self, values: dict[str, Any], vocab_size: int, end_token_ids: list[int], routes: list[int]) -> None:
        if self.worker is not None:
            return
        config, model = from_values(values), Model(vocab_size, end_token_ids, RouteShape(*routes) if routes else None)
        tokenizer = load_tokenizer(config.model.hf_assets_path, config.data.chat_template_file, vocab_size)
        show_torch()
        self.worker = RolloutWorker(config, tokenizer, model, self.resources, self._event)

    def _event(self, name: str, *values: Any) -> None:
        self.channel.send([0, name, list(values)])

    def _send_error(self, number: int, error: BaseException) -> None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        self.channel.send([number, "error", kinds, in_words(error), "".join(traceback.format_exception(error))])

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
            pass
        except BaseException as error:  # without this thread nobody would hear the trainer
            self._send_error(0, error)
        threading.Timer(_CLOSE_S, os._exit, [1]).start()
        self._stop(0)
        self._calls.put(None)

    def _beat(self) -> None:
        while True:
            self._event("beat", self.worker.rewards.scored if self.worker else 0)
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
    of_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
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
    Service(Channel(socket.socket(fileno=descriptor), "rollouts")).run()
    sys.stdout.flush()
    os._exit(0)  # an environment's threads may still run
