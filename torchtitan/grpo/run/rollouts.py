"""Rollouts as the trainer has them: the servers, and a process of its own that makes packed rows of prompts."""

import itertools
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
from torchtitan.grpo.run.kept_process import KeptProcess, OnEnd, OnEvent
from torchtitan.grpo.run.rollout_process import ProcessLost, RolloutError, RolloutProcess
from torchtitan.grpo.servers.own import OwnServers


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
    place, with the state of the newest step that was taken. That costs the groups that were under way.

    Args:
        resources: Closes what is opened, with the run.
    """

    def __init__(self, config: JobConfig, resources: ExitStack) -> None:
        self.config, self.resources = config, resources
        self._metrics: MetricsLogger | None = None
        self._chosen: dict[int, Any] = {}  # answers for the log, of steps that are taken and not logged yet
        self._states: dict[int, Buffer] = {}  # after steps, by step: of the two newest that were taken, or loaded
        self._process = KeptProcess(self._start_process, self._on_event)
        resources.callback(self._process.close)

    def prepare(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, end_token_ids: list[int]) -> None:
        self.source, self.tokenizer, self.end_token_ids = source, tokenizer, end_token_ids
        routes = astuple(source.routes) if source.routes else ()
        self._process.introduce("prepare", to_values(self.config), source.model_args.vocab_size, end_token_ids, routes)

    def start(self, own_servers: OwnServers) -> None:
        self.own_servers = own_servers
        self._process.introduce("start")
        own_servers.start(partial(write_hf_config, self.source, self.tokenizer))

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        process, rollout = self._process, self.config.rollout
        self.ledger, self._metrics, process.newest = ledger, metrics, newest
        self.fleet = fleet = self.own_servers.fleet(self._server)
        for server in fleet.servers:
            server.control.wait_healthy(rollout.start_timeout_seconds)
            server.check()
        self.check = SamplerCheck(self.config, fleet)
        self.resources.callback(process.close)  # before its servers
        process.introduce("connect", *astuple(layout))
        fleet.requests_in_flight, fleet.versions_in_use = process.requests_in_flight, process.versions_in_use
        process.follow(FleetTeller(fleet, process.tell_of_servers))

    def sleep(self) -> None:
        self.own_servers.sleep()

    def pairs(self) -> list[Buffer]:
        sizes, (rows, state) = self._process.call("pairs")
        if state:
            self._keep({0: state})
        return _cut(rows, sizes)

    def take(self, step: int) -> Taken:
        with self.ledger.stage("rollout"):
            value, (rows, state) = self._process.call("take", step)
            self.sleep()
        rewards, advantages, servers, metrics, documents, sizes, seconds, self._chosen[step] = value
        self._keep({taken: kept for taken, kept in self._states.items() if taken == step - 1} | {step: state})
        for name, spent_s in seconds.items():
            self.ledger.add(name, spent_s, out_of="rollout")
        parts = iter(_cut(rows, list(itertools.chain.from_iterable(sizes))))
        minibatches = [list(itertools.islice(parts, len(of_ranks))) for of_ranks in sizes]
        return Taken(rewards, advantages, servers, minibatches, documents, metrics)

    def is_ready(self) -> bool:
        return self._process.call("is_ready")[0]

    def validate(self, step: int) -> dict[str, float]:
        try:
            return self._process.call("validate", step)[0]
        except StopRequested:
            return {}

    def metrics(self, reports: list[SyncReport], step_s: float) -> dict[str, float]:
        assert self.fleet is not None
        idle_s = {server.url: 0.0 for server in self.fleet.servers}
        counts, busy_s = self._call_for_log("metrics", without=({}, idle_s))
        of_servers = sync_metrics(reports, self.fleet) | server_metrics(self.fleet, busy_s, reports, step_s)
        return counts | of_servers | {"rollout/process_losses": self._process.losses}

    def log(self, step: int, advantages: list[list[float]]) -> None:
        self._call_for_log("log", step, self._chosen.pop(step), advantages, without=None)

    def state_dict(self, step: int) -> Buffer:
        if step not in self._states:
            return self._process.call("state", step)[1][0]
        process, is_new = self._process.now, self._process.losses_in_a_row > 0
        if process is None or (is_new and max(self._states) != step):  # the one that is there began behind this step
            return self._states[step]
        try:
            return process.call("state", self._process.newest(), [step])[1][0]
        except (PlainError, RolloutError, ProcessLost, TimeoutError):
            return self._states[step]  # a step that was trained is saved

    def load_state_dict(self, state: Buffer | dict[str, Any] | None) -> None:
        assert state is not None
        as_bytes = msgspec.msgpack.encode(state) if isinstance(state, dict) else state  # of a checkpoint of before
        self._states = {self._process.newest(): as_bytes}
        self._process.state = as_bytes
        self._process.call("load_state", file=as_bytes)

    def stop(self) -> None:
        self._process.stop()

    def progress(self) -> object:
        return self._process.losses, self._process.scored

    def describe(self) -> str:
        return self._process.describe()

    def _keep(self, states: dict[int, Buffer]) -> None:
        """A step's groups are taken, or a batch of the warm start: another process would begin behind it."""
        self._states, self._process.state = states, states[max(states)]
        self._process.losses_in_a_row = 0

    def _call_for_log(self, verb: str, *arguments: Any, without: Any) -> Any:
        """What a step's record gets; `without` if the run is to end and has no process: the step is logged all the
        same."""
        try:
            return self._process.call(verb, *arguments)[0]
        except Exception as error:
            if isinstance(error, StopRequested) or error is self._process.failure:
                return without
            raise

    def _start_process(self, on_event: OnEvent, on_end: OnEnd) -> RolloutProcess:
        own = self.config.rollout.environment, *(each.environment for each in self.config.validation.sets)
        # An environment may want models of transformers, which must find torch when it is first imported.
        hides_torch = not set(own) - {"", ENDPOINT, NO_ENVIRONMENT}
        return RolloutProcess(on_event, on_end, patience_s(self.config), hides_torch)

    def _on_event(self, name: str, values: list[Any]) -> None:
        if name == "table" and self._metrics is not None:
            self._metrics.table(*values)

    def _server(self, url: str) -> Server:
        server = server_maker(self.config, self._process.newest, self.source.model_args.vocab_size)(url)
        server.client = None  # the process asks for answers
        recomputes = self.config.async_grpo.recomputes_kv
        needs = longest_tokens(self.config), self.end_token_ids[0], recomputes, self.source.identity
        server.check = lambda: server.control.check(*needs, routes=bool(self.source.routes))
        return server


def _cut(data: memoryview, sizes: Sequence[int]) -> list[Buffer]:
    """The parts that lie end to end in it."""
    ends = list(itertools.accumulate(sizes))
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
