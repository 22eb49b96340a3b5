"""The calculator environment: exact and bounded arithmetic, and conversations with a scripted model."""

import asyncio
import warnings

import pytest
from transformers import AutoTokenizer

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.engines.protocol import Completion, Refused, SamplingParams
from torchtitan.grpo.environments.calculator import MAX_CALLS, calculate, call_ends, rollout
from torchtitan.grpo.process.random_numbers import prompt_seed
from torchtitan.grpo.rollouts.environment import RolloutClient, checked

END = 2  # <eos>


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_QWEN3)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*84", "3108"),
        (" 3 + 4*5 ", "23"),
        ("3*(14-2)", "36"),
        ("2-30", "-28"),
        ("-3*-4", "12"),
        ("9" * 32 + "*" + "9" * 31, str((10**32 - 1) * (10**31 - 1))),
        ("(" * 31 + "7" + ")" * 31, "7"),
    ],
)
def test_arithmetic_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", " ", "+", "3*", "(3", "3)", "3 4", "007", "1/2", "1.5*2", "x", "1_0", "0x1f", "()", "(3)(4)", "3*\n4", "+3"],
)
def test_what_is_no_arithmetic_gets_a_question_mark(expression):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calculate(expression) == "?"


@pytest.mark.parametrize("expression", ["__import__('os')", "9**9**9", "9" * 65, "-" * 64, "(" * 63, "٣*٤"])
def test_what_could_run_or_grow_gets_a_question_mark(expression):
    assert calculate(expression) == "?"


def test_a_call_may_end_in_any_token_that_holds_its_bracket(tokenizer):
    assert [tokenizer.decode([token]) for token in call_ends(tokenizer)] == [">"]
    large = AutoTokenizer.from_pretrained(TINY_QWEN3)
    large.add_tokens(["<think>"])
    assert call_ends(large) == call_ends(tokenizer), "an added token is no part of a call"


def test_the_worked_column_is_what_the_environment_leads_to(tokenizer):
    data = Data(source_args={"operators": ["+", "-", "*"]}, chat_template=False, shuffle=False)
    for row, prompt in enumerate(PromptSource(data, tokenizer, 0).next(60)):
        call, _, rest = prompt.columns["calculation"].rpartition(">")
        assert call == ("" if row % 3 else "<" + prompt.text.rstrip("="))
        assert rest == (f"{calculate(call[1:])}\n{prompt.answer}" if call else prompt.answer)


QUESTION = "12*34="


def converse(tokenizer, first: list[str], then: dict[str, str], max_tokens: int = 40):
    """A group's samples, and the texts that the model was asked to continue.

    The model's first words are `first`, one for each sample; `then` is what it says when its text ends in a key.
    """
    asked = []

    async def ask(token_ids, params, name, session):
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        asked.append(text)
        if text == QUESTION:
            assert params.n == len(first)
            return [say(words, params) for words in first]
        [words] = [words for ending, words in then.items() if text.endswith(ending)]
        return [say(words, params)]

    def say(words: str, params: SamplingParams) -> Completion:
        ids = [*tokenizer(words, add_special_tokens=False)["input_ids"], END]
        stopped = next(i for i, token in enumerate(ids) if token in params.stop_token_ids) + 1
        ids = ids[: min(stopped, params.max_tokens)]
        reason = "stop" if stopped <= params.max_tokens else "length"
        return Completion(ids, [-1.0] * len(ids), reason, [3] * len(ids))

    prompt = Prompt(0, tokenizer(QUESTION)["input_ids"], QUESTION, "408")
    params = SamplingParams(len(first), 1.0, max_tokens, (END,), 0)
    samples = asyncio.run(rollout(RolloutClient(tokenizer, params, prompt, ask), prompt))
    return checked(samples, "calculator", prompt, params), asked


def parts(tokenizer, sample) -> tuple[str, str]:
    """All of an answer, and what of it the model said."""
    said = [token for token, own in zip(sample.token_ids, sample.loss_mask, strict=True) if own]
    return tokenizer.decode(sample.token_ids), tokenizer.decode(said)


def test_a_group_calls_and_answers_each_in_its_own_way(tokenizer):
    then = {
        "=<12*34>408\n": "408",
        "=<1+1>2\n": "<2*204>",
        "<2*204>408\n": "408",
        "?\n": "no",
        "a >": " b",
    }
    samples, asked = converse(tokenizer, ["<12*34>", "408", "<1+1>", "<12*>", "a > b"], then)
    assert [parts(tokenizer, sample) for sample in samples] == [
        ("<12*34>408\n408<eos>", "<12*34>408<eos>"),
        ("408<eos>", "408<eos>"),
        ("<1+1>2\n<2*204>408\n408<eos>", "<1+1><2*204>408<eos>"),
        ("<12*>?\nno<eos>", "<12*>no<eos>"),
        ("a > b<eos>", "a > b<eos>"),
    ]
    assert all(sample.finish_reason == "stop" for sample in samples)
    assert [sample.logprobs.count(0.0) for sample in samples] == [4, 0, 2 + 4, 2, 0]
    assert asked[0] == QUESTION and len(asked) == 1 + 5


def test_a_conversation_that_fails_ends_the_others(tokenizer):
    ended = []

    async def ask(token_ids, params, name, session):
        if not session:
            ids = tokenizer("<1+1>", add_special_tokens=False)["input_ids"]
            return [Completion(ids, [-1.0] * len(ids), "stop", [3] * len(ids)) for _ in range(2)]
        try:
            await asyncio.sleep(60 if session == "0" else 0)
            raise Refused("too long")
        finally:
            ended.append(session)

    async def group() -> None:
        prompt = Prompt(0, tokenizer(QUESTION)["input_ids"], QUESTION)
        params = SamplingParams(2, 1.0, 40, (END,), 0)
        with pytest.raises(Refused):
            await rollout(RolloutClient(tokenizer, params, prompt, ask), prompt)
        assert ended == ["1", "0"], "a server is not asked for what nobody waits for"

    asyncio.run(group())


def test_calls_are_limited_and_the_last_turn_is_not_stopped_at_one(tokenizer):
    then = {"<1*1>1\n": "<2*1>", "<2*1>2\n": "<3*1>", "<3*1>3\n": "<4*1>5"}
    [sample], asked = converse(tokenizer, ["<1*1>"], then)
    assert parts(tokenizer, sample)[0] == "<1*1>1\n<2*1>2\n<3*1>3\n<4*1>5<eos>"
    assert len(asked) == 1 + MAX_CALLS


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_seeds_do_not_depend_on_which_conversation_is_answered_first(tokenizer, order):
    """As a run, its repetition and its evaluation are compared answer by answer."""
    first, seeds = ["<1*1>", "<2*2>", "<3*3>"], {}

    async def ask(token_ids, params, name, session):
        if not session:
            return [Completion(tokenizer(call)["input_ids"], [-1.0] * 5, "stop", [0] * 5) for call in first]
        seeds.setdefault(session, []).append(params.seed)
        for _ in range(order[int(session)]):  # each round of the loop lets the others go on
            await asyncio.sleep(0)
        return [Completion(tokenizer(first[int(session)])["input_ids"], [-1.0] * 5, "stop", [0] * 5)]

    prompt = Prompt(0, tokenizer(QUESTION)["input_ids"], QUESTION, "408")
    client = RolloutClient(tokenizer, SamplingParams(3, 1.0, 40, (END,), 7), prompt, ask)
    asyncio.run(rollout(client, prompt))
    assert seeds == {
        f"{number}": [prompt_seed(7, f"turns/{number}", 0, turn) for turn in range(MAX_CALLS)] for number in range(3)
    }


@pytest.mark.parametrize(
    ("max_tokens", "text"),
    [(13, "<12*34>408\n40"), (11, "<12*34>408\n"), (9, "<12*34>40"), (7, "<12*34>"), (6, "<12*34")],
)
def test_a_conversation_is_cut_at_max_answer_tokens(tokenizer, max_tokens, text):
    [sample], _ = converse(tokenizer, ["<12*34>"], {"\n": "408"}, max_tokens)
    assert parts(tokenizer, sample)[0] == text
    assert sample.finish_reason == "length"
