"""Several turns: the environment answers each guess of a number with "higher" or "lower"."""

import re
from collections.abc import Iterator

import verifiers.v1 as vf

TURNS = 3


class Number(vf.TaskData):
    number: int


class GuessTask(vf.Task[Number]):
    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        found = re.findall(r"\d+", trace.last_reply)
        return 1 / (1 + abs(int(found[-1][:3]) - self.data.number)) if found else -float(len(trace.last_reply))


class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(20):
            yield GuessTask(Number(prompt="guess:", number=number, system_prompt="a number"), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(TURNS - 1):
                if segment.terminated:
                    break
                found = re.findall(r"\d+", segment.last_reply)
                higher = not found or int(found[-1][:3]) < task.data.number
                segment = await interaction.turn("higher:" if higher else "lower:")


__all__ = ["Guess", "GuessEnv"]
