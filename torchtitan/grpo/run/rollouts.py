"""Rollouts as the trainer has them: the servers, and a process of its own that makes packed rows of prompts."""

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.marker import complete_steps
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.job_config import NO_ENVIRONMENT
from torchtitan.grpo.config.share import Share, of_each, rollout_processes
from torchtitan.grpo.config.tables import check_lengths, longest_tokens
from torchtitan.grpo.config.values import to_values
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.registry import server_maker
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import ModelSource, write_hf_config
from torchtitan.grpo.policy.packing import Layout, packing_fractions
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.step_metrics import server_metrics, sync_metrics
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.rollouts.environment import ENDPOINT
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.rollouts.teachers.teachers import TEACHER_S
from torchtitan.grpo.run.broadcast import patience_s
from torchtitan.grpo.run.kept_process import KeptProcess, OnEnd, OnEvent
from torchtitan.grpo.run.kept_processes import KeptProcesses
from torchtitan.grpo.run.packed import Counted
from torchtitan.grpo.run.rollout_process import RolloutProcess
from torchtitan.grpo.servers.own import OwnServers
from torchtitan.tools.logging import logger


@dataclass
class Taken:
    """What a step trains on, as plain values and bytes on the host.

    Attributes:
        rewards, advantages: By group and sample. An answer without a reward is left out.
        servers: That sampled the answers; see `SamplerCheck.servers`.
        minibatches: The packed rows of each: of each process, by data rank, as `rows.encoded` has them. None for a
            process' rows on ranks other than 0.
        documents: What `Usage.work` takes; empty on ranks other than 0.
        metrics: Of rollouts and packing.
    """

    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: list[list[list[Buffer] | None]]
    documents: tuple[Any, ...]
    metrics: dict[str, float]


class Absent:
    """Rollouts on a rank that has none: every verb has nothing to do.

    Attributes:
        fleet: The servers; None here.
        check: Compares sampler and trainer; every rank calls it.
    """

    fleet: Fleet | None = None
    own_servers: OwnServers | None = None

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.check = SamplerCheck(config, None)

    def prepare(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, end_token_ids: list[int]) -> None:
        """Read data, and try rewards and environment: bad ones are refused before any GPU time is spent."""

    def start(self, own_servers: OwnServers) -> None:
        """Start the servers of `[rollout] replicas`: they load while the trainer loads its own weights."""
        self.own_servers = own_servers
        own_servers.start(None)

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        """Wait for the servers, check that they fit the trainer, and open what asks them.

        Args:
            ledger: It gets the seconds of `take`.
            layout: Of the rows that `take` packs.
            newest: The newest version that a server can have.
        """

    def sleep(self) -> None:
        """The trainers need the memory of the servers on their GPUs, see `OwnServers.sleep`."""

    def take_memory(self) -> None:
        """Rank 0 has put the servers to sleep, see `OwnServers.take_memory`."""
        if self.own_servers is not None:
            self.own_servers.take_memory()

    def pairs(self) -> list[Buffer] | None:
        """The next batch of the warm start: prompts with their reference answers, packed, by data rank."""
        return None

    def take(self, step: int) -> Taken:
        """What this step trains on. With `[async_grpo]` its rollouts began earlier.

        Raises:
            EngineError, FleetError, StopRequested, UserError: See `RolloutStream.take`.
        """
        shares: list[list[Buffer] | None] = [None] * rollout_processes(self.config)
        return Taken([], [], {}, [shares] * self.config.grpo.minibatches, (), {})

    def ask(self, url: str, version: int) -> list[Any]:
        """See `Rollouts.ask`."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether `take` returns the next step's batch without a wait for answers."""
        return False

    def validate(self, step: int) -> dict[str, float]:
        """Answer held-out prompts, greedily and sampled, by this step's weights or newer ones. {} if it is stopped, or
        left out in an outage."""
        return {}

    def metrics(self, reports: list[SyncReport], step_s: float) -> dict[str, float]:
        """Of groups, servers, and the pushes of weights that ended in a step of so many seconds."""
        return {}

    def log(self, step: int, advantages: list[list[float]]) -> None:
        """Write some of a step's answers to samples.jsonl, once it is trained."""

    def state_dict(self, step: int) -> Buffer | None:
        """What a run resumed after this step continues from."""
        return None

    def load_state_dict(self, state: Buffer | None) -> None:
        """Continue from `state_dict`."""

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

    With `[rollout] processes` there are several, with a share of the prompts each. All ask the same servers. A step
    takes and packs every process' share.

    Args:
        resources: Closes what is opened, with the run.
    """

    def __init__(self, config: JobConfig, resources: ExitStack) -> None:
        self.config, self.resources = config, resources
        self._metrics: MetricsLogger | None = None
        self._chosen: dict[int, Any] = {}  # answers for the log, of steps that are taken and not logged yet
        # After steps, by step: of the two newest that were taken, or loaded, and of each process.
        self._states: dict[int, list[Buffer]] = {}
        self._validation_worked = False  # the last one
        make = partial(KeptProcess, self._start_process, self._on_event)
        self._processes = KeptProcesses(make, rollout_processes(config))
        self._first = self._processes.each[0]
        resources.callback(self._processes.close)

    def prepare(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, end_token_ids: list[int]) -> None:
        logger.info("\n".join(self.read_task(source, tokenizer, end_token_ids)))

    def read_task(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, end_token_ids: list[int]) -> list[str]:
        """What `prepare` does, and logs."""
        self.source, self.tokenizer, self.end_token_ids = source, tokenizer, end_token_ids
        check_lengths(self.config, source.positions)
        routes = astuple(source.routes) if source.routes else ()
        count, dump = len(self._processes.each), self.config.job.dump_folder
        # An environment may go to another folder. A check has none.
        config = changed(of_each(self.config, count), {"job.dump_folder": dump and os.path.abspath(dump)})
        values = to_values(config), source.model_args.vocab_size, end_token_ids, routes
        shares = [astuple(Share(number, count)) for number in range(count)]
        lines = self._processes.map(lambda process, share: process.introduce("prepare", *values, share), shares)[0]
        checkpoint = self.config.checkpoint
        saved = checkpoint.resume and complete_steps(Path(self.config.job.dump_folder) / checkpoint.folder)
        if self.config.sft.steps and not saved:
            self._first.call("check_pairs")
        return lines

    def try_rewards(self) -> list[str]:
        """See `rewards.trial`. After `read_task`."""
        return self._first.call("try_rewards")[0]

    def start(self, own_servers: OwnServers) -> None:
        self.own_servers = own_servers
        self._processes.map(lambda process: process.introduce("start"))
        own_servers.start(partial(write_hf_config, self.source, self.tokenizer))

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        rollout = self.config.rollout
        self.ledger, self._metrics, self._newest = ledger, metrics, newest
        for process in self._processes.each:
            process.newest = newest
        self.fleet = fleet = self.own_servers.fleet(self._server)
        for server in fleet.servers:
            server.control.wait_healthy(rollout.start_timeout_seconds)
            server.check()
        self.check = SamplerCheck(self.config, fleet)
        self.resources.callback(self._processes.close)  # before its servers
        self._processes.map(lambda process: process.introduce("connect", *astuple(layout)))
        self._processes.follow(fleet)

    def sleep(self) -> None:
        self.own_servers.sleep()

    def pairs(self) -> list[Buffer]:
        replies = self._processes.call("pairs")
        states: list[Buffer] = [files[1] for _, files in replies]
        if all(states):
            self._keep({0: states})
        sizes, (rows, _) = replies[0]
        return _cut(rows, sizes)

    def take(self, step: int) -> Taken:
        with self.ledger.stage("rollout"):
            shares, metrics = self._shares(step)
            self.sleep()
        taken = Taken([], [], {}, [[] for _ in range(self.config.grpo.minibatches)], ([], [], 0), metrics)
        seconds, chosen = Counter[str](), self._chosen.setdefault(step, [])
        for (rewards, advantages, taken.servers, documents, sizes, spent_s, own_chosen), rows in shares:
            first = sum(len(group) for group in taken.advantages)
            chosen += [(first + number, record) for number, record in own_chosen]
            taken.rewards += rewards
            taken.advantages += advantages
            taken.documents = tuple(one + own for one, own in zip(taken.documents, documents, strict=True))
            seconds |= spent_s  # the longest: processes spend them at the same time
            parts = iter(_cut(rows, list(itertools.chain.from_iterable(sizes))))
            for minibatch, of_ranks in zip(taken.minibatches, sizes, strict=True):
                minibatch.append(list(itertools.islice(parts, len(of_ranks))))
        for name, spent in seconds.items():
            self.ledger.move(name, spent, out_of="rollout")
        return taken

    def ask(self, url: str, version: int) -> list[Any]:
        """What a server under suspicion answers, see `RolloutWorker.ask`."""
        return self._first.call("ask", url, version)[0]

    def is_ready(self) -> bool:
        return all(is_ready for is_ready, _ in self._processes.call("is_ready"))

    def validate(self, step: int) -> dict[str, float]:
        try:
            metrics, _ = self._first.call("validate", step, self._validation_worked)
        except StopRequested:
            return {}
        self._validation_worked = bool(metrics)  # here, since another process may be asked next
        return metrics

    def metrics(self, reports: list[SyncReport], step_s: float) -> dict[str, float]:
        assert self.fleet is not None
        replies = self._for_log(lambda: self._processes.call("metrics"), without=[])
        counts: defaultdict[str, float] = defaultdict(float)
        busy = defaultdict[str, list[list[float]]](list, {server.url: [] for server in self.fleet.servers})
        for (own_counts, own_busy), _ in replies:
            for name, count in own_counts.items():
                counts[name] += count
            for url, spans in own_busy.items():
                busy[url] += spans
        if waits := [own[TEACHER_S] for (own, _), _ in replies if TEACHER_S in own]:
            counts[TEACHER_S] = fmean(waits)  # the one that is no count
        of_servers = sync_metrics(reports, self.fleet) | server_metrics(self.fleet, busy, reports, step_s)
        return counts | of_servers | {"rollout/process_losses": self._processes.losses}

    def log(self, step: int, advantages: list[list[float]]) -> None:
        self._for_log(lambda: self._first.call("log", step, self._chosen.pop(step), advantages), without=None)

    def state_dict(self, step: int) -> Buffer:
        kept = self._states.get(step)
        if kept is None:
            states = [files[0] for _, files in self._processes.call("state", step)]
        else:
            states = self._processes.map(lambda process, own: process.state_after(step, own), kept)
        return states[0] if len(states) == 1 else msgspec.msgpack.encode({"shares": states})

    def load_state_dict(self, state: Buffer | None) -> None:
        assert state is not None
        states = msgspec.msgpack.decode(state).get("shares") or [state]
        if len(states) != len(self._processes.each):
            raise UserError(
                f"the checkpoint has the prompts of {len(states)} rollout processes, and this run has "
                f"{len(self._processes.each)}: set [rollout] processes = {len(states)}"
            )
        self._keep({self._newest(): states})
        self._processes.map(lambda process, own: process.call("load_state", file=[own]), states)

    def stop(self) -> None:
        self._processes.stop()
        self.own_servers.stop()

    def progress(self) -> object:
        return self._processes.losses, self._processes.scored

    def describe(self) -> str:
        return self._processes.describe()

    def _shares(self, step: int) -> tuple[list[tuple[Any, memoryview]], dict[str, float]]:
        """What each process says of its share and the rows of it, and metrics of all."""
        before = {taken: kept for taken, kept in self._states.items() if taken == step - 1}
        if len(self._processes.each) == 1:
            (*value, metrics), (rows, state) = self._first.call("take", step)
            self._keep(before | {step: [state]})
            return [(value, rows)], metrics
        counted = [value for value, _ in self._processes.call("take_share", step)]
        while True:
            totals = Counted.sum([Counted(*each) for each in counted]).values()
            replies = self._processes.call("pack_share", step, totals)
            known, counted = counted, [value[-1] for value, _ in replies]
            if counted == known:  # else a process that was lost has taken other groups
                break
        self._keep(before | {step: [files[1] for _, files in replies]})  # before the next call
        shares = [(value[:-2], files[0]) for value, files in replies]
        rewards = list(itertools.chain.from_iterable(value[0] for value, _ in shares))
        answers = [files[2] for _, files in replies]
        metrics, _ = self._first.call("metrics_of_shares", rewards, [len(part) for part in answers], file=answers)
        sums = [sum(of_shares) for of_shares in zip(*(value[-2] for value, _ in replies), strict=True)]
        return shares, metrics | packing_fractions(sums)

    def _keep(self, states: dict[int, list[Buffer]]) -> None:
        """A step's groups are taken, or a batch of the warm start: another process would begin behind it."""
        self._states = states
        self._processes.map(KeptProcess.keep, states[max(states)])

    def _for_log(self, call: Callable[[], Any], without: Any) -> Any:
        """What a step's record gets; `without` if the run is to end and has no process: the step is logged all the
        same."""
        try:
            return call()
        except Exception as error:
            if isinstance(error, StopRequested) or error is self._processes.failure:
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
        server = server_maker(self.config, self._newest, self.source.model_args.vocab_size)(url)
        server.client = None  # the process asks for answers
        server.check = partial(
            server.control.check,
            longest_tokens(self.config),
            self.end_token_ids[0],
            self.config.async_grpo.recompute_kv_cache_after_weight_updates,
            self.source.identity,
            routes=bool(self.source.routes),
            top_k=self.config.rollout.top_k,
            min_p=self.config.rollout.min_p,
            top_tokens=self.config.grpo.score_centering,
        )
        return server


def _cut(data: memoryview, sizes: Sequence[int]) -> list[Buffer]:
    """The parts that lie end to end in it."""
    ends = list(itertools.accumulate(sizes))
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
