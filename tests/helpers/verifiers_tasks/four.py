"""Three tasksets and an OpenEnv server as one environment, so that one run trains on all of them."""

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.environments.openenv import OpenEnvEnvironment
from torchtitan.grpo.environments.verifiers_v1 import VerifiersEnvironment
from torchtitan.grpo.rollouts.environment import RolloutClient

TASKSETS = ("sums", "lookup", "guess")


class Four:
    per_sample = True

    def __init__(self, limit: int, openenv: str) -> None:
        short = {"select": {"limit": limit}, "agent": {"sampling": {"max_tokens": 10}}}
        self._tasksets = {
            name: VerifiersEnvironment(f"tests.helpers.verifiers_tasks.{name}", {}, **short) for name in TASKSETS
        }
        counting = OpenEnvEnvironment(openenv, {}, prompt="say:", observation="text", episodes=1)
        self._each = self._tasksets | {"openenv": counting}
        self.rows = [row | {"of": name} for name, each in self._each.items() for row in each.rows]

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return await self._each[prompt.columns["of"]](client, prompt)

    def close(self) -> None:
        for taskset in self._tasksets.values():
            taskset.close()
