"""Fails in the ways that environments do: by the task's number it raises, hangs, or blocks its event loop."""

import asyncio
import time
from collections.abc import Iterator

import verifiers.v1 as vf


class BrokenTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        match self.data.name:
            case "raises":
                raise ConnectionError("no judge today")
            case "hangs":
                await asyncio.Event().wait()
            case "blocks":
                time.sleep(1.5)
        return float(len(trace.last_reply))


class Broken(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    def load(self) -> Iterator[BrokenTask]:
        for name in ("fine", "raises", "hangs", "fine", "blocks"):
            yield BrokenTask(vf.TaskData(prompt="say:", name=name), self.config.task)


__all__ = ["Broken"]
