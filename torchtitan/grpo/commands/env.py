"""What a report of a bug should say of the machine, as lines to paste."""

import json
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

import torch

from torchtitan.grpo.process.server_commands import COMMANDS, ROOT

PACKAGES = ("torch", "torchtitan", "transformers", "datasets", "numpy", "safetensors", "ray")
LIMIT_S = 60.0

_VERSIONS = """
import importlib.metadata, json, sys
names = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
print(json.dumps({name: names[name] for name in sys.argv[1:] if name in names}))
"""


def main(arguments: Namespace) -> int:
    for name, said in lines():
        print(f"{name:<16} {said}")
    return 0


def lines() -> Iterator[tuple[str, str]]:
    """Names with what to say of them."""
    yield "torchtitan-grpo", f"{_version('torchtitan-grpo')}{_commit()}"
    yield "python", f"{platform.python_version()} in {sys.prefix}"
    yield "system", f"{platform.platform()}, {platform.machine()}"
    for name in PACKAGES:
        yield name, _version(name)
    yield "CUDA of torch", str(torch.version.cuda or "none")
    for engine, command in COMMANDS.items():
        if not command.bundled:
            python = command("", gpus=None if torch.cuda.is_available() else ()).found_python()
            yield engine, _in(python, engine, f"{engine}-cpu", "torch", "transformers", "torchtitan-grpo")
    yield "GPUs", _gpus()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the checkout, or of the one that pip installed, "" if it is not known."""
    if (ROOT / ".git").exists():
        return f", {_said('git', '-C', str(ROOT), 'describe', '--always', '--dirty')} in {ROOT}"
    told = json.loads(distribution("torchtitan-grpo").read_text("direct_url.json") or "{}")
    return f", {told.get('vcs_info', {}).get('commit_id', told['url'])}" if told else ""


def _in(python: str, engine: str, *packages: str) -> str:
    """The versions that an engine's Python has."""
    said = _said(python, "-c", _VERSIONS, engine, *packages)
    found = json.loads(said) if said.startswith("{") else {}
    names = ", ".join(f"{name} {number}" for name, number in found.items())
    has_engine = any(name.startswith(engine) for name in found)
    return f"{names or said} ({python})" if has_engine or not found else f"not in {python}"


def _gpus() -> str:
    """Of each kind how many, with memory and driver."""
    query = "--query-gpu=name,memory.total,driver_version"
    rows = _said("nvidia-smi", query, "--format=csv,noheader").splitlines()
    kinds = [f"{rows.count(row)} x {row}" if "," in row else row for row in dict.fromkeys(rows)]
    return f"torch sees {torch.cuda.device_count()}; nvidia-smi: {'; '.join(kinds)}"


def _said(*command: str) -> str:
    """What a command prints, or in a line why it does not."""
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({type(error).__name__})"
    return done.stdout.strip() or " ".join(done.stderr.split())[-200:]
