"""Answers are scored in worker processes, so that no reward function can stop a run.

A function may hang, raise, end its process, return no number or one that overflows. It then costs one score: the score
is 0, and the sample names the function. Each worker has its own pipe and sends every score by itself. So the call that
hangs is known exactly and stopped after its own time limit, and nothing is scored twice.
"""

import contextlib
import math
import multiprocessing
import os
import queue
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torchtitan_overlay
from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.samples import Sample
from torchtitan.grpo.rewards.functions import resolve
from torchtitan.grpo.rewards.worker import SECRET, Call, Score, serve
from torchtitan.tools.logging import logger

START_TIMEOUT_S = 120.0
"""Longest wait for a worker process to import its functions."""
REWARD_MAX = 1e38
"""Largest weighted sum of an answer's scores. Advantages are float32, and the difference of two rewards must fit."""
CHUNK_SAMPLES = 16
"""Maximum number of samples in one message to a worker."""


class RewardRunner:
    """Scores answers by `[reward]` in worker processes. Several threads may call `score` at once.

    Args:
        reward: The `[reward]` section, which `load_config` has checked.
        api_key_env: `[rollout] api_key_env`, a variable that the functions do not get.

    Raises:
        UserError: A function cannot be found, or does not take an answer and a prompt.
    """

    def __init__(self, reward: Reward, api_key_env: str = ""):
        self._names = list(reward.functions)
        self._weights = list(reward.weights) or [1.0] * len(self._names)
        for name in self._names:
            resolve(name)
        self.failures: Counter[str] = Counter()
        """Number of failed scores of each function since the start."""
        self.scored = 0
        """Number of scored answers since the start."""
        self._lock = threading.Lock()
        secrets = {name for name in os.environ if SECRET.search(name)} | {api_key_env}
        hidden = sorted(secrets - set(reward.secrets))
        self._workers = [
            RewardWorker(self._names, reward.answer_pattern, reward.timeout_seconds, hidden)
            for _ in range(reward.workers)
        ]
        self._idle: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    def score(self, samples: Sequence[Sample]) -> None:
        """Fill in `rewards`, `reward` and `reward_failures` of each sample.

        Blocks until all are scored. One score takes at most `timeout_seconds`, and `workers` processes work at a time.
        A hang or crash adds the start of a new process, at most START_TIMEOUT_S.

        Raises:
            RuntimeError: A worker process could not start, or the runner was closed.
        """
        chunk = min(CHUNK_SAMPLES, -(-len(samples) // len(self._workers)))
        chunks = [samples[i : i + chunk] for i in range(0, len(samples), chunk or 1)]
        for _ in self._threads.map(self._score_chunk, chunks):
            pass

    def _score_chunk(self, samples: Sequence[Sample]) -> None:
        calls = [Call(i, sample.text, sample.prompt) for sample in samples for i in range(len(self._names))]
        worker = self._idle.get()
        try:
            scores = worker.run(calls)
        finally:
            self._idle.put(worker)
        for k, sample in enumerate(samples):
            own = scores[k * len(self._names) : (k + 1) * len(self._names)]
            sample.reward = self._weighted_sum(own)
            sample.rewards = {name: score.value for name, score in zip(self._names, own, strict=True)}
            failed = [(name, score.failure) for name, score in zip(self._names, own, strict=True) if score.failure]
            sample.reward_failures = [name for name, _ in failed]
            for name, failure in failed:
                self._count_failure(name, failure, sample)
        with self._lock:
            self.scored += len(samples)

    def _weighted_sum(self, scores: list[Score]) -> float:
        """Sum of an answer's scores. While it is over REWARD_MAX, its largest part becomes a failure, in `scores`."""
        parts = [weight * score.value for weight, score in zip(self._weights, scores, strict=True)]
        while not abs(sum(parts)) <= REWARD_MAX:  # it may be NaN: inf - inf
            worst = max(range(len(parts)), key=lambda i: abs(parts[i]))
            failure = (
                f"returned {scores[worst].value:g}, which with its weight {self._weights[worst]:g} is over float32"
            )
            scores[worst], parts[worst] = Score(0.0, failure), 0.0
        return sum(parts)

    def _count_failure(self, name: str, failure: str, sample: Sample) -> None:
        with self._lock:
            self.failures[name] += 1
            count = self.failures[name]
        if math.log10(count).is_integer():  # 1st, 10th, 100th ...: a broken function does not flood the log
            where = f"prompt {sample.prompt.index}, answer {sample.text[:80]!r}"
            logger.warning("Reward %s failed (%d times so far) and counts as 0: %s; %s", name, count, failure, where)

    def close(self) -> None:
        """Kill the workers, even while they score."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RewardWorker:
    """One process that computes scores. It is replaced when it hangs or dies. Only one thread uses it at a time."""

    def __init__(self, names: list[str], pattern: str, timeout_s: float, hidden: list[str]):
        self._names, self._pattern, self._timeout_s, self._hidden = names, pattern, timeout_s, hidden
        self._closed = self._ready = False
        self._lock = threading.Lock()  # start and stop come from different threads
        self._start()

    def run(self, calls: Sequence[Call]) -> list[Score]:
        """One score per call, in order. A call that hangs or ends the process fails; the others are scored."""
        if not self._process.is_alive():  # killed while it was idle, for example by the OOM killer
            self._start()
        scores: list[Score] = []
        while len(scores) < len(calls):
            self._wait_ready()
            failure = self._exchange(calls, scores)
            if failure:
                scores.append(Score(0.0, failure))
                self._process.kill()
                self._start()
        return scores

    def _exchange(self, calls: Sequence[Call], scores: list[Score]) -> str:
        """Append scores as they arrive. Returns why the next one will not arrive, or "" after the last."""
        try:
            self._connection.send(calls[len(scores) :])
            while len(scores) < len(calls):
                if not self._connection.poll(self._timeout_s):
                    return f"took longer than [reward] timeout_seconds = {self._timeout_s}"
                scores.append(self._connection.recv())
        except (EOFError, ConnectionError):
            self._process.join(timeout=5.0)
            return f"its process ended with exit code {self._process.exitcode}"
        return ""

    def _wait_ready(self) -> None:
        """Wait until the process has imported its functions.

        Raises:
            RuntimeError: It ended, or took longer than START_TIMEOUT_S.
        """
        if self._ready:
            return
        what = f"the reward worker that imports {self._names}"
        if not self._connection.poll(START_TIMEOUT_S):
            raise RuntimeError(f"Waited {START_TIMEOUT_S} s for {what}")
        try:
            self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(timeout=5.0)
            raise RuntimeError(f"Exit code {self._process.exitcode} of {what}; its output says why") from error
        self._ready = True

    def stop(self) -> None:
        """Kill the process for good."""
        with self._lock:
            self._closed = True
            self._process.kill()
            self._process.join(timeout=5.0)

    def _start(self) -> None:
        """Spawn the process. A fork would inherit the trainer's CUDA context and sockets."""
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise RuntimeError("The reward runner was closed while it scored")
            self._connection, theirs = context.Pipe()
            arguments = (theirs, self._names, self._pattern, self._hidden)
            self._process = context.Process(target=serve, args=arguments, name="reward", daemon=True)
            with _without_main():
                self._process.start()
            theirs.close()  # so that the pipe ends with the process
            self._ready = False


_MAIN_LOCK = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script from a spawned process, which would import the whole trainer again.

    What the process imports first is `torchtitan_overlay` instead.
    """
    with _MAIN_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.modules["__main__"].__spec__ = torchtitan_overlay.__spec__
        try:
            yield
        finally:
            sys.modules["__main__"] = main
