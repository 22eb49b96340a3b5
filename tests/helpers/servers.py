"""Real inference servers for the integration tests."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from process_group import ProcessGroup

from tests.helpers import COMMAND, ROOT
from tests.helpers.forked_engines import import_uncollected
from tests.helpers.ranks import Ranks, free_port
from tests.helpers.tiny_models import with_biases
from tests.helpers.trainer_runs import command_of, environment, processes_of, wait_healthy
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.servers.plan import launches
from torchtitan.grpo.servers.supervisor import Supervisor

START_S = 180.0
STOP_S = 20.0
PLUGIN_MODULE = "torchtitan.grpo.inside_vllm.plugin"
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""Of a vLLM server: its worker is in the engine's process, as it is with one GPU. On a CPU vLLM starts another process
for it, and each of the two spins while it waits for the other: every token takes twice the CPU time."""
TINY = {
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Larger than usual, so that the model has opinions and tests can tell one distribution from another.
    "initializer_range": 0.15,
}


@dataclass
class RunningServer:
    """A server on this machine: its address, the folder it loaded, its process and its log."""

    url: str
    model_dir: Path
    process: ProcessGroup | Ranks
    log_path: Path


def save_tiny_qwen3(
    folder: Path,
    *,
    hidden_size: int = 64,
    vocab_size: int = 512,
    seed: int = 0,
    tied: bool = False,
    positions: int = TINY["max_position_embeddings"],
) -> Path:
    """Write a random 2-layer Qwen3 (float32, about 0.2 M parameters) as a Hugging Face folder without tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    tiny = TINY | {"max_position_embeddings": positions}
    Qwen3ForCausalLM(
        Qwen3Config(**tiny, hidden_size=hidden_size, head_dim=32, vocab_size=vocab_size, tie_word_embeddings=tied)
    ).save_pretrained(folder)
    return folder


def save_tiny_qwen3_moe(folder: Path, *, hidden_size: int = 64, seed: int = 0, tied: bool = False) -> Path:
    """Write a random 2-layer Qwen3 mixture of experts (float32), of which vLLM's CPU kernels want even sizes.

    Each token goes through all experts: if it chose some, rounding would decide near ties, and engines would differ.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    experts = dict(num_experts=8, num_experts_per_tok=8, moe_intermediate_size=64, norm_topk_prob=True)
    config = Qwen3MoeConfig(
        **TINY, **experts, hidden_size=hidden_size, head_dim=32, vocab_size=512, tie_word_embeddings=tied
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def save_tiny_qwen2(folder: Path, *, vocab_size: int = 512, seed: int = 0, tied: bool = False) -> Path:
    """Write a random 2-layer Qwen2.5 (float32, with biases) as a Hugging Face folder without tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    # Twice as wide as the Qwen3: heads are as wide together as the model, and vLLM's CPU kernels want 32 each.
    config = Qwen2Config(**TINY, hidden_size=128, vocab_size=vocab_size, tie_word_embeddings=tied)
    with_biases(Qwen2ForCausalLM(config)).save_pretrained(folder)
    return folder


def plugin_path(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, declares this project's vLLM plug-in as if the project were installed."""
    return declare_plugin(folder, "vllm.general_plugins", "torchtitan_grpo", f"{PLUGIN_MODULE}:register")


def declare_plugin(folder: Path, group: str, name: str, function: str) -> Path:
    """Declare an entry point in `folder`, for which it must be on PYTHONPATH."""
    info = folder / f"{name}_declared-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-declared\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {function}\n")
    return folder


@contextmanager
def serve_command(
    command: list, folder: Path, model_dir: Path, port: int, **environment: str
) -> Iterator[RunningServer]:
    """The server that `command` starts at `port`, once it is healthy.

    In the tests' session: from one of its own (Linux shares cores out among sessions first, sched_autogroup_enabled) a
    vLLM that generated on two cores kept five processes of the tests from running at all for up to 9 s at a time.
    """
    process = ProcessGroup(command, folder / "server.log", {"OMP_NUM_THREADS": "1"} | environment)
    server = RunningServer(f"http://127.0.0.1:{port}", model_dir, process, process.log_path)
    try:
        try:
            wait_healthy(server.url, process, START_S)
        except Exception as error:
            pytest.fail(f"{error}\n{process.said()}")
        yield server
    finally:
        process.close(STOP_S)  # the engines' workers too, which would hold memory and cores while other tests run


@contextmanager
def serve_embedded(folder: Path, model_dir: Path, *flags: str) -> Iterator[RunningServer]:
    """An embedded server by itself, forked: its imports take most of its start. `folder` is for its log."""
    port = free_port()
    words = ["--model", model_dir, "--port", port, "--max-sequences", 16, *flags]
    variables = environment() | {"PYTHONPATH": str(ROOT)}
    process = Ranks(
        1, "torchtitan.grpo.engines.embedded", *words, log=folder / "server.log", environment=variables, found=False
    )
    server = RunningServer(f"http://127.0.0.1:{port}", model_dir, process, process.log_path)
    try:
        wait_healthy(server.url, process, START_S)
        yield server
    finally:
        process.kill()


@contextmanager
def serve_vllm(folder: Path, model_dir: Path, *flags: str) -> Iterator[RunningServer]:
    """A vLLM CPU server, as a user starts it. `folder` is for its log.

    Needs the environment variable VLLM_PYTHON: a Python with vLLM.
    """
    need_python("vllm")
    # vLLM's cache stays where it is: with a new one each start takes 8 s longer.
    path = os.pathsep.join([str(ROOT), str(plugin_path(folder / "plugin"))])
    port = free_port()
    command = [*COMMAND, "serve", "vllm", model_dir, "--cpu", "--port", port, *flags]
    with serve_command(command, folder, model_dir, port, PYTHONPATH=path) as server:
        yield server


def need_python(engine: str) -> None:
    """Skip the test without the environment variable that names the engine's Python."""
    variable = COMMANDS[engine].python_variable
    if variable and not os.environ.get(variable):
        pytest.skip(f"set {variable} to a Python that has {engine} (scripts/install_{engine}_cpu.sh) to run this")


@contextmanager
def supervised(
    engine: str, folder: Path, model_dir: Path, *flags: str, plugin: str = "", **planned: Any
) -> Iterator[Supervisor]:
    """A CPU server as `[rollout] replicas` starts and keeps it. `folder` is for its log. Its processes are forked.

    Args:
        plugin: Of `forked_engines`, in place of the engine's own.
        planned: Further fields of `ServerCommand`, as `gpus` for a server on GPUs.
    """
    need_python(engine)
    plugins = plugin_path(folder / "plugin")
    if engine != "embedded":
        group = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}[engine]
        declare_plugin(plugins, group, "forked", f"tests.helpers.forked_engines:{plugin or engine}")
        import_uncollected(plugins)
    # A test may have a sitecustomize.py of its own, which comes first.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), str(plugins)]))
    with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        starts = launches([COMMANDS[engine](str(model_dir), **{"gpus": (), "flags": flags} | planned)])
    with closing(Supervisor(starts, folder, folder / "urls.txt", START_S)) as supervisor:
        supervisor.start()
        supervisor.wait_healthy()
        yield supervisor


def server_pids(folder: Path) -> list[int]:
    """Supervised servers, in no order, whose command lines name the folder; neither guards nor workers."""
    guards = [pid for pid in processes_of(folder) if "guard.py" in command_of(pid)]
    return [pid for pid in processes_of(folder) if parent_of(pid) in guards]


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
