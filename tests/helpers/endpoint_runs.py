"""A collector with an endpoint on real embedded servers, for the tests of both."""

from dataclasses import replace

import aiohttp

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.endpoint.chat import Chat
from torchtitan.grpo.endpoint.server import Endpoint
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.environment import RolloutClient
from torchtitan.grpo.rollouts.guarded_environment import Environments, GuardedEnvironment

VERSION = 7
END = 2  # <eos>
PARAMS = SamplingParams(n=1, temperature=1.0, max_tokens=60, stop_token_ids=(END,), seed=11)
CHATML = (
    "{% if tools %}S{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""ChatML's structure with the characters of the tiny tokenizer."""


class RecordingClient(VllmClient):
    """The real client, which keeps what each server sampled."""

    def __init__(self, url: str) -> None:
        super().__init__(url, None, 30.0, lambda: VERSION)
        self.sampled: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids, params, request_id, cohort=None):
        completions = await super().generate(prompt_ids, params, request_id, cohort)
        self.sampled += [(prompt_ids, replace(completion)) for completion in completions]
        return completions


class NoScores:
    def score(self, samples: list[Sample]) -> None:
        """The environment judges."""


def chat_tokenizer():
    tokenizer = load_tokenizer(str(TINY_QWEN3))
    tokenizer.chat_template = CHATML
    return tokenizer


class Run:
    """A collector with an endpoint, on real servers. `play` is what its one environment does."""

    def __init__(self, tokenizer, urls: list[str], key: str = "") -> None:
        make = lambda url: Server(url, VllmControl(url, timeout_s=10), RecordingClient(url))  # noqa: E731
        self.fleet, self.tokenizer = Fleet(urls, make), tokenizer
        for server in self.fleet.servers:
            self.fleet.admit(server, VERSION)
        environments = Environments(GuardedEnvironment(self._environment, "tests:play"))
        self.collector = Collector(
            self.fleet, NoScores(), tokenizer, Rollout(request_timeout_seconds=30.0), environments
        )
        self.endpoint = Endpoint(Chat(tokenizer), "tiny", "127.0.0.1", 0, key, 128)
        self.collector.call(self.endpoint.start())
        self.collector.endpoint = self.endpoint
        self.prompt = Prompt(3, tokenizer("u:1+1=<eos>\na:")["input_ids"], "u:1+1=<eos>\na:")

    async def _environment(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        try:
            async with aiohttp.ClientSession(raise_for_status=False) as http:
                return await self.play(client, prompt, http)
        except BaseException as error:
            self.failure = error
            raise

    def collect(self, play, params: SamplingParams = PARAMS) -> list[Sample]:
        self.play, self.failure = play, None
        [group] = self.collector.collect([self.prompt], params, "test")
        if self.failure is not None:  # it has cost a run the group alone
            raise self.failure
        return group

    @property
    def sampled(self) -> list[tuple[list[int], Completion]]:
        return [each for server in self.fleet.servers for each in server.client.sampled]
