"""What a stranger does first: `pip install .`, then the commands from some other folder. No checkout on any path.

The wheel is installed into a folder that holds upstream's torchtitan too, as site-packages does. Processes start with
`python -S`, which leaves out whatever else this environment has installed in editable mode.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.ranks import free_port
from tests.helpers.trainer_runs import SMALL, steps
from torchtitan.grpo.commands.console import all_commands

CONFIGS = ROOT / "train_configs"
QUICKSTART = {
    "--job.config_file": str(CONFIGS / "quickstart.toml"),
    "--model.hf_assets_path": str(CONFIGS / "tiny_qwen3"),  # in the file it is relative to the checkout
}
ENTRY = "from importlib.metadata import entry_points\n[command] = entry_points(name='torchtitan-grpo')\n"
COMMAND = ["-c", f"{ENTRY}command.load()()"]
"""What pip's console script does."""
IN_TURN = f"""{ENTRY}
import json, os, sys
run = command.load()
import grpo_train, sft_train, torchtitan.grpo.commands.evaluate
for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv[1:] = words
        run()
    print(words[0], "ends with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""The same for one command line after another. Imports take longer than most of what they do, so they come first."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files in its tree."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "grpo_train.py", "sft_train.py", "torchtitan_overlay.py"):
        shutil.copy(ROOT / name, source)
    for name in ("torchtitan", "train_configs"):  # the first has a link to the second
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(built, check=True, timeout=240)
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the wheel and upstream's torchtitan in it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for path in upstream().iterdir():
        (folder / "torchtitan" / path.name).symlink_to(path)
    return folder


def upstream() -> Path:
    """The folder of upstream's package; in this process `torchtitan` has several."""
    spec = importlib.util.find_spec("torchtitan.components")
    return Path(next(iter(spec.submodule_search_locations))).parent


def python(site: Path, folder: Path, *words: object, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, with what is installed in `site` and this environment's other packages."""
    paths = os.pathsep.join([str(site), str(upstream().parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-S", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


def torchrun() -> list[object]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", 1, "--master-port", free_port()]


def words(flags: dict[str, str | None]) -> list[str]:
    return [word for flag in flags.items() for word in flag if word is not None]


def test_the_wheel_holds_the_project_and_nothing_of_upstream(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "torchtitan" / "grpo").rglob("*.py")}
    scripts = {"grpo_train.py", "sft_train.py", "torchtitan_overlay.py"}
    names_there = {"torchtitan/grpo/config/other_trainers.toml"}
    page = {f"torchtitan/grpo/commands/run_report/page.{kind}" for kind in ("html", "css", "js")}
    recipes = {f"torchtitan/grpo/recipes/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.*")}
    assert names == ours | scripts | names_there | page | {name for name in recipes if "__pycache__" not in name}


def test_upstream_s_package_is_left_alone_if_it_comes_first(site: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("upstream's torchtitan/__init__.py needs Triton")
    done = python(site, tmp_path, "-c", "import torchtitan, grpo_train; print(torchtitan.__version__)")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run. Its embedded server and its reward workers are processes that start anew."""
    if torch.cuda.is_available():
        pytest.skip("trains on the CPU")
    folder = tmp_path_factory.mktemp("elsewhere")
    flags = SMALL | QUICKSTART | {"--job.dump_folder": "run", "--training.steps": "1", "--rollout.record_gib": "1"}
    flags |= {"--reward.functions": "exact_match", "--reward.workers": "2"}  # the tests are not installed
    done = python(site, folder, *torchrun(), "--no-python", sys.executable, "-S", *COMMAND, "train", *words(flags))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "run"


def test_an_installed_run_trains(trained: Path) -> None:
    [step] = steps(trained)
    assert step["reward/failures"] == 0


def test_every_command_runs(site: Path, trained: Path, tmp_path: Path) -> None:
    """Those that would start servers stop at their first refusal: by then they have imported what they need."""
    lines: dict[str, tuple[list[object], int, str]] = {
        "--version": ([], 0, "torchtitan-grpo 0."),
        "env": ([], 0, f"python    {platform.python_version()} in "),
        "recipes": (["sft_quickstart.toml"], 0, "wrote train_configs/tiny_qwen3"),
        "train": (["--dry_run", *words(QUICKSTART)], 0, "parameters"),
        "sft": (["--job.config_file", "train_configs/sft_quickstart.toml", "--dry_run"], 0, "parameters"),
        "evaluate": (["nowhere"], 2, ""),
        "report": ([trained, "-o", "report.html"], 0, "wrote report.html"),
        "samples": ([trained], 0, "step 1  prompt "),
        "plot": ([trained], 0, "wrote metrics.png"),
        "smollm2": (["train_configs"], 2, ""),
        "serve": (["vllm", "model", "--host", "0.0.0.0"], 2, ""),
        "replay": ([trained, *words(SMALL | QUICKSTART)], 0, "trained tokens"),
    }
    given = json.dumps([[name, *map(str, more)] for name, (more, _, _) in lines.items()])
    done = python(site, tmp_path, "-c", IN_TURN, given)
    _, commands = all_commands()
    assert set(commands.choices) == lines.keys() - {"--version"}
    said = done.stdout
    for name, (_, status, says) in lines.items():
        own, ended, said = said.partition(f"{name} ends with {status}\n")
        assert ended and says in own, f"{name}: {own}\n{done.stderr[-4000:]}"
    for refused in ("nowhere", "train_configs is there and is not SmolLM2", "--host '0.0.0.0' opens"):
        assert refused in done.stderr
