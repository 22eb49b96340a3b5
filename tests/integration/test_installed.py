"""What a stranger does first: `pip install .`, then the script from some other folder. No checkout on any path.

The wheel is installed into a folder that holds upstream's torchtitan too, as site-packages does. Processes start with
`python -S`, which leaves out whatever else this environment has installed in editable mode.
"""

import importlib.util
import os
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

CONFIGS = ROOT / "train_configs"
QUICKSTART = {
    "--job.config_file": str(CONFIGS / "quickstart.toml"),
    "--model.hf_assets_path": str(CONFIGS / "tiny_qwen3"),  # in the file it is relative to the checkout
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files in its tree."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "grpo_train.py", "sft_train.py", "torchtitan_overlay.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "torchtitan", source / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
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
    assert names == ours | scripts


def test_upstream_s_package_is_left_alone_if_it_comes_first(site: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("upstream's torchtitan/__init__.py needs Triton")
    done = python(site, tmp_path, "-c", "import torchtitan, grpo_train; print(torchtitan.__version__)")
    assert done.returncode == 0, done.stderr


def test_torchrun_plans_a_run_from_any_folder(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, *torchrun(), "-m", "grpo_train", "--dry_run", *words(QUICKSTART))
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the CPU")
def test_an_installed_run_trains(site: Path, tmp_path: Path) -> None:
    """With an embedded server and reward workers of its own, which are processes that start anew."""
    flags = SMALL | QUICKSTART | {"--job.dump_folder": str(tmp_path / "run"), "--training.steps": "1"}
    flags |= {"--reward.functions": "exact_match", "--reward.workers": "2"}  # the tests are not installed
    done = python(site, tmp_path, *torchrun(), site / "grpo_train.py", *words(flags))
    assert done.returncode == 0, done.stderr[-4000:]
    [step] = steps(tmp_path / "run")
    assert step["reward/failures"] == 0
