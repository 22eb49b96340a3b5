"""The files and the table of an evaluation."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.evaluation.results import new_folder, remove_if_empty, table, write_answers, write_result
from torchtitan.grpo.rewards.runner import RewardRunner

PROMPT = Prompt(3, [1], "1+1=", "2")


def config(*flags: str) -> JobConfig:
    own = ["--model.hf_assets_path", str(TINY_QWEN3), "--reward.functions", "exact_match"]
    return load_config([*own, "--reward.answer_pattern", r"=(\d+)", *flags])


def sample(text: str, reward: float | None, end: str = "stop") -> Sample:
    """Its last token is an environment's."""
    return Sample(PROMPT, [5, 6, 7], [-0.5, -0.5, 0.0], [0, 0, 0], end, [True, True, False], text=text, reward=reward)


def answers(name: str = "") -> HeldOutAnswers:
    held_out = HeldOut(name, [PROMPT], samples=2, temperature=0.6, max_answer_tokens=4)
    return HeldOutAnswers(held_out, [[sample("=2", 1.0)]], [[sample("=2", 1.0), sample("=3", 0.0, "length")]])


def test_every_answer_is_a_line_with_what_was_found_in_it(tmp_path):
    with RewardRunner(config().reward) as runner:
        for of_set in (answers("first"), answers("second")):
            runner.find_finals([sample for group in of_set.groups for sample in group])
            write_answers(tmp_path, of_set, config())
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines[:3]] == ["greedy", "sampled", "sampled"]
    assert len(lines) == 6 and lines[3]["set"] == "second"
    assert lines[2] == {
        "set": "first",
        "kind": "sampled",
        "prompt_index": 3,
        "prompt": "1+1=",
        "answer": "=3",
        "final_answer": "3",
        "reference": "2",
        "reward": 0.0,
        "rewards": {},
        "reward_failures": {},
        "right": False,
        "finish_reason": "length",
        "answer_tokens": 2,
    }


def test_the_result_has_every_metric_and_the_configuration_that_makes_it_again(tmp_path):
    result = write_result(tmp_path, [answers()], config(), {"model": "m"})
    assert json.loads((tmp_path / "result.json").read_text()) == result and result["model"] == "m"
    of_set = result["sets"]["held-out"]
    assert of_set["metrics"]["pass_at_1"] == {"mean": 0.5, "standard_error": None}
    assert (of_set["truncated_answers"], of_set["samples_per_prompt"], of_set["temperature"]) == (1, 2, 0.6)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["reward"]["functions"] == ["exact_match"]
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "config.toml"}
    rows = [line.split() for line in table(result).splitlines()]
    assert rows[0][-2:] == ["standard", "error"] and ["held-out", "1", "pass_at_1", "0.5000", "-"] in rows


def test_a_folder_whose_name_is_no_utf_8_costs_no_result(tmp_path):
    folder = os.fsdecode(b"caf\xe9")
    result = write_result(tmp_path, [answers()], config("--job.dump_folder", folder), {"model": folder})
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert tomllib.loads((tmp_path / "config.toml").read_text())["job"]["dump_folder"] == r"caf\udce9"


def test_results_never_overwrite_others(tmp_path, monkeypatch):
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    assert new_folder(Path()) == Path(f"{tmp_path}-2")
    folders = [new_folder(tmp_path / "a" / "step-3").name for _ in range(3)]
    assert folders == ["step-3", "step-3-2", "step-3-3"]
    remove_if_empty(tmp_path / "a" / "step-3-2")
    assert new_folder(tmp_path / "a" / "step-3").name == "step-3-2"
    (tmp_path / "a" / "step-3-2" / "answers.jsonl").write_text("")
    remove_if_empty(tmp_path / "a" / "step-3-2")
    assert (tmp_path / "a" / "step-3-2").is_dir()
    (tmp_path / "b").write_text("")
    with pytest.raises(UserError, match=r"results cannot be written to .*b/step-3 \(Not a directory\): give an --out"):
        new_folder(tmp_path / "b" / "step-3")
