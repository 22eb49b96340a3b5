"""One turn: a sum. The reward is the share of digits in the answer, so that answers of a random model differ."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=2.0)
    async def digits(self, trace: vf.Trace) -> float:
        text = trace.last_reply
        return sum(character.isdigit() for character in text) / max(1, len(text))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 20


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for i in range(self.config.largest):
            yield SumTask(Sum(prompt=f"{i}+{i}=", answer=str(2 * i)), self.config.task)


__all__ = ["Sums"]
