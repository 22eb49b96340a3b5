"""`torchtitan-grpo` itself: help, wrong arguments, completion, and the commands that no other file here tests."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import COMMAND, ROOT
from torchtitan.grpo.commands import console
from torchtitan.grpo.commands.recipes import RECIPES


def test_help_imports_nothing_but_the_standard_library():
    _, commands = console.all_commands()
    code = f"""
import sys
import torchtitan_overlay
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
from torchtitan.grpo.commands.console import run
for words in (["--help"], *([name, "--help"] for name in {list(commands.choices)})):
    try:
        run(words)
    except SystemExit as end:
        print("status", end.code)
"""
    wide = os.environ | {"COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=wide, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert [line for line in done.stdout.splitlines() if len(line) > 100] == []
    assert done.stdout.count("status 0\n") == 1 + len(commands.choices)
    assert done.stdout.count("usage: torchtitan-grpo ") == 1 + len(commands.choices)
    whole = done.stdout.partition("status")[0]
    assert all(f"    {name} " in whole for name in commands.choices)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "usage: torchtitan-grpo"),
        (["tarin"], 'there is no command tarin (did you mean "train"?)'),
        (["zzz", "outputs"], "there is no command zzz; --help lists all"),
        (["report", "outputs", "--last"], "usage: torchtitan-grpo report"),
        (["--last", "report", "outputs"], "unrecognized arguments: --last"),
        (["replay", "--job.config_file", "a.toml"], "a.toml is no folder: name that of a recorded run first"),
        (["replay", ".", "--dry_run"], "replay has no --dry_run and no --check"),
        (["replay", ".", "--after", "-1"], "--after -1 is no step"),
        (["recipes", "quickstrat.toml"], 'there is no recipe quickstrat.toml (did you mean "quickstart.toml"?)'),
        (["serve", "vllm", "--port", "8001", "model"], "serve ENGINE MODEL comes first"),
        (["serve", "embedded", "model"], "vllm or sglang"),
    ],
    ids=" ".join,
)
def test_a_wrong_line_ends_with_2_and_says_why(words, says, capsys):
    try:
        status = console.run(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert says in capsys.readouterr().err


def test_a_reader_that_has_enough_or_is_not_there_is_no_error_and_a_full_disk_is_one():
    read, write = os.pipe()
    os.close(read)
    at_once = os.environ | {"PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        for words, how, ends in (
            ("--version", {"stdout": write, "env": at_once}, (0, "")),
            ("recipes", {"stdout": write}, (0, "")),
            ("recipes", {"preexec_fn": lambda: os.close(1)}, (0, "")),
            ("recipes", {"stdout": full}, (2, "error: No space left on device\n")),
        ):
            done = subprocess.run([*COMMAND, words], stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, **how)
            assert (done.returncode, done.stderr) == ends
    os.close(write)


@pytest.mark.parametrize("command", ["report", "plot"])
def test_what_cannot_be_written_is_named(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    out = tmp_path / "out"
    out.mkdir()
    assert console.run([command, str(tmp_path), "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith(f"error: {out}: Is a directory\n")


def test_a_trainer_gets_its_words_as_they_are(monkeypatch):
    seen = []
    trainer = SimpleNamespace(main=lambda words: seen.extend(words) or 3)
    monkeypatch.setitem(sys.modules, "grpo_train", trainer)
    words = ["--job.config_file=x.toml", "--grpo.group_size", "4", "--dry_run", "h100", "--version"]
    assert console.run(["train", *words]) == 3
    assert seen == words


def test_a_recipe_comes_with_what_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert console.run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    listed = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in listed] == sorted(path.name for path in RECIPES.glob("*.toml"))
    assert all(len(line.split()) > 3 for line in listed)
    assert console.run(["recipes", "verifiers_sums.toml"]) == 0
    copied = tmp_path / "train_configs"
    assert {"verifiers_sums.toml", "verifiers_sums.py", "tiny_qwen3"} <= {path.name for path in copied.iterdir()}
    assert (copied / "tiny_qwen3" / "config.json").read_text() == (RECIPES / "tiny_qwen3/config.json").read_text()
    (copied / "tiny_qwen3" / "config.json").write_text("mine")
    assert console.run(["recipes", "verifiers_sums.toml"]) == 2
    assert "train_configs/verifiers_sums.toml is there already" in capsys.readouterr().err
    assert console.run(["recipes", "calculator.toml"]) == 0
    assert (copied / "tiny_qwen3" / "config.json").read_text() == "mine"


def test_env_tells_versions_of_another_python_too(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    monkeypatch.setenv("SGLANG_PYTHON", "/no/python")
    assert console.run(["env"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert f"torch {torch.__version__}, torchtitan 0.2.2, " in said["packages"] and said["from"].startswith(str(ROOT))
    assert said["vllm"] == f"{said['packages']}; in {sys.executable}", "it has no vLLM"
    assert said["sglang"] == "does not run (FileNotFoundError); in /no/python"


@pytest.mark.parametrize(("line", "offered"), [("rep", {"report", "replay"}), ("samples --v", {"--validation"})])
def test_the_shell_is_told_how_a_line_goes_on(line, offered, tmp_path):
    pytest.importorskip("argcomplete", reason="needs argcomplete: pip install argcomplete")
    typed = f"torchtitan-grpo {line}"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "offered")}
    subprocess.run(COMMAND, cwd=ROOT, env=os.environ | asked, check=True, timeout=60)
    assert {word.strip() for word in (tmp_path / "offered").read_text().split("\n")} == offered
