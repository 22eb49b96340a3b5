"""Plant faults into a real server, and see by which words each is named, after how many steps.

    python scripts/faults embedded          # or vllm, sglang: VLLM_PYTHON, SGLANG_PYTHON name their environments
    python scripts/faults vllm --clean 300  # no fault: how many steps are accused, and what the check costs

One line of JSON for each fault: its name, and what was said in the step that sampled from it, or before.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from faults.harness import Harness
from faults.planted import plug_in
from tests.helpers import TINY_QWEN3
from tests.helpers.servers import ONE_PROCESS, save_tiny_qwen3, save_tiny_qwen3_moe, supervised
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.weight_sync.link import GroupLink, WeightSyncError
from torchtitan.grpo.weight_sync.sglang_link import SglangLink

LORA: dict[str, object] = {"lora_rank": 4, "lora_versions": 3}
PLANNED: dict[str, object] = {}
"""Further fields of every `ServerCommand`: GPUs, if they are not for a CPU."""


@contextmanager
def server(engine: str, model: Path, fault: Path, *flags: str, **planned: object) -> Iterator[str]:
    """The address of a server that has the fault that the file says."""
    if engine == "vllm":
        on_gpu = ["--enforce-eager", "--kv-cache-memory-bytes", "1000000000"]  # other processes may use its memory
        flags = (*flags, *ONE_PROCESS, *(on_gpu if PLANNED else []))
    plugin = "sglang_lora" if engine == "sglang" and "lora_rank" in planned else ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(plug_in(engine, folder / "planted", fault))
        planned = PLANNED | planned
        yield stack.enter_context(supervised(engine, folder, model, *flags, plugin=plugin, **planned)).urls[0]


def other(folder: Path, out: Path, **config: object) -> Path:
    """The same weights with other entries of config.json."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    entries = json.loads((folder / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(entries))
    return out


@contextmanager
def torn_wire() -> Iterator[None]:
    """A bit of each bucket turns on the wire."""

    def turning(plain: Callable, waits: bool) -> Callable:
        def send(link: object, *args: object) -> None:
            wire = next(arg for arg in args if isinstance(arg, torch.Tensor))
            wire[100] ^= 1
            plain(link, *args)
            if waits:  # the trainer's own bytes are right again
                wire[100] ^= 1

        return send

    group, sglang = turning(GroupLink._post, False), turning(SglangLink._send, True)
    with patch.object(GroupLink, "_post", group), patch.object(SglangLink, "_send", sglang):
        yield


def say(engine: str, fault: str, words: str, began: float) -> None:
    line = {"engine": engine, "fault": fault, "s": round(time.monotonic() - began, 2), "said": words}
    print(json.dumps(line), flush=True)


def plant(engine: str, harness: Harness, file: Path, fault: str) -> None:
    began = time.monotonic()
    say(engine, fault, harness.step_with(fault, file) or "nothing", began)


def start(engine: str, fault: str, url: str, model: Path, **options: object) -> None:
    """A server that was started otherwise: what is said at the start, or in the first step."""
    began = time.monotonic()
    try:
        with Harness(engine, url, model, **options) as harness:
            said = harness.step()
    except (UserError, WeightSyncError) as error:
        said = f"refused at the start: {error}"
    say(engine, fault, said or "nothing", began)


def dense(engine: str, model: Path, file: Path) -> None:
    with server(engine, model, file) as url:
        with Harness(engine, url, model, moves=0.02) as harness:
            for fault in ("tensor", "top_p", "prefix"):
                plant(engine, harness, file, fault)
            with torn_wire():
                began = time.monotonic()
                harness.learn()
                harness.publish(wait=True)
                say(engine, "torn", harness.step() or "nothing", began)
            harness.recover()
        with Harness(engine, url, model, moves=0.03, in_flight=True) as harness:
            plant(engine, harness, file, "kv")


def experts(engine: str, model: Path, file: Path) -> None:
    moe = save_tiny_qwen3_moe(model.parent / "moe")
    with server(engine, moe, file) as url, Harness(engine, url, moe) as harness:
        plant(engine, harness, file, "expert")


def config(engine: str, model: Path, file: Path) -> None:
    rope = {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
    for fault, entries in (("rope", rope), ("tokens", {})):
        folder = other(model, model.parent / fault, **entries)
        if fault == "tokens":
            tokenizer = json.loads((TINY_QWEN3 / "tokenizer.json").read_text())
            vocab = tokenizer["model"]["vocab"]
            first, second = list(vocab)[20:22]
            vocab[first], vocab[second] = vocab[second], vocab[first]
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
            (folder / "chat_template.jinja").write_text("another one")
        with server(engine, folder, file) as url:
            start(engine, fault, url, model)


def lora(engine: str, model: Path, file: Path) -> None:
    with server(engine, model, file, **LORA) as url:
        with Harness(engine, url, model, lora=True) as harness:
            plant(engine, harness, file, "adapter")
        start(engine, "base", url, save_tiny_qwen3(model.parent / "base", seed=1), lora=True)


def fp8(engine: str, model: Path, file: Path) -> None:
    wide = save_tiny_qwen3(model.parent / "wide", hidden_size=128)  # vLLM's kernels take blocks of 128
    checked = "gpus" in PLANNED  # on a CPU the check's prompt of two tokens ends vLLM 0.32
    with (
        server(engine, wide, file, fp8=True) as url,
        Harness(engine, url, wide, moves=0.05, fp8=True, checked=checked) as harness,
    ):
        plant(engine, harness, file, "scale")


PARTS = {"dense": dense, "experts": experts, "config": config, "lora": lora, "fp8": fp8}


def clean(engine: str, folder: Path, steps: int) -> None:
    file, dense = folder / "fault", save_tiny_qwen3(folder / "dense")
    file.write_text("")
    modes = {"sync": {}, "in flight": {"in_flight": True}, "lora": {"lora": True}}
    for mode, options in modes.items():
        planned = LORA if mode == "lora" else {}
        with server(engine, dense, file, **planned) as url, Harness(engine, url, dense, **options) as harness:
            accused, began = 0, time.monotonic()
            for _ in range(steps):
                if not harness.in_flight:
                    harness.learn()
                    harness.publish(wait=True)
                accused += bool(harness.step())
            say(engine, f"clean {mode}: {steps} steps", f"{accused} accused", began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(COMMANDS))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), help="default: all, without fp8")
    parser.add_argument("--gpu", type=int, help="of the servers (default: a CPU)")
    parser.add_argument("--clean", type=int, default=0, help="steps of each mode without a fault")
    arguments = parser.parse_args()
    if "fp8" in (arguments.parts or ()) and not COMMANDS[arguments.engine].quantizes:
        parser.error(f"--parts fp8: {arguments.engine} does not quantize what it gets")
    if arguments.gpu is not None:
        PLANNED.update(gpus=(arguments.gpu,), memory_share=0.05)
    parts = arguments.parts or [part for part in PARTS if part != "fp8"]  # vLLM's alone, and on a CPU with AMX
    with tempfile.TemporaryDirectory() as folder:
        if arguments.clean:
            clean(arguments.engine, Path(folder), arguments.clean)
        else:
            file, model = Path(folder) / "fault", save_tiny_qwen3(Path(folder) / "dense")
            file.write_text("")
            for part in parts:
                PARTS[part](arguments.engine, model, file)
