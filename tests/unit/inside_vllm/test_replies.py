"""Fields that the plug-in adds to vLLM's replies, on pydantic models such as vLLM's."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pydantic
import pytest

from torchtitan.grpo.data.top_tokens import Arrays, read
from torchtitan.grpo.inside_vllm import flat_logprobs
from torchtitan.grpo.inside_vllm.replies import with_field


class Choice(pydantic.BaseModel):
    index: int
    token_ids: list[int]
    logprobs: list[float] | None = None


class Reply(pydantic.BaseModel):
    choices: list[Choice]


def test_fields_are_added_to_the_choices_that_have_them():
    reply = Reply(choices=[Choice(index=1, token_ids=[7]), Choice(index=0, token_ids=[])])
    once = with_field(reply, "versions", {0: ["a"], 1: ["b"]})
    twice = with_field(once, "more", {1: 2.0})
    assert isinstance(twice, Reply)
    assert twice.model_dump()["choices"] == [
        {"index": 1, "token_ids": [7], "logprobs": None, "versions": ["b"], "more": 2.0},
        {"index": 0, "token_ids": [], "logprobs": None, "versions": ["a"], "more": None},
    ]
    assert "more" not in once.model_dump()["choices"][0]
    assert set(reply.model_dump()["choices"][0]) == {"index", "token_ids", "logprobs"}


def flat(*positions: list[float]) -> SimpleNamespace:
    """vLLM's `FlatLogprobs` of these positions, each the sampled token's and others after it."""
    starts = [sum(map(len, positions[:i])) for i in range(len(positions))]
    logprobs = [value for position in positions for value in position]
    return SimpleNamespace(start_indices=starts, logprobs=logprobs, token_ids=list(range(len(logprobs))))


def test_the_sampled_token_s_comes_first_and_json_can_say_all():
    assert flat_logprobs.of_sampled_tokens(flat()) == []
    found = flat_logprobs.of_sampled_tokens(flat([-0.5], [-1.5, -0.1], [float("-inf")], [float("nan")], [0.0]))
    assert found == [-0.5, -1.5, flat_logprobs.LOWEST, flat_logprobs.LOWEST, 0.0]


@pytest.fixture
def serving(monkeypatch):
    """Stands in for vLLM's modules: their names, and what `install` uses of them."""

    class ServingTokens:
        def _create_tokens_logprobs(self, token_ids, top_logprobs, num_output_top_logprobs=None):
            return [float(value) for value in top_logprobs.logprobs]

        async def serve_tokens_full_generator(self, request, results):
            async for result in results:
                last = result
            return Reply(
                choices=[
                    Choice(
                        index=output.index,
                        token_ids=[5],
                        logprobs=self._create_tokens_logprobs([5], output.logprobs, request.sampling_params.logprobs),
                    )
                    for output in last.outputs
                ]
            )

    route = "vllm.entrypoints.scale_out.token_in_token_out.serving"
    modules = {
        route: {"ServingTokens": ServingTokens},
        "vllm.logprobs": {"FlatLogprobs": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
    }
    for name in {".".join(full.split(".")[:end]) for full in modules for end in range(1, full.count(".") + 2)}:
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    flat_logprobs.install()
    return ServingTokens()


@pytest.mark.parametrize(
    ("asked", "lists"),
    [
        ({}, True),
        ({"flat_logprobs": False}, False),
        ({"logprobs": None}, False),
        ({"output_kind": 1}, False),
    ],
)
def test_lists_are_sent_to_those_who_asked_for_them(serving, asked, lists):
    params = {"flat_logprobs": True, "logprobs": 0, "output_kind": 2} | asked
    request = SimpleNamespace(sampling_params=SimpleNamespace(**params))

    async def results():
        yield SimpleNamespace(outputs=[SimpleNamespace(index=i, logprobs=flat([-0.5 - i])) for i in range(2)])

    reply = asyncio.run(serving.serve_tokens_full_generator(request, results()))
    expected = [{"logprobs": None, "token_logprobs": [-0.5 - i]} if lists else {"logprobs": [-0.5 - i]} for i in (0, 1)]
    assert reply.model_dump()["choices"] == [{"index": i, "token_ids": [5]} | expected[i] for i in (0, 1)]


def test_likeliest_tokens_are_sent_beside_the_sampled_ones(serving):
    params = SimpleNamespace(flat_logprobs=True, logprobs=2, output_kind=2)
    request = SimpleNamespace(sampling_params=params)
    positions = [-3.0, -0.5, -1.0], [-0.25, -0.25, -2.0]

    async def results():
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, logprobs=flat(*positions))])

    [choice] = asyncio.run(serving.serve_tokens_full_generator(request, results())).model_dump()["choices"]
    assert choice["token_logprobs"] == [-3.0, -0.25]
    ids, logprobs = read(Arrays(**choice["top_tokens"]), 2, 2)
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5]] and logprobs.tolist() == [list(position) for position in positions]


def test_texts_are_left_as_they_are(serving):
    params = SimpleNamespace(flat_logprobs=True, logprobs=0, output_kind=2)
    request = SimpleNamespace(sampling_params=params, output_mode="text")

    async def results():
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, logprobs=flat([-0.5]))])

    reply = asyncio.run(serving.serve_tokens_full_generator(request, results()))
    assert reply.model_dump()["choices"] == [{"index": 0, "token_ids": [5], "logprobs": [-0.5]}]
