"""Everything of a run that rank 0 alone owns: from prompts to packed rows, and the servers that answer.

It stands above rollouts/, environments/, endpoint/ and rewards/, and connects them.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchtitan.config import JobConfig
from torchtitan.grpo.config.batch import requests_at_once
from torchtitan.grpo.config.tables import longest_tokens
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.prompts import PromptSource, sft_pairs
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.endpoint.server import serve
from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.model.source import ModelSource, write_hf_config
from torchtitan.grpo.policy.advantages import reward_advantages
from torchtitan.grpo.policy.batch import has_signal, shaped_reward, split, supervised_samples, training_samples
from torchtitan.grpo.policy.packing import Layout, packing_metrics
from torchtitan.grpo.policy.rows import PackedRow
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.reporting.sample_log import SampleLog
from torchtitan.grpo.reporting.step_metrics import rollout_metrics, server_metrics, sync_metrics, validation_metrics
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.rollouts.record import RolloutRecord
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.rollouts.stream import RolloutStream
from torchtitan.grpo.rollouts.teachers.connect import connect_teachers
from torchtitan.grpo.servers.own import OwnServers

RowsByRank = list[list[PackedRow]]


@dataclass
class Taken:
    """What a step trains on, as plain values and rows on the host.

    Attributes:
        rewards, advantages: By group and sample. An answer without a reward is left out.
        servers: That sampled the answers; see `SamplerCheck.servers`.
        minibatches: The packed rows of each, by data rank. None on ranks other than 0.
        metrics: Of rollouts and packing.
    """

    rewards: list[list[float | None]]
    advantages: list[list[float]]
    servers: dict[str, bool]
    minibatches: Sequence[RowsByRank | None]
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

    def pairs(self) -> RowsByRank | None:
        """The next batch of the warm start: prompts with their reference answers, packed."""
        return None

    def take(self, step: int) -> Taken:
        """What this step trains on. With `[async_grpo]` its rollouts began earlier.

        Raises:
            EngineError, FleetError, StopRequested, UserError: See `RolloutStream.take`.
        """
        return Taken([], [], {}, [None] * self.config.grpo.minibatches, {})

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

    def state_dict(self, step: int) -> bytes | None:
        """What a run resumed after this step continues from."""
        return None

    def load_state_dict(self, state: bytes | dict[str, Any] | None) -> None:
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
    """Prompts, rewards, environments, teachers, servers, and the stream of groups between them. On rank 0.

    It is made before the process group: bad data, reward functions and environments are refused before any GPU time is
    spent.

    Args:
        resources: Closes what is opened, with the run.
    """

    def __init__(
        self,
        config: JobConfig,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: list[int],
        resources: ExitStack,
    ) -> None:
        self.config, self.source, self.tokenizer = config, source, tokenizer
        self.end_token_ids, self.resources = end_token_ids, resources
        self.vocab_size = source.model_args.vocab_size
        self._groups: dict[int, list[Group]] = {}  # of steps that are taken, and not logged yet
        rewards = RewardRunner(config.reward, config.rollout, config.distill, folder=config.job.dump_folder)
        self.rewards = resources.enter_context(rewards)
        self.environments = resources.enter_context(loaded_environments(config))
        rows, make = self.environments.rows, partial(PromptSource, vocab_size=self.vocab_size)
        self.held_out = load_held_out(config, tokenizer, make, rows) if config.validation.enable else []
        self.prompts = load_training(config, tokenizer, self.held_out, make, rows)
        self.rewards.check(self.prompts.first(2), refuse=not config.rollout.environment)

    def start(self, own_servers: OwnServers) -> None:
        self.own_servers = own_servers
        self.teachers = connect_teachers(self.config, self.tokenizer, self.vocab_size)
        own_servers.start(partial(write_hf_config, self.source, self.tokenizer))

    def connect(self, ledger: Ledger, layout: Layout, metrics: MetricsLogger, newest: Callable[[], int]) -> None:
        config, rollout, dump = self.config, self.config.rollout, self.config.job.dump_folder
        self.ledger, self.layout = ledger, layout
        self.record = RolloutRecord(rollout, dump)
        self.samples = SampleLog(config, dump, metrics, self.tokenizer)
        self.resources.callback(self.samples.close)
        self.fleet = self.own_servers.fleet(partial(self._server, newest))
        for server in self.fleet.servers:
            server.control.wait_healthy(rollout.start_timeout_seconds)
            server.check()
        self.check = SamplerCheck(config, self.fleet)
        self.collector = Collector(
            self.fleet,
            self.rewards,
            self.tokenizer,
            requests_at_once(rollout),
            rollout.request_timeout_seconds,
            self.environments,
            rollout.group_timeout_seconds,
        )
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
            layout.row_tokens,
        )

    def sleep(self) -> None:
        self.own_servers.sleep()

    def pairs(self) -> RowsByRank:
        prompts = self.prompts.next(self.config.sft.batch_size)
        column = self.config.sft.target_column
        documents = sft_pairs(prompts, self.config.data, column, self.tokenizer, self.vocab_size)
        return self.layout.pack(supervised_samples(documents))

    def take(self, step: int) -> Taken:
        with self.ledger.stage("rollout"):
            groups = self.stream.take(step - 1)
            self.sleep()
        self.ledger.add("reward", self.stream.take_scoring_seconds(), out_of="rollout")
        if self.config.rollout.record_gib:
            with self.ledger.stage("record"):
                self.record.write(step, groups)
        self._groups[step] = groups
        with self.ledger.stage("pack"):
            return packed(groups, step - 1, self.config, self.check, self.layout)

    def is_ready(self) -> bool:
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

    def metrics(self, reports: list[SyncReport], step_s: float) -> dict[str, float]:
        assert self.fleet is not None
        busy_s = self.collector.take_busy_seconds()
        of_servers = sync_metrics(reports, self.fleet) | server_metrics(self.fleet, busy_s, reports, step_s)
        return self.stream.metrics() | of_servers

    def log(self, step: int, advantages: list[list[float]]) -> None:
        self.samples.log(step, self._groups.pop(step), advantages)

    def state_dict(self, step: int) -> bytes:
        return self.stream.state_dict(step)

    def load_state_dict(self, state: bytes | dict[str, Any] | None) -> None:
        assert state is not None
        self.stream.load_state_dict(state)

    def stop(self) -> None:
        self.stream.stop()

    def progress(self) -> object:
        return self.rewards.scored

    def describe(self) -> str:
        assert self.fleet is not None
        return f"{self.fleet.describe()}\n  {self.collector.describe()}"

    def _server(self, newest: Callable[[], int], url: str) -> Server:
        rollout, source = self.config.rollout, self.source
        api_key = os.environ.get(rollout.api_key_env) if rollout.api_key_env else None
        timeouts = self.config.weight_sync.timeout_seconds, rollout.request_timeout_seconds
        lora = self.config.lora.enable
        server = make_server(rollout.engine, url, api_key, *timeouts, newest, self.vocab_size, lora)
        recomputes = self.config.async_grpo.recomputes_kv
        needs = longest_tokens(self.config), self.end_token_ids[0], recomputes, source.identity
        server.check = lambda: server.control.check(*needs, routes=bool(source.routes))
        return server

    def _sampling(self, n: int, temperature: float) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            n,
            temperature,
            rollout.max_answer_tokens,
            (*self.end_token_ids, *rollout.stop_token_ids),
            self.config.debug.seed or 0,
            stop=tuple(rollout.stop),
            routes=self.source.routes if temperature else None,  # held-out answers need none
            vocab_size=self.vocab_size,
        )


def packed(groups: list[Group], version: int, config: JobConfig, check: SamplerCheck, layout: Layout) -> Taken:
    """Rewards become advantages, and answers packed rows, of a step that trains weights of this version."""
    grpo, limit = config.grpo, config.rollout.max_answer_tokens
    rewards = [[shaped_reward(sample, grpo, limit) for sample in group] for group in groups]
    metrics = rollout_metrics(groups, rewards, version, config.async_grpo.max_age)
    advantages = reward_advantages(rewards, grpo, config.distill)
    servers = check.servers(groups, version)
    minibatches: list[RowsByRank] = []
    for part in split(len(groups), grpo.minibatches):
        # The sampler's log-probabilities meet a policy that the first minibatch has changed.
        compared = servers if not minibatches or grpo.proximal_logprobs == "recompute" else ()
        own = [groups[i] for i in part], [advantages[i] for i in part]
        token_servers = partial(check.token_servers, compared)
        minibatches.append(layout.pack(training_samples(*own, version, grpo, limit, token_servers, config.distill)))
    metrics |= packing_metrics(minibatches, layout.attention_tokens)
    return Taken(rewards, advantages, servers, minibatches, metrics)
