"""A taskset of `verifiers`: sums of two numbers, and a rubric. train_configs/verifiers_sums.toml trains on it."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    largest: int = 39


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        numbers = range(self.config.largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers]
        random.Random(0).shuffle(pairs)
        for a, b in pairs:
            yield SumTask(Sum(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
