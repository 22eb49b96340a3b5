"""Environments are found by their names, get their arguments, and refuse others before anything starts."""

import asyncio
from typing import Any

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data, Rollout
from torchtitan.grpo.data.prompts import load_tokenizer
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.environments.load import loaded_environment, prompt_source
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.environment import Environment, RolloutClient, single_turn


def load(name: str, **arguments: Any) -> Environment:
    with loaded_environment(Rollout(environment=name, environment_args=arguments), Data()) as environment:
        return environment


async def accepted(client: RolloutClient, prompt: Prompt, depth: int = 1) -> list[Sample]:
    return [Sample(prompt, [depth], [0.0], [0], "stop")]


def wrong_parameters(prompt: Prompt) -> list[Sample]:
    raise AssertionError("is never called")


class Sums:
    """An environment with rows of its own, and something to close."""

    closed = 0

    def __init__(self, largest: int, sign: str = "+") -> None:
        if sign != "+":
            raise OSError(f"no table of {sign}")
        self.rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "i": i} for i in range(largest)]

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return []

    def close(self) -> None:
        Sums.closed += 1


def test_a_function_is_found_by_its_name_and_gets_its_arguments() -> None:
    assert load("") is single_turn
    assert load(f"{__name__}:accepted").__code__ is accepted.__code__
    assert load("torchtitan.grpo.environments.calculator:rollout").__name__ == "rollout"
    [sample] = asyncio.run(load(f"{__name__}:accepted", depth=3)(None, Prompt(0, [1], "")))
    assert sample.token_ids == [3]


@pytest.mark.parametrize(
    "name", ["calculator", "no_such_module:rollout", f"{__name__}:missing", f"{__name__}:wrong_parameters", ":", "a:"]
)
def test_a_name_that_is_no_environment_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"\[rollout\] environment"):
        load(name)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("accepted", {"depht": 3}, r'environment_args has "depht", which .*:accepted does not take.* "depth"'),
        ("accepted", {"prompt": 3}, r'has "prompt", which .*:accepted does not take: it takes depth'),
        ("Sums", {}, r"missing a required argument: 'largest'"),
        ("Sums", {"largest": 3, "sing": "-"}, r'has "sing", which .*:Sums does not take.* "sign"'),
        ("Sums", {"largest": 3, "sign": "-"}, r"raised OSError: no table of - \(.*test_load.py:\d+ in __init__\)"),
    ],
)
def test_arguments_that_it_does_not_take_are_refused(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(f"{__name__}:{name}", **arguments)


def test_an_environment_may_bring_its_rows_and_is_closed() -> None:
    Sums.closed = 0
    rollout = Rollout(environment=f"{__name__}:Sums", environment_args={"largest": 5})
    data, tokenizer = Data(source="environment", chat_template=False, shuffle=False), load_tokenizer(str(TINY_QWEN3))
    with loaded_environment(rollout, data) as environment:
        prompts = prompt_source(environment)(data, tokenizer, 0, validation_prompts=2)
        assert [(p.text, p.answer, p.columns["i"]) for p in prompts.next(3)] == [
            ("0+0=", "0", 0),
            ("1+1=", "2", 1),
            ("2+2=", "4", 2),
        ]
        assert not Sums.closed
    assert Sums.closed == 1
    with pytest.raises(UserError, match=r'source = "environment": \[rollout\] environment brings no rows'):
        prompt_source(accepted)(data, tokenizer, 0)
