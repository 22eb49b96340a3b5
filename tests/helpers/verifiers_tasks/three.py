"""The three tasksets as one environment, so that one run trains on all of them."""

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.environments.verifiers_v1 import VerifiersEnvironment
from torchtitan.grpo.rollouts.environment import RolloutClient

KINDS = ("sums", "lookup", "guess")


class Three:
    per_sample = True

    def __init__(self, limit: int) -> None:
        self._each = {
            kind: VerifiersEnvironment(
                f"tests.helpers.verifiers_tasks.{kind}",
                {},
                select={"limit": limit},
                agent={"sampling": {"max_tokens": 10}},
            )
            for kind in KINDS
        }
        self.rows = [self._each[kind].rows[number] | {"kind": kind} for number in range(limit) for kind in KINDS]

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return await self._each[prompt.columns["kind"]](client, prompt)

    def close(self) -> None:
        for environment in self._each.values():
            environment.close()
