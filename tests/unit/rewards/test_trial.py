"""A right, a wrong and an empty answer: what is tried, and what is said of it."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rewards.trial import trial_lines

FIRST = Prompt(0, [1], "2+1=", "3", {"answer": "Add. #### 3"})
OTHER = Prompt(1, [1], "2+2=", "4", {"answer": "Add. #### 4"})

START_S = 1.5

FUNCTIONS = """
import time
def slow(answer, prompt):
    time.sleep(0.05)
    if not answer:
        raise ValueError("no answer")
    return 0.5
def of_group(answers, prompt):
    time.sleep(0.05)
    return [len(answers) + i for i, _ in enumerate(answers)]
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Functions in a module that imports at once, and in one that a worker imports for longer than it scores."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "trial_functions.py").write_text(FUNCTIONS)
    slow_import = f"import sys\nif 'pytest' not in sys.modules:\n    time.sleep({START_S})\n"
    (folder / "late_functions.py").write_text(FUNCTIONS + slow_import)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def said(prompts: list[Prompt], *flags: str) -> list[str]:
    config = load_config(["--model.hf_assets_path", str(TINY_QWEN3), "--reward.workers", "1", *flags])
    with RewardRunner(config.reward) as rewards:
        rewards.check(prompts)
        return trial_lines(config, rewards, prompts)


def test_the_column_is_tried_where_the_pattern_needs_what_is_around_the_answer():
    pattern = ["--reward.functions", "numeric_match", "--reward.answer_pattern", "#### (.+)"]
    title, *lines = said([FIRST, OTHER], *pattern)
    assert title == "rewards of answers to the first prompt"
    assert [line.split(" s  ")[1] for line in lines] == [
        "the row's own answer, '3': numeric_match 0",
        "the row's own column 'answer', 'Add. #### 3': numeric_match 1",
        "another row's answer, '4': numeric_match 0",
        "an empty answer, '': numeric_match 0",
    ]
    unknown = "I do not know."
    alike = [replace(each, answer=unknown, columns={"answer": unknown}) for each in (FIRST, OTHER)]
    tried = said(alike, "--reward.functions", "exact_match")[1:]
    assert [re.sub(r"0\.\d{3} s", "0.000 s", line) for line in tried] == [
        "       1 in 0.000 s  the row's own answer, 'I do not know.': exact_match 1",
        "       0 in 0.000 s  a wrong answer, 'I do not know.I do not know.': exact_match 0",
        "       0 in 0.000 s  an empty answer, '': exact_match 0",
    ]
    bare = [replace(each, columns={"answer": each.answer}) for each in (FIRST, OTHER)]
    assert said(bare, *pattern)[-1].startswith("  the row's own answer gets NO more than others")


def test_each_answer_has_its_seconds_and_failures_are_named():
    lines = said([FIRST, replace(OTHER, answer="3")], "--reward.functions", "late_functions:slow")
    assert lines[3].endswith("a wrong answer, 'I do not know.': late_functions:slow 0.5")
    assert lines[4].startswith("    none in ") and "slow raised ValueError: no answer" in lines[4]
    assert all(0.05 <= float(line.split()[2]) < START_S for line in lines[1:5]), "without the start of the worker"
    assert lines[5] == "  an answer on which a function fails is left out: return 0 for a wrong one"


def test_a_function_of_groups_gets_the_answers_at_once():
    lines = said([FIRST, OTHER], "--reward.functions", "trial_functions:of_group,exact_match")
    assert [line.split()[0] for line in lines[1:5]] == ["5", "5", "6", "7"]
    assert len({line.split()[2] for line in lines[1:5]}) == 1, "the seconds of the group"
    assert lines[1].endswith("trial_functions:of_group 4, exact_match 1") and "gets NO more" in lines[5]


def test_without_answers_or_functions_it_says_what_was_not_tried():
    blank = [replace(each, answer="", columns={}, functions=()) for each in (FIRST, OTHER)]
    lines = said(blank, "--reward.functions", "trial_functions:slow")
    assert lines[-1] == "  the data has no answer, so no right one was tried" and len(lines) == 5
    (line,) = said(blank, "--reward.functions", "", "--rollout.environment", "a:b")
    assert line == "rewards: none are tried, since [reward] functions is empty"


def test_each_source_has_answers_of_its_own():
    sources = [replace(FIRST, source="a"), replace(OTHER, source="a"), replace(OTHER, source="b")]
    titles = [line for line in said(sources) if line.startswith("rewards")]
    assert titles == [f'rewards of answers to the first prompt of "{name}"' for name in "ab"]
