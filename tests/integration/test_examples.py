"""Each folder of examples/: what its README says, for a few steps on a tiny model."""

import importlib.util
import itertools
import json
import random
import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import embedded_url, environment, steps
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.environments.calculator import calculate

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/run.toml"))
FEW = {
    "--model.hf_assets_path": TINY_QWEN3,
    "--training.steps": 2,
    "--validation.prompts": 8,
    "--metrics.no-enable_tensorboard": None,
    "--metrics.samples_per_step": 1000,
}


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of an example's folder, as a user would begin a task with it; it is the current one."""
    folder = shutil.copytree(ROOT / "examples" / request.param, tmp_path / request.param)
    monkeypatch.chdir(folder)
    return folder


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(folder: Path, script: str, name: str, flags: dict[str, object]) -> Path:
    """Run grpo_train.py or sft_train.py in the example's folder. Returns the folder of the run."""
    out = folder / name
    given = {"--job.config_file": "run.toml", "--job.dump_folder": out} | FEW | flags
    if script == "grpo_train.py":
        given = {"--rollout.urls": embedded_url(), "--grpo.prompts_per_step": 8, "--grpo.group_size": 4} | given
    words = [word for flag in given.items() for word in flag if word is not None]
    log = folder / f"{name}.log"
    Ranks(1, ROOT / script, *words, log=log, cwd=folder, environment=environment()).check()
    return out


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("example", ["own_rows"], indirect=True)
def test_own_rows_are_scored_by_the_function_beside_them(example):
    runpy.run_path("make_rows.py")
    rows = json_lines(Path("rows.jsonl"))
    assert len({row["question"] for row in rows}) == len(rows) > 1900
    right = sum(row["draft"] == row["answer"] for row in rows) / len(rows)
    assert 0.30 < right < 0.40 and all(sorted(row["answer"]) == list(row["answer"]) for row in rows)

    score = module(example / "my_reward.py").letters_in_place
    out = run(example, "grpo_train.py", "run", {"--sft.steps": 5})
    samples = json_lines(out / "samples.jsonl")
    assert len(steps(out)) == 2 and len(samples) == 2 * 8 * 4
    row = type("Row", (), {})()
    for sample in samples:
        row.answer = sample["reference"]
        assert sample["reward"] == pytest.approx(score(sample["answer"], row))
    row.answer = "abc"
    assert [score(answer, row) for answer in ("abc", "acb", "ab", "abcdef", "")] == [1, 1 / 3, 2 / 3, 1 / 2, 0]


@pytest.mark.parametrize("example", ["guess_the_number"], indirect=True)
def test_a_game_has_held_out_numbers_and_its_signs_are_right(example):
    game = module(example / "game.py")
    config = load_config(["--job.config_file", "run.toml", "--model.hf_assets_path", str(TINY_QWEN3)])
    tokenizer, rows = load_tokenizer(str(TINY_QWEN3)), {"": game.Game().rows}
    [held_out] = load_held_out(config, tokenizer, rows=rows)
    trained = load_training(config, tokenizer, [held_out], rows=rows).next(len(rows[""]))
    secrets = [{prompt.columns["secret"] for prompt in prompts} for prompts in (held_out.prompts, trained)]
    assert list(map(len, secrets)) == [24, 40] and not secrets[0] & secrets[1]
    compared = {"213": "===", "231": "=..", "2": "=..", "": "...", "3213": "..."}
    assert {guess: game.compare(guess, "213") for guess in compared} == compared
    for secret in ("111", "423"):
        played = game.forgetful_game(secret, random.Random(1))
        guesses = [played[i : i + 3] for i in range(0, len(played), 6)]
        assert [played[i + 3 : i + 6] for i in range(0, len(played), 6)] == [game.compare(g, secret) for g in guesses]
        for one, other in itertools.pairwise(guesses):
            assert all(b == c for a, b, c in zip(one, other, secret, strict=True) if a == c), "right digits are kept"

    args = '{"held_out": 8, "games": 4}'
    out = run(example, "grpo_train.py", "run", {"--sft.steps": 20, "--rollout.environment_args": args})
    validated = json_lines(out / "validation_samples.jsonl")
    assert len(steps(out)) == 2 and all("validation/greedy_reward" in line for line in steps(out)[-1:])
    for sample in [*json_lines(out / "samples.jsonl"), *validated]:
        signs = [sample["answer"][first:end] for first, end in sample["given"]]
        assert sample["reward"] == pytest.approx(signs[-1].count("=") / 3) and len(signs) <= 4
        assert all(re.fullmatch("[=.]{3}", each) for each in signs) and "===" not in signs[:-1]


@pytest.mark.parametrize("example", ["calculator"], indirect=True)
def test_the_calculator_is_learned_from_rows_and_then_by_reward(example):
    runpy.run_path("make_rows.py")
    rows = json_lines(Path("rows.jsonl"))
    calls = [row for row in rows if row["calculation"] != row["answer"]]
    assert len(calls) == len(rows) / 8
    for row in calls:
        expression, result, answer = re.fullmatch(r"<(.+)>(.+)\n(.+)", row["calculation"]).groups()
        assert calculate(expression) == result == answer == row["answer"]

    config = load_config(["--job.config_file", "run.toml", "--model.hf_assets_path", str(TINY_QWEN3)], dry_run="")
    assert config.rollout.engine == "vllm" and config.rollout.colocate, "below are other servers"
    longer = {"--training.seq_len": 400, "--data.max_prompt_tokens": 300}  # one token per character
    longer |= {"--training.mixed_precision_param": "float32", "--validation.prompts": 2}
    sft = {"--model.weights": "random", "--optimizer.lr": "1e-3", "--sft.batch_size": 8}
    out = run(example, "sft_train.py", "sft", longer | sft)
    rewards = "numeric_match,tests.helpers.rewards:varied"  # no step is without advantages
    on_cpu = {"--rollout.engine": "embedded", "--rollout.no-colocate": None, "--reward.functions": rewards}
    on_cpu |= {"--model.hf_assets_path": out / "checkpoint" / "step-2" / "hf", "--training.steps": 1}
    on_cpu |= {"--grpo.prompts_per_step": 2}
    out = run(example, "grpo_train.py", "rl", longer | on_cpu)
    [line] = steps(out)
    assert line["train/grad_norm"] > 0 and "validation/pass_at_4" in line


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_readmes_show_a_small_picture_and_name_files_that_exist(folder):
    text = re.sub("<!--.*?-->", "", (folder / "README.md").read_text(), flags=re.DOTALL)  # gaps are comments
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures and all((folder / name).stat().st_size < 60 * 1024 for name in pictures)
    for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (folder / name).exists(), name
