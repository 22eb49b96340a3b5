"""An environment of several turns: the model may call a calculator. `[rollout] environment` names `rollout`.

The model writes a call, `<37*84>`. The calculator writes the result and a line break. The model goes on:

    37*84=<37*84>3108
    3108

The model's tokens are trained on. The calculator's tokens are read by the model and masked out of the loss. The last
line is the answer; `[reward] answer_pattern` extracts it. See docs/environments.md.
"""

import ast
import functools
import operator
import re

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.engines.protocol import Completion
from torchtitan.grpo.process.event_loop import all_of
from torchtitan.grpo.rollouts.environment import RolloutClient, Turns

MAX_CALLS = 3
MAX_EXPRESSION_CHARS = 64  # bounds the time to evaluate a call and the size of its result
CALL = re.compile(r"<([^<>]*)>[^<>]*\Z")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def rollout(client: RolloutClient, prompt: Prompt) -> list[Sample]:
    """One group: `client.params.n` conversations about one prompt."""
    stop = call_ends(client.tokenizer)
    # All conversations start from the same tokens, so one request serves them all. Then each goes on by itself.
    first = await client.generate(prompt.token_ids, n=client.params.n, stop_token_ids=stop)
    return await all_of([_converse(client, prompt, answer, stop, f"{i}") for i, answer in enumerate(first)])


async def _converse(
    client: RolloutClient, prompt: Prompt, completion: Completion, stop: tuple[int, ...], session: str
) -> Sample:
    """Continue until the model ends without a call, or has no calls or tokens left."""
    turns = Turns(prompt)
    turns.sampled(completion)
    for calls_left in reversed(range(MAX_CALLS)):
        if not set(completion.token_ids[-1:]) & set(stop):
            break
        call = CALL.search(client.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        if call:  # else the `>` ended no call
            turns.given(client.tokenizer(calculate(call[1]) + "\n", add_special_tokens=False)["input_ids"])
        [completion] = await client.generate(
            turns.token_ids, stop_token_ids=stop if calls_left else (), session=session
        )
        turns.sampled(completion)
    return turns.sample()


@functools.cache
def call_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that may end a call. In a large vocabulary some hold more than the `>`."""
    special = tokenizer.get_added_vocab()
    return tuple(sorted(id for token, id in tokenizer.get_vocab().items() if ">" in token and token not in special))


def calculate(expression: str) -> str:
    """The exact value of a sum or product of integers such as `3*(14-2)`; "?" for anything else."""
    if len(expression) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[-+*() 0-9]+", expression):
        return "?"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError):
        return "?"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:  # no powers: they could be huge
            return OPERATORS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError(f"not a sum or product of integers: {ast.unparse(node)}")
