"""`--check`: the task of a run is read and tried by the run's own code, and nothing is left behind."""

import json
import logging
import os
import re
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

import grpo_train
import sft_train
from tests.helpers import TINY_QWEN3
from tests.helpers.forked_rollouts import ForkedBesides
from tests.helpers.ranks import begin_imports
from torchtitan.grpo.checkpoint.marker import Marker
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.run import rollout_process, script
from torchtitan.grpo.run.rollouts import Rollouts

TEMPLATE = "{% for m in messages %}<bos>{{ m.content }}<eos>\n{% endfor %}"
MODEL = ["--model.hf_assets_path", str(TINY_QWEN3), "--model.weights", "random", "--job.dump_folder", "run"]
SHORT = ["--training.seq_len", "64", "--data.max_prompt_tokens", "16", "--rollout.max_answer_tokens", "8"]
ROWS = [*MODEL, *SHORT, "--training.mixed_precision_param", "float32", "--data.source", "jsonl"]
ROWS += ["--data.path", "rows.jsonl", "--data.chat_template_file", "t.jinja"]
HELD_OUT = ["--validation.enable", "--validation.prompts", "2"]
SUMS = ["1+1=", "2+1=", "1+2=" * 8, "3+1=", "4+1=", "1+1="]
"""One is too long, and the last two are held out, of which one repeats the first."""


@pytest.fixture
def begun() -> list[ForkedBesides]:
    """The rollout processes of a test."""
    return []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[ForkedBesides]) -> Path:
    def start(descriptor: int, hides_torch: bool = True) -> ForkedBesides:
        begun.append(ForkedBesides(descriptor, hides_torch))
        return begun[-1]

    begin_imports()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    monkeypatch.setattr(script, "init_log_lines", lambda: None)
    monkeypatch.setattr(rollout_process, "start", start)  # its imports take two seconds
    monkeypatch.delenv("RANK", raising=False)
    rows = [{"question": question, "answer": str(eval(question[:3]))} for question in SUMS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return tmp_path


def test_a_check_prints_counts_a_prompt_and_rewards_and_leaves_nothing(
    folder: Path, begun: list[ForkedBesides], capfd: pytest.CaptureFixture
):
    files = set(folder.rglob("*"))
    assert grpo_train.main([*ROWS, *HELD_OUT, "--check", "h100"]) == 0
    said = re.sub(r"in 0\.\d{3} s", "in 0.000 s", capfd.readouterr().out)
    tomllib.loads(said)  # nothing else is on stdout
    assert said.endswith(
        "# rows\n"
        "#   rows.jsonl: 6 rows read, 2 held out, 1 with a held-out question, 1 too long (over "
        "[data] max_prompt_tokens = 16), 2 to train on\n"
        "#   held-out set: 2 rows\n"
        "# first prompt, 7 tokens\n"
        "#   <bos>2+1=<eos>\\n\n"
        "# rewards of answers to the first prompt\n"
        "#        1 in 0.000 s  the row's own answer, '3': exact_match 1\n"
        "#        0 in 0.000 s  another row's answer, '4': exact_match 0\n"
        "#        0 in 0.000 s  an empty answer, '': exact_match 0\n"
        "# Read: the task and config.json of the model. No weights and no server were looked at\n"
    )
    assert "memory of one rank on H100" in said and "# GPUs: 2 in all" in said, "and the plan"
    assert set(folder.rglob("*")) == files and [each.poll() for each in begun] == [0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.path", "no.jsonl"], "no.jsonl"),
        (["--data.max_prompt_tokens", "2"], "Every prompt of rows.jsonl is over [data] max_prompt_tokens = 2"),
        (["--reward.functions", "task:none"], "[reward] functions: "),
        (["--reward.functions", "task:broken"], "gave no score to any of"),
        (["--reward.secrets", "NO_SUCH_KEY"], "[reward] secrets"),
        (["--rollout.environment", "task:nowhere"], "[rollout] environment: "),
        (["--grpo.policy_loss", "task:broken"], "[grpo] policy_loss"),
        (["--data.chat_template_file", "no.jinja"], "[data] chat_template_file"),
        (["--model.hf_assets_path", "."], "config.json"),
    ],
)
def test_what_a_run_would_refuse_a_check_refuses(folder: Path, capfd: pytest.CaptureFixture, flags, words):
    (folder / "task.py").write_text("def broken(answer, prompt):\n    raise ValueError('never')\n")
    kept = [word for pair in zip(ROWS[::2], ROWS[1::2], strict=True) for word in pair if pair[0] not in flags]
    assert grpo_train.main([*kept, *flags, "--check", "h100"]) == 2
    captured = capfd.readouterr()
    error = captured.err[captured.err.rfind("error: ") :]
    assert words in error and "Traceback" not in captured.err and not captured.out
    assert not (folder / "run").exists()


@pytest.mark.parametrize(("dump", "status"), [("run", 0), (".", 2)])
def test_the_warm_start_of_a_run_that_goes_on_is_not_checked(folder: Path, capfd: pytest.CaptureFixture, dump, status):
    saved = folder / "run" / "checkpoint" / "step-2"
    saved.mkdir(parents=True)
    Marker(2, 1, 1.0, ["model"], {}, 2, {}).write(saved)
    flags = [*ROWS[:4], *ROWS[6:], "--job.dump_folder", dump, "--checkpoint.resume", "auto"]
    flags += ["--sft.steps", "1", "--sft.target_column", "none"]
    assert grpo_train.main([*flags, "--check", "h100"]) == status, capfd.readouterr().err
    assert status == 0 or "[sft] target_column" in capfd.readouterr().err


def test_a_check_of_conversations_shows_what_is_learned(folder: Path, capfd: pytest.CaptureFixture):
    assert sft_train.main([*ROWS, *HELD_OUT, "--optimizer.lr", "1e-5", "--training.steps", "1", "--check"]) == 0
    said = capfd.readouterr().out
    assert "6 rows read, 2 held out, 1 with a held-out question, 0 too long (over [training] seq_len = 64)" in said
    assert "# first conversation, 9 tokens\n#   <bos>2+1=<eos>\\n\n#   3<eos>\n# of which it learns 2 tokens\n" in said
    assert "#   3<eos>\n# Read: the task and" in said and "rewards of" not in said and not (folder / "run").exists()


def test_a_run_logs_the_same_once(folder: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    config = load_config([*ROWS, *HELD_OUT, "--rollout.processes", "2"])
    source = resolve_model(config.model, 64)
    with ExitStack() as resources:
        given = source, load_tokenizer(str(TINY_QWEN3), "t.jinja"), [2]
        Rollouts(config, resources).prepare(*given)
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("rows\n"))
    assert "6 rows read, 2 held out" in line and line.endswith("first prompt, 7 tokens\n  <bos>2+1=<eos>\\n")


def test_other_ranks_print_nothing(folder: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    os.unlink("rows.jsonl")  # nor do they read
    assert grpo_train.main([*ROWS, "--check", "h100"]) == 0 and not capfd.readouterr().out
