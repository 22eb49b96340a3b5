"""What models, tools and clients write is read in linear time, whatever they write: doubling lengths are timed."""

import functools
import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.endpoint_runs import PARAMS, chat_tokenizer
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.endpoint.chat import Chat, digest_with, reply_message
from torchtitan.grpo.endpoint.requests import BadRequest, body_of, cut_text
from torchtitan.grpo.endpoint.sessions import Branch, Place
from torchtitan.grpo.engines.protocol import Completion
from torchtitan.grpo.engines.stop_strings import cut_at_stop
from torchtitan.grpo.environments.calculator import CALL, calculate
from torchtitan.grpo.reporting.sample_log import given_text
from torchtitan.grpo.rewards.functions import numeric_match
from torchtitan.grpo.rollouts.environment import Turns

LONG_ENOUGH_S = 0.004
"""Of the shorter text, so that the clock's steps and the constant part do not matter."""
TOOLS = [{"type": "function", "function": {"name": "add"}}]
PROMPT = Prompt(0, [5], "1", "2")
TOKENIZER = functools.cache(chat_tokenizer)
CALL_TEXT = '<tool_call>{"name": "add"}</tool_call>'


def turns_that_the_template_hides(turns: int) -> Callable[[], Any]:
    client = SimpleNamespace(params=PARAMS)
    chat, session = Chat(TOKENIZER()), SimpleNamespace(prompt=PROMPT, said={}, longest_tokens=2**20, client=client)
    digest, messages = "null", []
    for turn in range(turns):
        messages.append({"role": "user" if turn % 2 else "assistant", "content": "sampled-turn-7f3a9c"})
        digest = digest_with(digest, messages[-1])
        session.said[digest] = Place(Branch(Turns(PROMPT), (0, 0)), 1)
    return lambda: chat.asked(session, {"messages": messages})


def tool_results(runs: int) -> Callable[[], Any]:
    ids = [7, 8] * runs
    sample = Sample(PROMPT, ids, [0.0] * len(ids), [0] * len(ids), "stop", loss_mask=[True, False] * runs)
    return lambda: given_text(sample, TOKENIZER())


def stopped(tokens: int) -> Callable[[], Any]:
    completion = Completion([7] * tokens + [8] * tokens, [0.0] * 2 * tokens, "stop", [0] * 2 * tokens)
    decode = TOKENIZER().decode
    return lambda: cut_at_stop(completion, [decode([8])], decode)


def refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        body_of(raw)


def reading(read: Callable[[str], Any], text: Callable[[int], str]) -> Callable[[int], Callable[[], Any]]:
    return lambda length: functools.partial(read, text(length))


def said(text: str) -> Any:
    return reply_message(text, TOOLS, "")


def matched(text: str) -> Any:
    return numeric_match(text, PROMPT)


NUMBERS = {"spaces": "1 ", "digits": "1", "groups": "1,000,", "commas": ",", "slashes": "1/", "exponents": "1e"}
LATEX = {
    "backslashes": "\\",
    "braces": "{",
    "fractions": "\\frac{",
    "halves": "\\frac{1}{",
    "dollars": "$ ",
    "minus": "-$",
}
CASES: dict[str, Callable[[int], Callable[[], Any]]] = {
    "white space in a call": reading(said, lambda n: "<tool_call>" + "\n" * n),
    "calls begun": reading(said, lambda n: "<tool_call>" * n),
    "calls begun, and one end": reading(said, lambda n: "<tool_call>\n" * n + "</tool_call>"),
    "calls ended": reading(said, lambda n: "</tool_call>" * n),
    "calls": reading(said, lambda n: CALL_TEXT * n),
    "nested arguments": reading(said, lambda n: CALL_TEXT.replace("{", '{"a":' * n)),
    "stop texts": reading(lambda text: cut_text(text, ["11111112"] * 16), lambda n: "1" * n),
    "a stop text at the middle": stopped,
    "turns that the template hides": turns_that_the_template_hides,
    "tool results": tool_results,
    "a nested body": lambda n: functools.partial(refused, b"[" * n),
    "half pairs in a body": lambda n: functools.partial(refused, b'{"a": "' + b"\\ud800" * n + b'"}'),
    "calculator: begun": reading(CALL.search, lambda n: "<" * n),
    "calculator: without an end": reading(CALL.search, lambda n: "<" + "1" * n),
    "calculator: ended": reading(CALL.search, lambda n: "<1>" * n + "<"),
    "calculator: expression": reading(calculate, lambda n: "(" * n),
    **{f"numbers: {name}": reading(matched, lambda n, unit=unit: unit * n) for name, unit in (NUMBERS | LATEX).items()},
    **{f"one number, {name}": reading(matched, lambda n, unit=unit: "1" + unit * n) for name, unit in LATEX.items()},
}


def seconds(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


@pytest.mark.parametrize("case", CASES)
def test_four_times_the_length_takes_about_four_times_the_time(case: str) -> None:
    make, length = CASES[case], 256
    make(1)()  # caches
    gc.disable()
    try:
        while (shorter := seconds(make(length))) < LONG_ENOUGH_S and length < 2**17:
            length *= 2
        longer = min(seconds(make(4 * length)) for _ in range(2))
    finally:
        gc.enable()
    assert longer < 9 * max(shorter, LONG_ENOUGH_S), (
        f"{length} characters took {shorter:.4f} s, and four times {longer:.4f}"
    )
