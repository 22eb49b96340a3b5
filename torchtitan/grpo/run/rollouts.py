"""Rollouts as the trainer has them: the servers, and a process of its own that makes packed rows of prompts."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from torchtitan.config import JobConfig
from torchtitan.grpo.config.job_config import NO_ENVIRONMENT
from torchtitan.grpo.config.tables import longest_tokens
from torchtitan.grpo.config.values import to_values
from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.engines.fleet_mirror import FleetTeller
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.registry import server_maker
from torchtitan.grpo.errors import PlainError
from torchtitan.grpo.model.source import ModelSource, write_hf_config
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.step_metrics import server_metrics, sync_metrics
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.rollouts.environment import ENDPOINT
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.run.broadcast import patience_s
from torchtitan.grpo.run.rollout_process import CLOSE_S, ProcessLost, Reply, RolloutError, RolloutProcess
from torchtitan.grpo.servers.own import OwnServers

logger = logging.getLogger(__name__)

ASKED_S = 5.0
"""How long a link of weight sync waits for what the process says of a server."""
LOSSES_MAX = 5
"""How often the process may end in a row, without a step's groups between."""
_LAST = ("take", "is_ready", "validate", "metrics", "log")
"""What a run that is asked to stop does without, if it had to wait for another process."""


@dataclass
class Taken:
    """What a step trains on, as plain values and bytes on the host.

    Attributes:
        rewards, advantages: By group and sample. An answer without a reward is left out.
        servers: That sampled the answers; see `SamplerCheck.servers`.
        minibatches: The packed rows of each, by data rank, as `rows.encoded` has them. None on ranks other than 0.
        documents: What `Usage.work` takes; empty on ranks other than 0.
        metrics: Of rollouts and packing.
    """

    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: Sequence[list[Buffer] | None]
    documents: tuple[list[int], list[int], int] | tuple[()]
    metrics: dict[str, float]


class Absent:
    """Rollouts on a rank that has none: every verb has nothing to do.

    Attributes:
        fleet: The servers; None here.
        check: Compares sampler and trainer; every rank calls it.
    """

    fleet: Fleet | None = None

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.check = SamplerCheck(config, None)

    def prepare(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, end_token_ids: list[int]) -> None:
        """Read data, and try rewards and environment: bad ones are refused before any GPU time is spent."""

    def start(self, own_servers: OwnServers) -> None:
        """Start the servers of `[rollout] replicas`: they load while the trainer loads its own weights."""

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        """Wait for the servers, check that they fit the trainer, and open what asks them.

        Args:
            ledger: It gets the seconds of `take`.
            layout: Of the rows that `take` packs.
            newest: The newest version that a server can have.
        """

    def sleep(self) -> None:
        """The trainer needs the memory of servers on its GPU, see `OwnServers.sleep`."""

    def pairs(self) -> list[Buffer] | None:
        """The next batch of the warm start: prompts with their reference answers, packed, by data rank."""
        return None

    def take(self, step: int) -> Taken:
        """What this step trains on. With `[async_grpo]` its rollouts began earlier.

        Raises:
            EngineError, FleetError, StopRequested, UserError: See `RolloutStream.take`.
        """
        return Taken([], [], {}, [None] * self.config.grpo.minibatches, (), {})

    def is_ready(self) -> bool:
        """Whether `take` returns the next step's batch without a wait for answers."""
        return False

    def validate(self, step: int) -> dict[str, float]:
        """Answer held-out prompts, greedily and sampled, by this step's weights or newer ones. {} if it is stopped."""
        return {}

    def metrics(self, reports: list[SyncReport], step_s: float) -> dict[str, float]:
        """Of groups, servers, and the pushes of weights that ended in a step of so many seconds."""
        return {}

    def log(self, step: int, advantages: list[list[float]]) -> None:
        """Write some of a step's answers to samples.jsonl, once it is trained."""

    def state_dict(self, step: int) -> Buffer | None:
        """What a run resumed after this step continues from."""
        return None

    def load_state_dict(self, state: Buffer | dict[str, Any] | None) -> None:
        """Continue from `state_dict`, or from the dict of an earlier checkpoint."""

    def stop(self) -> None:
        """From any thread: no step takes groups from now on."""

    def progress(self) -> object:
        """It changes as long as answers come. For any thread."""
        return 0

    def describe(self) -> str:
        """What is waited for, for a report of a run that hangs."""
        return "rollouts: on rank 0"


class Rollouts(Absent):
    """Rollouts on rank 0: a process of their own has prompts, rewards, environments, teachers and the stream of groups.
    The servers' weights are the trainer's business, so it has the list of servers, and tells the process of them.

    The process starts at once, so that it is there when the model has been read. If it ends, another one takes its
    place, with the state of the newest step that was taken. That costs the groups that were under way. What the trainer
    had asked is asked again.

    Args:
        resources: Closes what is opened, with the run.
    """

    def __init__(self, config: JobConfig, resources: ExitStack) -> None:
        self.config, self.resources = config, resources
        self.losses = 0
        """How often the process has ended."""
        self._losses_since_taken = 0
        self._chosen: dict[int, Any] = {}  # answers for the log, of steps that are taken and not logged yet
        self._metrics: MetricsLogger | None = None
        self._layout: Layout | None = None
        self._teller: FleetTeller | None = None
        self._newest: Callable[[], int] = lambda: 0
        self._is_prepared = self._has_started = self._stopping = self._closed = False
        self._states: dict[int, Buffer] = {}  # after steps, by step: of the two newest that were taken, or loaded
        self._scored = 0  # by processes that have ended
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._process: RolloutProcess | None = None
        self._beginning: RolloutProcess | None = None  # to take its place
        resources.callback(self.close)
        self._is_there(self._process_of_its_own())

    # ------------------------------------------------------------------------------------------------ the verbs

    def prepare(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, end_token_ids: list[int]) -> None:
        self.source, self.tokenizer, self.end_token_ids = source, tokenizer, end_token_ids
        self._is_prepared = True
        self._call("prepare", *self._inputs())

    def start(self, own_servers: OwnServers) -> None:
        self.own_servers = own_servers
        self._has_started = True
        self._call("start")
        own_servers.start(partial(write_hf_config, self.source, self.tokenizer))

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        rollout = self.config.rollout
        self.ledger, self._metrics, self._newest = ledger, metrics, newest
        self.fleet = self.own_servers.fleet(self._server)
        for server in self.fleet.servers:
            server.control.wait_healthy(rollout.start_timeout_seconds)
            server.check()
        self.check = SamplerCheck(self.config, self.fleet)
        self.resources.callback(self.close)  # before its servers
        self._layout = layout
        self._call("connect", *astuple(layout))
        teller = FleetTeller(self.fleet, self._tell_of_servers)
        self.fleet.requests_in_flight = self._requests_in_flight
        self.fleet.versions_in_use = self._versions_in_use
        self._running("connect").tell_made("servers", teller.whole)
        self._teller = teller
        self._tell_of_servers()

    def sleep(self) -> None:
        self.own_servers.sleep()

    def pairs(self) -> list[Buffer]:
        sizes, (rows, state) = self._call("pairs")
        if state:
            self._states[0] = state
        self._losses_since_taken = 0
        return _cut(rows, sizes)

    def take(self, step: int) -> Taken:
        with self.ledger.stage("rollout"):
            value, (rows, state) = self._call("take", step)
            self.sleep()
        rewards, advantages, servers, metrics, documents, sizes, seconds, self._chosen[step] = value
        self._states = {taken: kept for taken, kept in self._states.items() if taken == step - 1} | {step: state}
        self._losses_since_taken = 0
        for name, spent_s in seconds.items():
            self.ledger.add(name, spent_s, out_of="rollout")
        parts = iter(_cut(rows, list(itertools.chain.from_iterable(sizes))))
        minibatches = [list(itertools.islice(parts, len(of_ranks))) for of_ranks in sizes]
        return Taken(rewards, advantages, servers, minibatches, documents, metrics)

    def is_ready(self) -> bool:
        return self._call("is_ready")[0]

    def validate(self, step: int) -> dict[str, float]:
        try:
            return self._call("validate", step)[0]
        except StopRequested:
            return {}

    def metrics(self, reports: list[SyncReport], step_s: float) -> dict[str, float]:
        assert self.fleet is not None
        idle_s = {server.url: 0.0 for server in self.fleet.servers}
        counts, busy_s = self._call_for_log("metrics", without=({}, idle_s))
        of_servers = sync_metrics(reports, self.fleet) | server_metrics(self.fleet, busy_s, reports, step_s)
        return counts | of_servers | {"rollout/process_losses": self.losses}

    def log(self, step: int, advantages: list[list[float]]) -> None:
        self._call_for_log("log", step, self._chosen.pop(step), advantages, without=None)

    def state_dict(self, step: int) -> Buffer:
        if step not in self._states:
            return self._call("state", step)[1][0]
        process, is_new = self._process, self._losses_since_taken > 0
        if process is None or (is_new and max(self._states) != step):  # the one that is there began behind this step
            return self._states[step]
        try:
            return process.call("state", self._newest(), [step])[1][0]
        except (PlainError, RolloutError, ProcessLost, TimeoutError):
            return self._states[step]  # a step that was trained is saved

    def load_state_dict(self, state: Buffer | dict[str, Any] | None) -> None:
        assert state is not None
        as_bytes = msgspec.msgpack.encode(state) if isinstance(state, dict) else state  # of a checkpoint of before
        self._states = {self._newest(): as_bytes}
        self._call("load_state", file=as_bytes)

    def stop(self) -> None:
        self._stopping = True
        with self._changed:
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.tell("stop")

    def progress(self) -> object:
        process = self._process
        return self.losses, self._scored + (process.scored if process else 0)

    def describe(self) -> str:
        process = self._process
        return process.describe() if process else str(self._failure or "the rollout process is started again")

    def close(self) -> None:
        """End the process, which releases all it has opened. Bounded."""
        with self._changed:
            self._closed = True
            processes, self._process, self._beginning = (self._process, self._beginning), None, None
        for process in processes:
            if process is not None:
                process.close()

    # ---------------------------------------------------------------------------------------------- the process

    def _call(self, verb: str, *arguments: Any, file: Buffer | None = None) -> Reply:
        """See `RolloutProcess.call`. A process that is lost meanwhile is replaced, and the next one asked."""
        while True:
            process = self._running(verb)
            try:
                return process.call(verb, self._newest(), arguments, file)
            except ProcessLost:
                self._await_another(process)

    def _call_for_log(self, verb: str, *arguments: Any, without: Any) -> Any:
        """What a step's record gets; `without` if the run is to end and has no process: the step is logged all the
        same."""
        try:
            return self._call(verb, *arguments)[0]
        except Exception as error:
            if isinstance(error, StopRequested) or error is self._failure:
                return without
            raise

    def _await_another(self, process: RolloutProcess) -> None:
        """Its reader's thread is about to take it away."""
        with self._changed:
            self._changed.wait_for(lambda: self._process is not process, CLOSE_S)

    def _running(self, verb: str) -> RolloutProcess:
        """The process, as soon as there is one."""
        with self._changed:
            while self._process is None:
                if self._failure is not None:
                    raise self._failure
                if self._stopping and verb in _LAST:
                    raise StopRequested
                if self._closed:
                    raise ProcessLost("the rollout process is closed")
                self._changed.wait(1.0)  # starting it is bounded
            return self._process

    def _process_of_its_own(self) -> RolloutProcess:
        own = self.config.rollout.environment, *(each.environment for each in self.config.validation.sets)
        # An environment may want models of transformers, which must find torch when it is first imported.
        hides_torch = not set(own) - {"", ENDPOINT, NO_ENVIRONMENT}
        return RolloutProcess(self._on_event, self._on_end, patience_s(self.config), hides_torch)

    def _begun(self) -> RolloutProcess:
        """A new process, with all that an earlier one was told."""
        process = self._process_of_its_own()
        with self._changed:
            self._beginning = process
        try:
            if self._closed:
                raise ProcessLost("the run has ended")
            newest = self._newest()
            if self._is_prepared:
                process.call("prepare", newest, self._inputs())
            if self._has_started:
                process.call("start", newest)
            if self._layout is not None:
                process.call("connect", newest, astuple(self._layout))
            if self._states:
                process.call("load_state", newest, file=self._states[max(self._states)])
        except BaseException:
            process.close()
            raise
        return process

    def _inputs(self) -> list[Any]:
        """What the process gets first."""
        routes = astuple(self.source.routes) if self.source.routes else ()
        return [to_values(self.config), self.source.model_args.vocab_size, self.end_token_ids, routes]

    def _on_event(self, name: str, values: list[Any]) -> None:
        if name == "table" and self._metrics is not None:
            self._metrics.table(*values)
        elif name == "server" and self._teller is not None:
            self._teller.on_event(*values)
        elif name == "beat":  # what `Fleet.check` finds depends on time too
            self._tell_of_servers()

    def _on_end(self, process: RolloutProcess, how: str) -> None:
        """In the reader's thread of a process that has ended."""
        with self._changed:
            if process is not self._process or self._closed:
                return
            self._process = None
            self._scored += process.scored
        threading.Thread(target=self._replace, args=(how,), name="rollouts-restart", daemon=True).start()

    def _replace(self, how: str) -> None:
        began = time.monotonic()
        while not self._closed:
            self.losses += 1
            self._losses_since_taken += 1
            if self._losses_since_taken > LOSSES_MAX:
                times = f"{self._losses_since_taken} times in a row, without a step between"
                self._fail(PlainError(f"{how}. It has ended {times}"))
                return
            logger.warning("%s: the groups under way are lost, and another one takes its place", how)
            try:
                process = self._begun()
                logger.info("Rollouts go on after %.1f s, in process %d", time.monotonic() - began, process.pid)
                self._is_there(process)
                return
            except ProcessLost as error:
                how = str(error)
            except Exception as error:
                self._fail(error)
                return

    def _is_there(self, process: RolloutProcess) -> None:
        """It may be asked from now on."""
        if self._teller is not None:
            process.tell_made("servers", self._teller.whole)
        with self._changed:
            closed, self._process = self._closed, None if self._closed else process
            self._beginning = None
            self._changed.notify_all()
        if closed:
            process.close()
            return
        self._tell_of_servers()
        if self._stopping:
            process.tell("stop")
        if process.lost:  # before anybody would have been told
            self._on_end(process, process.lost)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------- the servers

    def _tell_of_servers(self) -> None:
        """There may be something that the process does not know. For any thread."""
        process, teller = self._process, self._teller
        if process is not None and teller is not None:
            process.tell_made("servers", teller.change)

    def _requests_in_flight(self, server: Server) -> int:
        return self._asked("requests_in_flight", server, lost=0, silent=1)

    def _versions_in_use(self, server: Server) -> set[int]:
        named = [server.version] if server.in_traffic else []
        return set(self._asked("versions_in_use", server, lost=named, silent=named))

    def _asked(self, question: str, server: Server, lost: Any, silent: Any) -> Any:
        """What the process says of a server, with all that it was told before. `lost` if there is none: servers end the
        requests of one that is gone. `silent` if it is frozen or blocked, which does not last."""
        process = self._process
        if process is None:
            return lost
        try:
            return process.ask(question, server.serial, limit_s=ASKED_S)
        except ProcessLost:
            return lost
        except TimeoutError:
            return silent

    def _server(self, url: str) -> Server:
        server = server_maker(self.config, self._newest, self.source.model_args.vocab_size)(url)
        server.client = None  # the process asks for answers
        recomputes = self.config.async_grpo.recomputes_kv
        needs = longest_tokens(self.config), self.end_token_ids[0], recomputes, self.source.identity
        server.check = lambda: server.control.check(*needs, routes=bool(self.source.routes))
        return server


def _cut(data: memoryview, sizes: Sequence[int]) -> list[Buffer]:
    """The parts that lie end to end in it."""
    ends = list(itertools.accumulate(sizes))
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
