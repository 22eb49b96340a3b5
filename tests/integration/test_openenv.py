"""Environments behind an OpenEnv server: the package's own, and one that speaks its protocol."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.helpers import TINY_QWEN3
from tests.helpers.openenv_server import STEPS, served_real, served_wire
from tests.helpers.ranks import free_port
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.environments.openenv import OpenEnvEnvironment
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.environment import RolloutClient
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.guarded_environment import GuardedEnvironment

PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=60, stop_token_ids=(2,), seed=1)


@pytest.fixture
def wire() -> Iterator[str]:
    with served_wire() as url:
        yield url


@pytest.fixture
def real(tmp_path) -> Iterator[str]:
    pytest.importorskip("openenv")
    with served_real(tmp_path / "log") as url:
        yield url


@pytest.mark.parametrize("served", ["wire", "real"])
def test_an_episode_is_what_the_model_said_and_the_server_answered(served, request) -> None:
    tokenizer, numbers = load_tokenizer(str(TINY_QWEN3)), random.Random(0)
    said: list[list[int]] = []

    async def ask(token_ids: list[int], params: SamplingParams, suffix: str, session: str) -> list[Completion]:
        tokens = [numbers.randrange(4, 60) for _ in range(numbers.randrange(1, 5))] + [2]
        said.append(tokens)
        return [Completion(tokens, [-float(token) for token in tokens], "stop", [7] * len(tokens))]

    environment = OpenEnvEnvironment(
        request.getfixturevalue(served), {}, prompt="say:", observation="text", episodes=4, timeout_seconds=1.0
    )
    data = Data(source="environment", shuffle=False)
    prompts = PromptSource(data, tokenizer, 0, of_environment=environment.rows).next(4)
    guarded = GuardedEnvironment(environment, "openenv:test")

    async def group(prompt):
        make = lambda params, name, start: RolloutClient(tokenizer, params, prompt, ask)  # noqa: E731
        return await guarded.group(make, prompt, PARAMS, GroupCall(timeout_s=20.0))

    for prompt in prompts[:2]:
        said.clear()
        own = asyncio.run(group(prompt))
        assert len(own) == PARAMS.n
        words = {tuple(tokens): len(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in said}
        for sample in own:
            assert sample.prompt is prompt and prompt.text == "<bos>say:"
            turns, left = [], list(zip(sample.token_ids, sample.loss_mask, sample.logprobs, strict=True))
            while left:
                mine = left[0][1]
                end = next((i for i, entry in enumerate(left) if entry[1] != mine), len(left))
                turns.append((mine, tuple(entry[0] for entry in left[:end])))
                assert all(logprob == (-float(token) if mine else 0.0) for token, _, logprob in left[:end])
                left = left[end:]
            spoken, given = [t for mine, t in turns if mine], [t for mine, t in turns if not mine]
            assert len(spoken) == STEPS and set(spoken) <= words.keys()
            observed = [f"\nseed {prompt.index}:", *(f"{words[t]}?" for t in spoken[:-1])]
            assert [tokenizer.decode(t) for t in given] == observed
            assert sample.reward == sum(words[t] for t in spoken) and sample.rewards == {"episode_steps": 3.0}
    for sample in asyncio.run(group(prompts[2])):
        failure = sample.reward_failures["openenv:test"]
        assert failure.startswith("raised OpenEnvError: ") and "no step today" in failure
    if served == "wire":
        for sample in asyncio.run(group(prompts[3])):
            assert sample.reward_failures["openenv:test"].startswith("raised TimeoutError: ")


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"openenv:http://127.0.0.1:\d+\": no server answers there"):
        OpenEnvEnvironment(f"http://127.0.0.1:{free_port()}", {})
    with pytest.raises(UserError, match="is no address"):
        OpenEnvEnvironment("echo", {})
    for name in ("episodes", "max_steps", "timeout_seconds"):
        with pytest.raises(UserError, match=rf"environment_args {name} = 0 must be over 0"):
            OpenEnvEnvironment("http://127.0.0.1:9", {}, **{name: 0})
