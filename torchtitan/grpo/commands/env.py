"""What a report of a bug should say of the machine, as lines to paste."""

import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator

import torch

from torchtitan.grpo.process.server_commands.command import ROOT, source
from torchtitan.grpo.process.server_commands.table import COMMANDS

PACKAGES = ("torchtitan-grpo", "torch", "torchtitan", "transformers", "datasets", "numpy", "safetensors", "ray")
LIMIT_S = 60.0

_VERSIONS = """
import importlib.metadata, sys
found = {each.name: each.version for each in importlib.metadata.distributions()}
print(", ".join(f"{name} {found[name]}" for name in sys.argv[1:] if name in found))
"""


def main(arguments: Namespace) -> int:
    for name, said in lines():
        print(f"{name:<9} {said}")
    return 0


def lines() -> Iterator[tuple[str, str]]:
    """Names with what to say of them."""
    gpus = torch.cuda.device_count()
    yield "python", f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"
    yield "packages", _said(sys.executable, "-c", _VERSIONS, *PACKAGES)
    commit = f", {_said('git', '-C', str(ROOT), 'describe', '--always', '--dirty')}" if (ROOT / ".git").exists() else ""
    yield "from", f"{source()}{commit}"
    for engine, command in COMMANDS.items():
        if not command.bundled:
            python = command("", gpus=None if gpus else ()).found_python()
            yield engine, f"{_said(python, '-c', _VERSIONS, engine, f'{engine}-cpu', *PACKAGES)}; in {python}"
    yield "GPUs", f"torch sees {gpus}, with CUDA {torch.version.cuda}"
    yield "driver", _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def _said(*command: str) -> str:
    """What a command prints, in one line, or why it does not."""
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({type(error).__name__})"
    return "; ".join((done.stdout.strip() or done.stderr.strip()[-200:]).splitlines())
