"""What a rollout process does: everything from prompts to packed rows. It needs no torch.

`run/rollouts.py` is its other side, and `run/rollout_service.py` what lies between.
"""

import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.config.share import ALL, Share
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.prompts import PromptSource, sft_pairs
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import Document, Group, Prompt
from torchtitan.grpo.endpoint.server import serve
from torchtitan.grpo.engines.fleet_mirror import FleetMirror
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.registry import make_server, server_maker
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.batch import has_signal, supervised_samples
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.policy.rows import documents, encoded
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.channel import encoded as message
from torchtitan.grpo.process.random_numbers import seed_python
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.reporting.sample_log import SampleLog
from torchtitan.grpo.reporting.step_metrics import answer_metrics, validation_metrics
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rewards.trial import trial_lines
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.rollouts.questions import ASKED_S, ask, read_otherwise, recorded_prompts
from torchtitan.grpo.rollouts.record import RolloutRecord
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.rollouts.stream import RolloutStream
from torchtitan.grpo.rollouts.teachers.connect import connect_teachers
from torchtitan.grpo.run.packed import Counted, Packed

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)

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

    Of several processes, each has its share of every step's groups, and packs it.

    It is made before the trainer's process group: bad data, reward functions and environments are refused before any
    GPU time is spent. Then come `start`, `connect`, and every other verb as often as it is wanted. A verb returns a
    MessagePack value, and files where it has large bytes.

    Args:
        resources: Closes what is opened.
        event: Tells the trainer something, by name and values. It never waits.
        share: Of the prompts.
    """

    def __init__(
        self,
        config: "JobConfig",
        tokenizer: PreTrainedTokenizerBase,
        model: Model,
        resources: ExitStack,
        event: Event = lambda *_: None,
        share: Share = ALL,
    ) -> None:
        self.config, self.tokenizer, self.model, self.resources = config, tokenizer, model, resources
        self._event, self._share = event, share
        self.newest = 0
        """The newest version that a server can have, before the trainer calls again."""
        self.stream: RolloutStream | None = None
        # Of a share: step, groups, seconds, and what the other shares need of it.
        self._held: tuple[int, list[Group], dict[str, float], Counted] | None = None
        self._prompts: dict[str, list[list[int]]] = {}  # of the newest step, by server
        rewards = RewardRunner(config.reward, config.rollout, config.distill, folder=config.job.dump_folder)
        self.rewards = resources.enter_context(rewards)
        self.environments = resources.enter_context(loaded_environments(config))
        rows, make = self.environments.rows, partial(PromptSource, vocab_size=model.vocab_size)
        self.held_out = load_held_out(config, tokenizer, make, rows) if config.validation.enable else []
        self.prompts = load_training(config, tokenizer, self.held_out, make, rows)
        self.rewards.check(self.prompts.first(2), refuse=not config.rollout.environment)

    @property
    def scored(self) -> int:
        """It grows as long as answers get rewards, from functions or from the environment. For any thread."""
        return self.rewards.scored + (0 if self.stream is None else self.collector.ended)

    def try_rewards(self) -> list[str]:
        """Lines about the rewards of a right, a wrong and an empty answer."""
        return trial_lines(self.config, self.rewards, self.prompts.first(2))

    def check_pairs(self) -> None:
        """Refuse a row of the warm start that has no target, or one that is too long, before anything is trained."""
        sft, state, blank = self.config.sft, self.prompts.state_dict(), 0
        passes = math.inf if self.config.data.mixture else math.ceil(len(self.prompts) / sft.batch_size)
        for _ in range(min(sft.steps, passes)):  # all rows of one source, or all that a mixture draws
            blank += sum(pair.trained.sum() == 1 for pair in self._pairs(self.prompts.next(sft.batch_size)))
        self.prompts.load_state_dict(state)
        if blank:
            logger.warning(f"The warm start learns to say nothing on {blank} rows: their targets are null or empty")

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
        self.collector = Collector(self.fleet, self.rewards, self.tokenizer, rollout, self.environments)
        self.resources.callback(self.collector.close)
        serve(config, self.collector)
        self.stream = RolloutStream(
            self.collector,
            self.prompts,
            self._sampling(config.grpo.group_size, rollout.temperature),
            config,
            lambda group: has_signal(group, config.grpo, rollout.max_answer_tokens, config.distill),
            self.teachers,
            self.layout.row_tokens,
            self._share,
        )

    def pairs(self) -> tuple[Any, Files]:
        """The next batch of the warm start, packed: one file with each rank's rows, and one with the state. It is the
        same for all shares, and the first one has it."""
        prompts = self.prompts.next(self.config.sft.batch_size)
        if self._share.number:
            return [], [[], self._state()]
        parts = encoded(self.layout.pack(supervised_samples(self._pairs(prompts))))
        return [len(part) for part in parts], [parts, self._state()]

    def _pairs(self, prompts: list[Prompt]) -> list[Document]:
        column, longest = self.config.sft.target_column, self.config.training.seq_len
        return sft_pairs(prompts, self.config.data, column, self.tokenizer, self.model.vocab_size, longest)

    def take(self, step: int) -> tuple[Any, Files]:
        """What this step trains on: see `rollouts.Taken`, one file with the rows of each minibatch and rank, and one
        with the state after it."""
        groups, seconds = self._groups(step)
        packed, value, rows = self._packed(step, groups, seconds, self._counted(step, groups))
        return [*value, packed.metrics(self.config.async_grpo.max_age)], [rows, self._state()]

    def take_share(self, step: int) -> list[Any]:
        """This process' part of the step's groups, for `pack_share`. Returns what the others need of it."""
        groups, seconds = self._groups(step)
        self._held = step, groups, seconds, self._counted(step, groups)
        return self._held[3].values()

    def pack_share(self, step: int, totals: list[Any]) -> tuple[Any, Files]:
        """`take` of these groups, without metrics. A third file has what `metrics_of_shares` asks of the answers.

        A process that has taken the place of another one takes groups here. They may differ from that one's, so what
        the others need of them is returned again.

        Args:
            totals: Of all shares, what `take_share` has returned.
        """
        if self._held is None or self._held[0] != step:
            self.take_share(step)
        assert self._held is not None
        _, groups, seconds, counted = self._held
        packed, value, rows = self._packed(step, groups, dict(seconds), Counted(*totals))
        files: Files = [rows, self._state(), [message(packed.answers)]]
        return [*value, packed.sums, counted.values()], files

    def metrics_of_shares(self, rewards: list[list[float | None]], sizes: list[int], answers: memoryview) -> Any:
        """Of the answers of all shares, which lie end to end."""
        ends = itertools.accumulate(sizes)
        parts = [msgspec.msgpack.decode(answers[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        return answer_metrics(list(itertools.chain.from_iterable(parts)), rewards, self.config.async_grpo.max_age)

    def _groups(self, step: int) -> tuple[list[Group], dict[str, float]]:
        assert self.stream is not None
        groups = self.stream.take(step - 1)
        self._prompts = recorded_prompts(groups)
        self.newest = max(self.newest, step)  # it is trained and published, and the next call may come later
        seconds = {"reward": self.stream.take_scoring_seconds()}
        if self.config.rollout.record_gib:
            began = time.monotonic()
            self.record.write(step, groups)
            seconds["record"] = time.monotonic() - began
        return groups, seconds

    def _counted(self, step: int, groups: list[Group]) -> Counted:
        return Counted.of(groups, step - 1, self.config, self.check)

    def _packed(
        self, step: int, groups: list[Group], seconds: dict[str, float], totals: Counted
    ) -> tuple[Packed, list[Any], list[Buffer]]:
        began = time.monotonic()
        packed = Packed.of(groups, step - 1, self.config, self.check, self.layout, totals)
        parts = [encoded(rows_by_rank) for rows_by_rank in packed.minibatches]
        sizes = [[len(part) for part in of_ranks] for of_ranks in parts]
        seconds["pack"] = time.monotonic() - began
        value = [
            packed.rewards,
            packed.advantages,
            packed.servers,
            documents(packed.minibatches),
            sizes,
            seconds,
            self.samples.chosen(step, groups),
        ]
        return packed, value, list(itertools.chain.from_iterable(parts))

    def ask(self, url: str, version: int) -> list[Any]:
        """What the server at this address answers to the questions of a server under suspicion, see `questions.ask`,
        and what its tokenizer reads otherwise.

        Raises:
            EngineError, UserError: It does not answer.
        """
        rollout, lora = self.config.rollout, self.config.lora
        key = os.environ.get(rollout.api_key_env) if rollout.api_key_env else None
        limits = ASKED_S, ASKED_S, None, self.model.vocab_size
        server = make_server(rollout.engine, url, key, *limits, lora.enable)
        prompts = self._prompts.get(url) or [prompt.token_ids for prompt in self.prompts.first(2)]
        asked = ask(server, version, prompts, self._sampling(1, rollout.temperature), key)
        return [asked, read_otherwise(server, self.tokenizer, prompts)]

    def is_ready(self) -> bool:
        assert self.stream is not None
        return self.stream.is_ready()

    def validate(self, step: int, has_worked: bool) -> dict[str, float]:
        """Metrics of the held-out answers. {} if the run is asked to stop, or if too many answers have no reward and
        the last validation `has_worked`: an outage costs no run.

        Raises:
            UserError: It has not.
        """
        config = self.config
        with suppress(StopRequested):
            # It waits for servers that do not have this version yet.
            alone = not config.async_grpo.enabled and not config.grpo.oversampling
            answers = answer_held_out(self.collector, self.held_out, self._sampling(1, 0.0), step, alone)
            self.samples.log_validation(step, answers)
            try:
                check_failures([group for each in answers for group in each.groups], config.reward.max_failed_fraction)
            except UserError as error:
                if not has_worked:
                    raise
                logger.error("Step %d has no validation: %s", step, error)
                return {}
            return validation_metrics(answers, config.reward)
        return {}

    def metrics(self) -> list[Any]:
        """Counts of groups, and when each server had a request since the last call."""
        assert self.stream is not None
        self._held = None  # they are packed
        return [self.stream.metrics(), self.collector.take_busy_spans()]

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
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            kept=rollout.top_k > 0 and temperature > 0,
            routes=self.model.routes if temperature else None,  # held-out answers need none
            top_tokens=self.config.grpo.score_centering if temperature else 0,
            vocab_size=self.model.vocab_size,
        )
