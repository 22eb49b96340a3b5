"""Scoring of answers in worker processes, so that no reward function can stop a run.

A function that hangs, raises, ends its process or returns no number costs that one score: it counts as 0 and the
sample names the function. Each worker has a pipe of its own and sends every score by itself, so what hangs is known
exactly, is stopped after its own time limit, and nothing is scored twice.
"""

import contextlib
import math
import multiprocessing
import queue
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.samples import Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards.functions import BUILT_IN, answer_regex, resolve
from torchtitan.grpo.rewards.worker import Call, Score, serve
from torchtitan.tools.logging import logger

START_TIMEOUT_S = 120.0
"""Longest wait for a worker process to import its functions."""
CHUNK_SAMPLES = 16
"""Most samples in one message to a worker."""


class RewardRunner:
    """Scores answers by `[reward]` in worker processes. `score` may be called from several threads at once.

    Raises:
        UserError: A function is unknown or unfit, or the weights or the pattern do not fit.
    """

    def __init__(self, reward: Reward):
        self._names = list(reward.functions)
        self._weights = list(reward.weights) or [1.0] * len(self._names)
        self._timeout_s = reward.timeout_seconds
        self._pattern = reward.answer_pattern
        _check(reward)
        for name in self._names:
            resolve(name)
        self.failures: Counter[str] = Counter()
        """Failed scores of each function since the start."""
        self._lock = threading.Lock()
        self._workers = [Worker(self._names, self._pattern, self._timeout_s) for _ in range(reward.workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    def warm_up(self) -> None:
        """Wait until every worker process has imported its functions; bounded by START_TIMEOUT_S."""
        for worker in self._workers:
            worker.wait_ready()

    def score(self, samples: Sequence[Sample]) -> None:
        """Fill in `rewards`, `reward` and `reward_failures` of each sample.

        Blocks until all are scored: at most `timeout_seconds` for one score, in `workers` processes at a time, plus
        the start of a new process after each hang or crash.
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
            sample.rewards = {name: score.value for name, score in zip(self._names, own, strict=True)}
            sample.reward = sum(weight * score.value for weight, score in zip(self._weights, own, strict=True))
            failed = [(name, score.failure) for name, score in zip(self._names, own, strict=True) if score.failure]
            sample.reward_failures = [name for name, _ in failed]
            for name, failure in failed:
                self._count_failure(name, failure, sample)

    def _count_failure(self, name: str, failure: str, sample: Sample) -> None:
        with self._lock:
            self.failures[name] += 1
            count = self.failures[name]
        if math.log10(count).is_integer():  # 1st, 10th, 100th ...: a broken function must not flood the log
            where = f"prompt {sample.prompt.index}, answer {sample.text[:80]!r}"
            logger.warning("Reward %s failed (%d times so far) and counts as 0: %s; %s", name, count, failure, where)

    def close(self) -> None:
        """Stop the workers, whatever they are doing."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    """One process that computes scores, and is replaced when it hangs or dies. Used by one thread at a time."""

    def __init__(self, names: list[str], pattern: str, timeout_s: float):
        self._names, self._pattern, self._timeout_s = names, pattern, timeout_s
        self._closed = False
        self._lock = threading.Lock()  # start and stop come from different threads
        self._start()

    def run(self, calls: Sequence[Call]) -> list[Score]:
        """One score per call, in order. A call that hangs or ends the process fails; the others are scored."""
        if not self._process.is_alive():  # killed while it was idle, for example for its memory
            self._start()
        scores: list[Score] = []
        while len(scores) < len(calls):
            self.wait_ready()
            failure = self._exchange(calls, scores)
            if failure:
                scores.append(Score(0.0, failure))
                self._process.kill()
                self._start()
        return scores

    def _exchange(self, calls: Sequence[Call], scores: list[Score]) -> str:
        """Append scores as they come. Returns why the next one will not come, or "" when all have."""
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

    def wait_ready(self) -> None:
        """Wait for the process to have imported its functions.

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
        with self._lock:
            self._closed = True
            self._process.kill()
            self._process.join(timeout=5.0)

    def _start(self) -> None:
        """Spawned, not forked: a worker has neither the trainer's CUDA context nor its sockets."""
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise RuntimeError("The reward runner was closed while it scored")
            self._connection, theirs = context.Pipe()
            arguments = (theirs, self._names, self._pattern)
            self._process = context.Process(target=serve, args=arguments, name="reward", daemon=True)
            with _without_main():
                self._process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._ready = False


_MAIN_LOCK = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script from a process that is being spawned, which would import all of the trainer again."""
    with _MAIN_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _check(reward: Reward) -> None:
    names, weights = reward.functions, reward.weights
    if not names or len(set(names)) < len(names):
        raise UserError(f"[reward] functions = {names}: name at least one function, and each only once")
    if weights and len(weights) != len(names):
        raise UserError(f"[reward] weights = {weights}: give one weight for each of {names}, or none")
    if not all(math.isfinite(weight) for weight in weights):
        raise UserError(f"[reward] weights = {weights}: weights must be finite numbers")
    if reward.workers < 1 or not 0 < reward.timeout_seconds < math.inf:
        raise UserError("[reward] workers must be 1 or more and timeout_seconds over 0")
    answer_regex(reward.answer_pattern, "[reward] answer_pattern")
    if reward.answer_pattern and not BUILT_IN.keys() & set(names):
        raise UserError(
            f"[reward] answer_pattern = {reward.answer_pattern!r} is for built-in functions, and {names} names none: "
            "empty it (a function of your own gets the whole answer)"
        )
