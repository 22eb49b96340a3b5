"""Verifiable rewards: the built-in functions, and how `[reward] functions` finds a function.

A reward function has one of four forms:

    def f(answer: str, prompt: Prompt) -> float
    def f(answers: list[str], prompt: Prompt) -> list[float]    # a group's answers at once, by the parameter's name
    async def f(answer: str, prompt: Prompt) -> float           # awaited for all answers of a group at the same time
    async def f(answers: list[str], prompt: Prompt) -> list[float]

Built-in functions get the final answer that `[reward] answer_pattern` extracts. A function of your own gets the whole
text.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.errors import UserError, shown
from torchtitan.grpo.process.import_path import import_function, is_async, load_function, signature, source
from torchtitan.grpo.rewards.final_number import DIGITS_MAX, GROUPED, SEPARATOR, TEXT_COMMAND, last_number

RewardFunction = Callable[..., Any]
DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[(\[])|\\boxed")
COMMAND = re.compile(r"\\[A-Za-z]")
WORD = re.compile(r"(?<!\S)[A-Za-z]{2,}(?=[\s.,:;!?]|$)|[A-Za-z]:")


def exact_match(answer: str, prompt: Prompt) -> float:
    """1 if the answer is the reference. Space around either does not count."""
    return float(answer.strip() == _reference(prompt).strip())


def numeric_match(answer: str, prompt: Prompt) -> float:
    """1 if the answer's final number equals the reference's: `$1,234.50` is `1234.5`, and `3/2` is `1.5`.

    `final_number.py` finds it. An expression is a wrong answer, and so is a number of over
    DIGITS_MAX digits, or with such an exponent.
    """
    expected = last_number(_reference(prompt))
    if expected is None:
        raise ValueError(f"the reference answer {shown(prompt.answer)} holds no number of up to {DIGITS_MAX} digits")
    return float(last_number(answer) == expected)


def math_verify(answer: str, prompt: Prompt) -> float:
    """1 if the answer equals the reference mathematically: LaTeX, fractions, sets.

    Uses https://github.com/huggingface/Math-Verify. It limits parsing and comparison to 5 s each by SIGALRM, so it
    needs the main thread of a worker process. An answer that it cannot parse is wrong; one that takes too long raises.
    """
    from math_verify import verify

    expected = _parse_reference(_reference(prompt))
    if not expected:
        raise ValueError(f"the reference answer {shown(prompt.answer)} is no mathematical expression")
    answers = _parse_math(answer)
    try:
        return float(verify(expected, answers, raise_on_error=True))
    except Exception:  # not comparable; the library's timeout is a BaseException and passes
        return 0.0


def reasoning_gym(answer: str, prompt: Prompt) -> float:
    """The score of the task's own scorer, 0 to 1 (https://github.com/open-thought/reasoning-gym)."""
    if not {"task", "entry"} <= prompt.columns.keys():
        raise ValueError('the prompt is not from [data] source = "reasoning_gym"')
    return float(_scorer(prompt.columns["task"])(answer.strip(), ast.literal_eval(prompt.columns["entry"])))


BUILT_IN: dict[str, RewardFunction] = {f.__name__: f for f in (exact_match, numeric_match, math_verify, reasoning_gym)}
PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}
"""Built-in functions that need a package, which has the function's name, and its name on PyPI."""


def is_safe(name: str, pattern: str) -> bool:
    """Whether a function can neither hang nor end its process: one of this file's own, without the user's pattern."""
    return name in BUILT_IN and name not in PACKAGES and not pattern


def is_instant(name: str) -> bool:
    """Whether a safe function takes less time than a message to another process, however long the answer is.

    `numeric_match` does not: it searches the whole answer for numbers, and holds the interpreter meanwhile.
    """
    return name == exact_match.__name__


def resolve(name: str) -> RewardFunction:
    """Find the function that `[reward] functions` gives by a built-in name or as `module:function`.

    Raises:
        UserError: There is no such function, its package is missing, or it does not take an answer and a prompt.
    """
    key = "[reward] functions"
    if name in BUILT_IN:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise UserError(f'{key}: "{name}" needs its package: pip install {PACKAGES[name]}')
        return BUILT_IN[name]
    if name.startswith("__main__:"):
        raise UserError(f'{key}: "{name}": move the function to a module that worker processes can import')
    function = import_function(key, name)
    names, found = _parameters(function), f'{key}: "{name}" ({source(function)})'
    if "completions" in names:
        raise UserError(f"{found} has the signature of TRL. {_around(function, _AS_TRL)}")
    if _OF_VERL.keys() & names[:2] and names[1:2] != ["prompt"]:
        given = ", ".join(f"{parameter}={_OF_VERL[parameter]}" for parameter in names if parameter in _OF_VERL)
        raise UserError(f"{found} has the signature of verl. {_around(function, _AS_VERL.format(given))}")
    if names[:1] == ["prompt"]:  # it would compare the answer with a row, and give 0 to all
        raise UserError(f"{found} has the prompt first: write (answer, prompt)")
    if _REFERENCES & set(names[1:2]):  # so would this one
        first = "answers" if names[0] == "answers" else "answer"
        wanted = f"write ({first}, prompt), and prompt.answer for the reference"
        raise UserError(f"{found} has {names[1]!r} second: {wanted}")
    return load_function(key, name, "answer", "prompt")


def _around(function: RewardFunction, example: str) -> str:
    if is_async(function):
        example = example.replace("def ", "async def ").replace("return ", "return await ")
    return f"Name a function that calls it with what it expects, for example:{example}"


_AS_TRL = """
    def for_grpo(answers, prompt):
        columns = {name: [value] * len(answers) for name, value in prompt.columns.items()}
        return trl_function(prompts=[prompt.text] * len(answers), completions=answers, **columns)"""
_AS_VERL = """
    def for_grpo(answer, prompt):
        return verl_function({})"""
_OF_VERL = {
    "data_source": "prompt.source",
    "solution_str": "answer",
    "ground_truth": "prompt.answer",
    "extra_info": "prompt.columns",
}
"""Parameters of verl's functions, and what they stand for here. Some take only the answer and its reference."""
_REFERENCES = {"answer", "reference", "reference_answer", "solution", "target", "gold", "label", "expected"}
"""Second parameters that are no row."""


def takes_group(function: RewardFunction) -> bool:
    """Whether it scores a group's answers at once: its first parameter is named `answers`."""
    return _parameters(function)[:1] == ["answers"]


def checked(value: Any) -> float:
    """A reward function's result as a finite float.

    Raises:
        ValueError: It is not a finite number. The message says what to change in the function.
    """
    if inspect.isawaitable(value):
        getattr(value, "close", lambda: None)()  # else Python warns that it was never awaited
        raise ValueError(f"returned a {type(value).__name__} that was not awaited: `await` it in an `async def`")
    number = math.nan
    if hasattr(value, "__float__"):
        with contextlib.suppress(Exception):  # an array of several numbers, an integer over float64
            number = float(value)
    if not math.isfinite(number):
        raise ValueError(
            f"returned {shown(value)}: return one finite number on every path. Name several functions for several "
            "scores, or name the first parameter `answers` to get a group's answers at once"
        )
    return number


def checked_group(values: Any, answers: int) -> Iterable[Any]:
    """The results of a function that scores a group's `answers` at once. Each is still to be `checked`.

    Raises:
        ValueError: They are not one for each answer. The message says what to change in the function.
    """
    wanted = f"its first parameter is named `answers`, so return a list of {answers} numbers, one for each"
    if inspect.isawaitable(values):
        checked(values)
    if isinstance(values, str | bytes | dict | set | frozenset) or not hasattr(values, "__len__"):
        raise ValueError(f"returned {shown(values)}: {wanted}")
    values = list(values)  # a table with a row for each answer has the names of its columns
    if len(values) != answers:
        raise ValueError(f"returned {len(values)} scores for {answers} answers: {wanted}")
    return values


def _parameters(function: RewardFunction) -> list[str]:
    with contextlib.suppress(ValueError):
        return list(signature(function).parameters)
    return []  # a function of C that does not say


def _reference(prompt: Prompt) -> str:
    if not prompt.answer:
        raise ValueError("the prompt has no reference answer: set [data] answer_column")
    return prompt.answer


def _parse_math(text: str) -> list[Any]:
    """What Math-Verify reads in `text`. It finds LaTeX inside delimiters only, and elsewhere just plain numbers.

    So a text without delimiters is read as LaTeX in whole. Words are no LaTeX: text with words is searched first, and
    a number is never picked out of bare LaTeX: `2\\sqrt{3}` is not 2. Math-Verify takes `$10 000$` for 10
    times 0, and knows `{,}` and the minus sign of Unicode in LaTeX only.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = SEPARATOR.sub("", text).replace("\N{MINUS SIGN}", "-")
    text = GROUPED.sub(lambda number: number[0].replace(" ", ""), text)
    latex = [LatexExtractionConfig()]
    anything = [*latex, ExprExtractionConfig()]
    searched = (text, latex if COMMAND.search(text) else anything)
    whole = (f"${text.strip(' .').replace(chr(10), ' ')}$", latex)
    if DELIMITER.search(text):
        attempts = [(text, anything)]
    elif WORD.search(TEXT_COMMAND.sub("", text)):
        attempts = [searched, whole]
    else:
        attempts = [whole, searched]
    for mode in ("no_fallback", "first_match"):  # in the second round also what cannot be parsed, as text
        for candidate, targets in attempts:
            with contextlib.suppress(Exception):  # not parsable; the library's timeout is a BaseException and passes
                if found := parse(candidate, targets, fallback_mode=mode, raise_on_error=True):
                    return found
    return []


@functools.lru_cache(maxsize=1024)  # the same for all answers of a group
def _parse_reference(text: str) -> list[Any]:
    return _parse_math(text)


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import create_dataset

    return create_dataset(task, size=1, seed=0).score_answer
