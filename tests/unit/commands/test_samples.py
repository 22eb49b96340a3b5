"""`torchtitan-grpo samples`: which samples it shows, and how."""

import json
import os
import shlex
import subprocess

import pytest

from tests.helpers import COMMAND, ROOT
from torchtitan.grpo.commands import console
from torchtitan.grpo.commands.samples import marked


@pytest.fixture
def samples(tmp_path):
    lines = [
        {
            "step": step,
            "prompt_index": 7,
            "prompt": "<user>1+1=\nin digits",
            "answer": f"answer of step {step}",
            "reference": "2",
            "reward": reward,
            "rewards": {"exact_match": 0.0},
            "reward_failures": {} if reward is not None else {"judge": "raised OSError: down"},
            "advantage": 0.5,
            "finish_reason": "stop",
            "answer_tokens": 3,
            "versions": [step - 1, step],
        }
        for step, reward in ((1, 0.0), (2, 1.0), (3, 0.25), (4, None))
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "pro')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ([], [1, 2, 3, 4]),
        (["--step", "2"], [2]),
        (["--step", "-1"], [4]),
        (["--min-reward", "0.2"], [2, 3]),
        (["--min-reward", "0.2", "--max-reward", "0.9"], [3]),
        (["--max-reward", "0.9"], [1, 3]),
        (["--limit", "1"], [4]),
    ],
)
def test_filters(samples, arguments, steps, capsys):
    assert console.run(["samples", str(samples), *arguments]) == 0
    said = capsys.readouterr().out
    assert [step for step in (1, 2, 3, 4) if f"answer of step {step}" in said] == steps
    assert ("reward none" in said) == ("judge raised OSError: down" in said) == (4 in steps)
    assert "\033[" not in said
    assert "prompt | <user>1+1=\n            | in digits\n" in said


def test_what_an_environment_wrote_is_marked():
    assert marked("<2*3>6\n<6+1>7\n7", [[5, 7], [12, 14]]) == "<2*3>«6»\n<6+1>«7»\n7"
    assert marked("7", []) == "7"


def test_what_is_missing_is_named(samples, tmp_path, capsys):
    assert console.run(["samples", str(samples), "--min-reward", "2"]) == 2
    assert capsys.readouterr().err == "error: no sample passes these filters\n"
    assert console.run(["samples", str(tmp_path / "elsewhere")]) == 2
    assert "[metrics] samples_per_step" in capsys.readouterr().err
    (tmp_path / "answers.jsonl").write_text('{"set": "", "answer": "2", "reward": 1.0}\n')
    assert console.run(["samples", str(tmp_path / "answers.jsonl")]) == 2
    assert "answers.jsonl holds no samples of a run" in capsys.readouterr().err
    (samples / "samples.jsonl").write_text("")
    assert console.run(["samples", str(samples)]) == 2
    assert "samples.jsonl holds no samples of a run, or none yet" in capsys.readouterr().err


def test_samples_of_a_validation(samples, capsys):
    held_out = [json.loads(line) for line in (samples / "samples.jsonl").read_text().splitlines()[:3]]
    for sample in held_out:
        del sample["advantage"]
        sample |= {"kind": "greedy", "answer": f"held-out, {sample['answer']}"}
    (samples / "validation_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    assert console.run(["samples", str(samples), "--validation", "--step", "-1"]) == 0
    said = capsys.readouterr().out
    assert "held-out, answer of step 3" in said and "  greedy  " in said
    assert "answer of step 2" not in said and "advantage" not in said


def test_what_a_terminal_cannot_show_is_written_out(samples):
    line = (samples / "samples.jsonl").read_text().splitlines()[0].replace("answer of", "\u7b54 of")
    (samples / "samples.jsonl").write_text(line + "\n")
    in_latin = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*COMMAND, "samples", samples], cwd=ROOT, env=in_latin, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"") and rb"answer | \u7b54 of step 1" in done.stdout


def test_a_reader_that_ends_early_ends_the_command(samples):
    (line, *_) = (samples / "samples.jsonl").read_text().splitlines(keepends=True)
    (samples / "samples.jsonl").write_text(1000 * line)
    head = f"{shlex.join(COMMAND)} samples {samples} --limit 0 | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {head}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("step 1  prompt 7  ")
