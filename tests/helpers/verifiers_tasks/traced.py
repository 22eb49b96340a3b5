"""An environment of verifiers that tests can look into."""

from typing import Any

from torchtitan.grpo.environments.verifiers_v1 import VerifiersEnvironment


class Traced(VerifiersEnvironment):
    """Keeps verifiers' own record of each episode."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.episodes: list[Any] = []

    async def _episode(self, *arguments: Any) -> Any:
        self.episodes.append(await super()._episode(*arguments))
        return self.episodes[-1]
