"""Real inference servers for the integration tests."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

REPO_ROOT = Path(__file__).parents[2]
VLLM_START_S = 180.0
PLUGIN_MODULE = "torchtitan.grpo.weight_sync.vllm_plugin"


@dataclass
class RunningServer:
    """A vLLM server on this machine: its address, the folder it loaded, its process and its log."""

    url: str
    model_dir: Path
    process: subprocess.Popen
    log_path: Path


def save_tiny_qwen3(folder: Path, *, vocab_size: int = 512, seed: int = 0, tied: bool = False) -> Path:
    """Write a random 2-layer Qwen3 (float32, about 0.2 M parameters) as a Hugging Face folder without tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # Larger than usual, so that the model has opinions and tests can tell one distribution from another.
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _plugin_path(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, declares this project's vLLM plug-in as if the project were installed."""
    info = folder / "torchtitan_grpo_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan-grpo-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ntorchtitan_grpo = {PLUGIN_MODULE}:register\n")
    return folder


def _wait_healthy(server: RunningServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = server.log_path.read_text(errors="replace")[-4000:]
    pytest.fail(
        f"vLLM at {server.url} was not healthy within {timeout_s:.0f} s (exit {server.process.poll()}):\n{tail}"
    )


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A vLLM CPU server with a tiny random Qwen3, processed log-probabilities, development routes and our plug-in.

    Needs the environment variable VLLM_PYTHON: a Python with vLLM.
    """
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("set VLLM_PYTHON to a Python that has vLLM (CPU build) to run this")
    folder = tmp_path_factory.mktemp("vllm")
    model_dir = save_tiny_qwen3(folder / "model")
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--max-num-seqs", "16", "--skip-tokenizer-init", "--enable-scale-out", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs"]
    search_path = [str(REPO_ROOT)]
    if (REPO_ROOT / (PLUGIN_MODULE.replace(".", "/") + ".py")).exists():
        search_path.append(str(_plugin_path(folder / "plugin")))
        command += ["--weight-transfer-config", json.dumps({"backend": "torchtitan_grpo"})]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(search_path),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    server = RunningServer(f"http://127.0.0.1:{port}", model_dir, process, log_path)
    try:
        _wait_healthy(server, VLLM_START_S)
        yield server
    finally:
        # The whole process group: vLLM's engine core is a child of the API server.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
