"""Answers are scored in worker processes, so that no reward function can stop a run.

A function may hang, raise, end its process, return no number or one that overflows. It then costs one answer: it has no
reward, and the sample names the function. Each worker has its own pipe and sends every call's scores by themselves. So
the call that hangs is known exactly and stopped after its own time limit, and nothing is scored twice.

Coroutines run at the same time, so which of them blocks or ends the process is not known at first. Those that are left
are then called again, one by one. The same holds for functions of this package that compute and do nothing else: a
worker sends their scores in one message. If all functions are instant (`functions.is_instant`), the caller's thread
computes them and no worker starts.
"""

import contextlib
import logging
import math
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan.grpo.config.job_config import Distill, Reward, Rollout
from torchtitan.grpo.data.samples import REWARD_MAX, Prompt, Sample
from torchtitan.grpo.errors import UserError, shown
from torchtitan.grpo.process.import_path import is_async, source
from torchtitan.grpo.rewards.functions import is_instant, is_safe, resolve, takes_group
from torchtitan.grpo.rewards.process import RewardWorker, WorkerLog
from torchtitan.grpo.rewards.worker import SECRET, Call, Function, Score

logger = logging.getLogger(__name__)

LOG = "rewards.log"
CHUNK_SAMPLES = 16
"""Maximum number of samples in one message to a worker, unless functions take a group or are awaited."""
ODD_ANSWERS = ("", "I do not know.")
"""What `RewardRunner.check` tries besides reference answers."""


class RewardRunner:
    """Scores answers by `[reward]`, in worker processes if need be. Several threads may call `score` at once.

    Args:
        reward: The `[reward]` section, which `load_config` has checked.
        with_keys: Sections such as `[rollout]`. Functions do not get the variables that `..._key_env` there names.
        folder: Where LOG gets what functions write to stdout and stderr. "" leaves it where this process's goes.

    Raises:
        UserError: A function cannot be found, or does not take an answer and a prompt.
    """

    def __init__(self, reward: Reward, *with_keys: Rollout | Distill, folder: str = ""):
        self._names = list(reward.functions)
        self._weights = list(reward.weights) or [1.0] * len(self._names)
        self._functions = [resolve(name) for name in self._names]
        self._takes_group = [takes_group(function) for function in self._functions]
        self._is_async = [is_async(function) for function in self._functions]
        self._has_pattern = bool(reward.answer_pattern)
        self._all_safe = all(is_safe(name, reward.answer_pattern) for name in self._names)
        self.failures: Counter[str] = Counter()
        """Number of failed scores of each function since the start."""
        self.scored = 0
        """Number of scored answers since the start."""
        self._lock = threading.Lock()
        own = {value for keys in with_keys for name, value in vars(keys).items() if name.endswith("_key_env")}
        secrets = {name for name in os.environ if SECRET.search(name)} | own
        hidden = sorted(secrets - set(reward.secrets))
        self._here = Here(self._names) if not self._has_pattern and all(map(is_instant, self._names)) else None
        self._log = WorkerLog(Path(folder) / LOG if folder and not self._here else None)
        workers = 0 if self._here else reward.workers
        self._workers = [RewardWorker(reward, self._is_async, hidden, self._log) for _ in range(workers)]
        self._idle: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    @property
    def scores_groups(self) -> bool:
        """A function gets the answers of a group at once."""
        return any(self._takes_group)

    def check(self, prompts: Sequence[Prompt], refuse: bool = True) -> None:
        """Call each function on those of these rows that it scores until it gives a score.

        It gets each prompt's reference answer first, then ODD_ANSWERS: a function that can score any answer passes.
        This is for the start, before anything depends on the functions.

        Args:
            refuse: False only logs what failed. An environment's conversations may look unlike these answers.

        Raises:
            UserError: Functions gave no score at all. The message has the place of each in the user's code, what it
                returned or raised, and what to change. Or a worker process could not start.
        """
        if not self._names:
            return
        with self._scorer() as scorer:
            if isinstance(scorer, RewardWorker):
                scorer.require()
            problems = [problem for i in range(len(self._names)) if (problem := self._problem(scorer, i, prompts))]
        if problems and refuse:
            raise UserError("\n".join(problems))
        for problem in problems:
            logger.warning("%s", problem)

    @contextlib.contextmanager
    def _scorer(self) -> "Iterator[RewardWorker | Here]":
        """A worker that no other thread uses, if there are workers. Waits for one."""
        if self._here:
            yield self._here
            return
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def _problem(self, scorer: "RewardWorker | Here", function: int, prompts: Sequence[Prompt]) -> str:
        """What is wrong with a function that gives no score on its rows; "" if it gives one, or if none is its own."""
        prompts = [prompt for prompt in prompts if function in self._functions_of(prompt)]
        if not prompts:
            return ""
        if self._takes_group[function]:
            calls = [Call(function, [prompt.answer, *ODD_ANSWERS], prompt) for prompt in prompts]
        else:
            pairs = [(p.answer, p) for p in prompts] + [(text, p) for text in ODD_ANSWERS for p in prompts]
            calls = [Call(function, [text], prompt, is_final=True) for text, prompt in pairs]
        failures = []
        for call in calls:
            (scores,) = scorer.run([call])
            failures += [score.failure for score in scores]
            if not all(failures):
                return ""
        name, prompt = self._names[function], calls[0].prompt
        place = source(self._functions[function]) if ":" in name else ""
        problem = (
            f'[reward] functions: "{name}"{place and f" ({place})"} gave no score to any of {len(failures)} answers. '
            f"On {shown(calls[0].texts[0])} as the answer to prompt {prompt.index} it {failures[0]}"
        )
        if failures[0].startswith("raised"):
            problem += f". Return 0 for a wrong answer; prompt.columns has {list(prompt.columns)}"
        return problem

    def score(self, samples: Sequence[Sample]) -> None:
        """Fill in `rewards`, `reward` and `reward_failures` of each sample, by the functions of its prompt.

        Blocks until all are scored. One score takes at most `timeout_seconds`, and `workers` processes work at a time.
        A hang or crash adds the start of a new process; answers fail if it does not start again.

        Args:
            samples: Of one group, if a function takes a group. One process awaits coroutines for all of them.

        Raises:
            RuntimeError: The runner was closed.
        """
        if not self._names:
            for sample in samples:
                sample.reward_failures = {"environment": "gave no reward, and [reward] functions is empty"}
            return
        if self._here:
            self._score_chunk(list(samples))
            return
        chunk = len(samples)
        if not self.scores_groups and not any(self._is_async):
            chunk = CHUNK_SAMPLES if self._all_safe else min(CHUNK_SAMPLES, -(-chunk // len(self._workers)))
        chunks = [list(samples[i : i + chunk]) for i in range(0, len(samples), chunk or 1)]
        if len(chunks) == 1:  # the caller would only wait for another thread
            self._score_chunk(chunks[0])
            return
        for _ in self._threads.map(self._score_chunk, chunks):
            pass

    def find_finals(self, samples: Sequence[Sample]) -> None:
        """Fill in `final` of each sample that has a reward, by `[reward] answer_pattern`, if there is one.

        Blocks as `score` does: a search takes at most `timeout_seconds`, and finds nothing if it needs more.

        Raises:
            RuntimeError: The runner was closed.
        """
        scored = [sample for sample in samples if sample.reward is not None] if self._has_pattern else []
        chunks = [scored[i : i + CHUNK_SAMPLES] for i in range(0, len(scored), CHUNK_SAMPLES)]
        for _ in self._threads.map(self._find_chunk, chunks):
            pass

    def _find_chunk(self, samples: list[Sample]) -> None:
        with self._scorer() as scorer:
            results = scorer.run([Call(len(self._names), [sample.text], sample.prompt) for sample in samples])
        for sample, (score,) in zip(samples, results, strict=True):
            sample.final = score.final

    def _score_chunk(self, samples: list[Sample]) -> None:
        calls = []
        for i in range(len(self._names)):
            own = [sample for sample in samples if i in self._functions_of(sample.prompt)]
            if own and self._takes_group[i]:
                calls.append(Call(i, [sample.text for sample in own], own[0].prompt))
            else:
                calls += [Call(i, [sample.text], sample.prompt) for sample in own]
        with self._scorer() as scorer:
            results = scorer.run(calls)
        by_function: list[list[Score]] = [[] for _ in self._names]
        for call, scores in zip(calls, results, strict=True):
            by_function[call.function] += scores
        left = [iter(scores) for scores in by_function]
        for sample in samples:
            self._fill_in(sample, {i: next(left[i]) for i in self._functions_of(sample.prompt)})
        with self._lock:
            self.scored += len(samples)

    def _functions_of(self, prompt: Prompt) -> list[int]:
        """Indices of the functions that score a prompt's answers: those that it names, else all."""
        return [i for i, name in enumerate(self._names) if not prompt.functions or name in prompt.functions]

    def _fill_in(self, sample: Sample, scores: dict[int, Score]) -> None:
        failures = {self._names[i]: score.failure for i, score in scores.items() if score.failure}
        parts = {i: self._weights[i] * score.value for i, score in scores.items()}
        if not abs(sum(parts.values())) <= REWARD_MAX:  # it may be NaN: inf - inf
            worst = max(parts, key=lambda i: abs(parts[i]))
            value, weight = scores[worst].value, self._weights[worst]
            failures[self._names[worst]] = f"returned {value:g}, which with its weight {weight:g} is over float32"
        values = {self._names[i]: score.value for i, score in scores.items()}
        sample.rewards = {name: value for name, value in values.items() if name not in failures}
        sample.reward_failures = failures
        sample.reward = None if failures else sum(parts.values())
        for name, failure in failures.items():
            self._count_failure(name, failure, sample)

    def _count_failure(self, name: str, failure: str, sample: Sample) -> None:
        with self._lock:
            self.failures[name] += 1
            count = self.failures[name]
        if math.log10(count).is_integer():  # 1st, 10th, 100th ...: a broken function does not flood the log
            where = f"prompt {sample.prompt.index}, answer {sample.text[:80]!r}"
            message = "Reward %s failed (%d times so far), and the answer is left out: %s; %s"
            logger.warning(message, name, count, failure, where)

    def close(self) -> None:
        """Kill the workers, even while they score."""
        for worker in self._workers:
            worker.stop()
        self._log.close()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Here:
    """Computes scores in the calling thread."""

    def __init__(self, names: list[str]) -> None:
        self._functions = [Function(name, "", 0.0) for name in names]

    def run(self, calls: Sequence[Call]) -> list[list[Score]]:
        """The scores of each call, in order."""
        return [self._functions[call.function].scores(call) for call in calls]
