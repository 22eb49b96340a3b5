"""What is noticed before a run starts, and when it must end: functions that give no score."""

import sys
from textwrap import dedent

import pytest

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner

FUNCTIONS = """
import asyncio
import functools
import os
import time

def raises(answer, prompt):
    return float(prompt.columns["solution"] == answer)

def raises_elsewhere(answer, prompt):
    return raises(answer, prompt)

def none(answer, prompt):
    pass

def nan(answer, prompt):
    return float("nan")

def text(answer, prompt):
    return "1.0"

def pair(answer, prompt):
    return 1.0, 0.5

def dictionary(answer, prompt):
    return {"score": 1.0}

async def judge(answer, prompt):
    return 1.0

def not_awaited(answer, prompt):
    return judge(answer, prompt)

async def awaited_none(answer, prompt):
    await asyncio.sleep(0)

def hangs(answer, prompt):
    time.sleep(60)

def exits(answer, prompt):
    os._exit(7)

def one_for_all(answers, prompt):
    return 1.0

def too_few(answers, prompt):
    return [1.0]

def not_awaited_group(answers, prompt):
    return judge(answers, prompt)

def only_the_reference(answer, prompt):
    return {prompt.answer: 1.0}[answer]

def only_the_second_prompt(answer, prompt):
    return {3: 1.0}[prompt.index]

def only_some_of_a_group(answers, prompt):
    return [1.0 if answer == prompt.answer else None for answer in answers]

async def awaited_group(answers, prompt):
    return [await judge(answer, prompt) for answer in answers]

def solution_first(solution_str, prompt):
    return 1.0

def of_a_pair(solution, reference):
    return float(solution == reference)

@functools.wraps(of_a_pair)
def wraps_a_pair(answer, prompt):
    return of_a_pair(answer, prompt.answer)

def of_trl(prompts, completions, **kwargs):
    return [1.0 for _ in completions]

def of_trl_in_short(completions, **kwargs):
    return [1.0 for _ in completions]

async def of_trl_async(completions, **kwargs):
    return [1.0 for _ in completions]

@functools.wraps(of_trl)
def wraps_trl(answers, prompt):
    return of_trl([], answers)

def passes_on(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

group_behind_a_wrapper = passes_on(only_some_of_a_group)
"""

GIVE_NO_SCORE = {
    "raises": "raised KeyError: 'solution' ({file}:8). Return 0 for a wrong answer; prompt.columns has ['question']",
    "raises_elsewhere": "raised KeyError: 'solution' ({file}:8)",
    "none": "returned None: return one finite number on every path",
    "nan": "returned nan: return one finite number",
    "text": "returned '1.0': return one finite number",
    "pair": "returned (1.0, 0.5): return one finite number on every path. Name several functions",
    "dictionary": "returned {{'score': 1.0}}: return one finite number",
    "not_awaited": "returned a coroutine that was not awaited: `await` it in an `async def`",
    "awaited_none": "returned None: return one finite number on every path",
    "hangs": "took longer than [reward] timeout_seconds = 1.0",
    "exits": "ended its process with exit code 7",
    "one_for_all": "returned 1.0: its first parameter is named `answers`, so return a list of 3 numbers",
    "too_few": "returned 1 scores for 3 answers: its first parameter is named `answers`",
    "not_awaited_group": "returned a coroutine that was not awaited: `await` it in an `async def`",
}
GIVE_SOME = ["judge", "only_the_reference", "only_the_second_prompt", "only_some_of_a_group", "awaited_group"]
GIVE_SOME += ["solution_first", "wraps_a_pair", "wraps_trl", "group_behind_a_wrapper"]
PROMPTS = [Prompt(2, [1], "1+1=", "2", {"question": "1+1="}), Prompt(3, [1], "1+2=", "3", {"question": "1+2="})]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "tried_rewards.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder / "tried_rewards.py"
    sys.modules.pop("tried_rewards", None)


@pytest.fixture(scope="module")
def problems(file) -> list[str]:
    """Of all functions at once, as a run says them."""
    functions = [f"tried_rewards:{name}" for name in [*GIVE_NO_SCORE, *GIVE_SOME]]
    reward = Reward(functions=functions, workers=1, timeout_seconds=1.0)
    with RewardRunner(reward) as runner, pytest.raises(UserError) as caught:
        runner.check(PROMPTS)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("name", GIVE_NO_SCORE)
def test_a_function_that_gives_no_score_is_named_with_what_it_did(name, problems, file):
    (problem,) = [line for line in problems if f'"tried_rewards:{name}" ({file}:' in line]
    assert problem.startswith("[reward] functions: ")
    assert "as the answer to prompt 2 it " + GIVE_NO_SCORE[name].format(file=file) in problem


def test_a_function_that_scores_any_answer_passes(problems):
    assert len(problems) == len(GIVE_NO_SCORE)


@pytest.mark.parametrize("name", ["of_trl", "of_trl_in_short", "of_trl_async"])
def test_a_function_of_trl_is_refused_with_one_that_calls_it(name, file):
    with pytest.raises(UserError, match=r"signature of TRL(.|\n)*def for_grpo\(answers, prompt\)") as caught:
        RewardRunner(Reward(functions=[f"tried_rewards:{name}"]))
    assert f"{file}:" in str(caught.value)
    example = str(caught.value).partition("for example:")[2]
    text = f"from tried_rewards import {name} as trl_function\n{dedent(example)}"
    (file.parent / f"around_{name}.py").write_text(text)
    with RewardRunner(Reward(functions=[f"around_{name}:for_grpo"], workers=1)) as runner:
        runner.check(PROMPTS)


def test_an_environments_run_begins_with_a_warning(file, caplog):
    """Its functions expect conversations, and the answers that they are tried on are none."""
    with RewardRunner(Reward(functions=["tried_rewards:none"], workers=1)) as runner:
        runner.check(PROMPTS, refuse=False)
    assert "tried_rewards:none" in caplog.text


def test_a_huge_reference_is_cut_in_the_message():
    words = pytest.raises(UserError, match=r"answer to prompt 0 it raised .* holds no number of up to \d+ digits")
    reward = Reward(functions=["numeric_match"], workers=1)
    with RewardRunner(reward) as runner, words as caught:
        runner.check([Prompt(0, [1], "1+1=", "x" * 10**6)])
    assert len(str(caught.value)) < 1000


def test_built_in_functions_are_tried_on_final_answers():
    """The pattern does not find the reference itself, so the function would not be called."""
    without_reference = [Prompt(0, [1], "1+1=")]
    with RewardRunner(Reward(answer_pattern="#### (.+)", workers=1)) as runner:
        runner.check(PROMPTS)
        with pytest.raises(UserError, match=r'"exact_match" gave no score to any of 3.*\[data\] answer_column'):
            runner.check(without_reference)


def test_a_module_that_needs_a_key_says_how_it_gets_it(tmp_path, monkeypatch):
    (tmp_path / "needs_key.py").write_text("import os\nos.environ['JUDGE_KEY']\ndef f(answer, prompt):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", "x")
    expected = pytest.raises(UserError, match=r"needs_key:f.*\[reward\] secrets")
    with RewardRunner(Reward(functions=["needs_key:f"], workers=1)) as runner, expected:
        runner.check(PROMPTS)


def test_the_output_of_a_worker_that_cannot_start_is_in_the_error(tmp_path, monkeypatch):
    text = "import os\nif 'JUDGE_KEY' not in os.environ:\n    print('no judge', flush=True)\n    os._exit(3)\n"
    (tmp_path / "ends_process.py").write_text(text + "def f(answer, prompt):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", "x")
    runner = RewardRunner(Reward(functions=["ends_process:f"], workers=2), folder=str(tmp_path))
    with runner, pytest.raises(UserError, match=r"Exit code 3 .*ends_process:f(.|\n)*rewards.log, ends in:\nno judge"):
        runner.check(PROMPTS)


def groups_of(*rewards: list[float | None], why: str = "raised OSError: down") -> list[Group]:
    def sample(reward: float | None) -> Sample:
        failures = {} if reward is not None else {"judge": why}
        return Sample(PROMPTS[0], [1], [0.0], [0], "stop", text="two", reward=reward, reward_failures=failures)

    return [[sample(reward) for reward in group] for group in rewards]


@pytest.mark.parametrize(
    ("rewards", "limit", "ends"),
    [
        ([], 0.0, False),
        ([[0.0, 1.0]], 0.0, False),
        ([[0.0, None], [1.0, None]], 0.5, False),
        ([[0.0, None], [None, None]], 0.5, True),
        ([[0.0, 1.0], [1.0, None]], 0.0, True),
        ([[0.0, None], [None, None]], 1.0, False),
        ([[None, None], [None, None]], 1.0, True),
    ],
)
def test_a_run_ends_over_the_limit_and_when_everything_failed(rewards, limit, ends):
    groups = groups_of(*rewards)
    if not ends:
        return check_failures(groups, limit)
    failed = sum(reward is None for group in rewards for reward in group)
    with pytest.raises(
        UserError, match=f"^{failed} of 4 answers have no .*max_failed_fraction = {limit:g}: "
    ) as caught:
        check_failures(groups, limit)
    example = "for example on 'two' as the answer to prompt 2: it raised OSError: down"
    assert str(caught.value).endswith(f'"judge" failed on {failed}, {example}')


def test_the_most_frequent_failure_is_shown():
    groups = groups_of([None, None]) + groups_of([None], why="returned nan")
    with pytest.raises(UserError, match=r'"judge" failed on 3, .* OSError: down$'):
        check_failures(groups, 0.5)
