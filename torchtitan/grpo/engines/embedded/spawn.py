"""An embedded server as a child process of the trainer."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.errors import UserError

_LOG_TAIL_CHARS = 3000
_POLL_S = 0.05
_PACKAGE_ROOT = str(Path(__file__).parents[3])
_PROGRAM = "import torchtitan_overlay; from torchtitan.grpo.engines.embedded.__main__ import main; main()"
"""`python -m torchtitan.grpo.engines.embedded`, but without upstream's `torchtitan/__init__.py`."""


def choose_device(embedded_device: str, trainer: torch.device, trainers_here: int) -> tuple[str, bool]:
    """Where the embedded server runs, and whether NCCL can reach it. NCCL does not join two processes on one GPU.

    Args:
        embedded_device: `[rollout] embedded_device`. On CUDA the server takes the first GPU that no trainer process
            has. If there is none, it shares rank 0's.
        trainers_here: Trainer processes on this machine. Process i has GPU i.
    """
    kind = trainer.type if embedded_device == "auto" else embedded_device
    if kind == "cpu":
        return "cpu", False
    own_gpu = torch.cuda.device_count() > trainers_here
    return f"cuda:{trainers_here if own_gpu else trainer.index or 0}", own_gpu and trainer.type == "cuda"


class EmbeddedServer:
    """One embedded server. `start` it, use it at `url`, `close` it. It exits when this process is gone."""

    def __init__(self) -> None:
        self.url = ""
        self.process: subprocess.Popen | None = None

    def start(self, model_dir: str | Path, rollout: Rollout, device: str, log_path: str | Path) -> str:
        """Start a server for the Hugging Face folder `model_dir` (weights optional) and wait until it serves.

        Args:
            rollout: `embedded_dtype`, `embedded_max_sequences`, `api_key_env` and `start_timeout_seconds` are used.
            device: "cpu" or "cuda:N"; see `choose_device`.
            log_path: Where the server's output goes.

        Returns:
            The server's base address.

        Raises:
            UserError: It did not start in time. The message ends with the end of its log.
        """
        log_path = Path(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="embedded-server-") as folder:
            ready = Path(folder) / f"{secrets.token_hex(8)}.json"
            command = embedded_command(model_dir, rollout, device)
            command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
            with log_path.open("ab") as log:
                # A process group of its own: Ctrl-C reaches only the trainer, which then closes the server. Not a
                # session of its own: Linux first divides the cores among sessions (sched_autogroup_enabled).
                self.process = subprocess.Popen(
                    command, env=server_environment(), stdout=log, stderr=subprocess.STDOUT, process_group=0
                )
            deadline = time.monotonic() + rollout.start_timeout_seconds
            while not ready.exists():
                if self.process.poll() is not None:
                    self._fail(f"ended with exit status {self.process.returncode}", log_path)
                if time.monotonic() > deadline:
                    self.close(grace_s=0.0)
                    self._fail(
                        f"did not serve within {rollout.start_timeout_seconds:g} s ([rollout] start_timeout_seconds)",
                        log_path,
                    )
                time.sleep(_POLL_S)
            self.url = json.loads(ready.read_text())["url"]
        return self.url

    def close(self, grace_s: float = 10.0) -> None:
        """Stop the server: SIGTERM, and SIGKILL after `grace_s`. Does nothing if it is not running."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "EmbeddedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, what: str, log_path: Path) -> None:
        tail = log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        raise UserError(f"the embedded server {what}; its log {log_path} ends with:\n{tail}")


def embedded_command(model_dir: str | Path, rollout: Rollout, device: str) -> list[str]:
    """The command line of an embedded server, without its port. Arguments as for `EmbeddedServer.start`."""
    dtype = rollout.embedded_dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    command = [sys.executable, "-c", _PROGRAM, "--model", str(model_dir), "--device", device, "--dtype", dtype]
    command += ["--max-sequences", str(rollout.embedded_max_sequences)]
    return [*command, *(["--api-key-env", rollout.api_key_env] if rollout.api_key_env else [])]


def server_environment() -> dict[str, str]:
    """This process's environment without torchrun's variables, and with this package importable.

    OpenMP threads sleep instead of spinning while they wait. Trainer and server share the cores, and on 2 busy cores
    more spinning threads than cores made decoding 10 times slower.
    """
    env = without_torchrun(os.environ)
    env.setdefault("OMP_WAIT_POLICY", "passive")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_ROOT, env.get("PYTHONPATH")]))
    return env


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that torchrun gives to its workers."""
    names = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    names |= {"GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
    return {k: v for k, v in environ.items() if k not in names and not k.startswith("TORCHELASTIC_")}
