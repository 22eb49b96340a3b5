"""Faults that are planted into real servers: plug-ins of vLLM and SGLang, and an embedded server.

The file that the environment variable PLANTED_FAULT names says which fault is there now. So one server has one after
the other.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

COMMANDS = "torchtitan.grpo.process.server_commands"
NORM = "model.layers.1.post_attention_layernorm.weight"
TOP_P = 0.7
SCALES: dict[str, Any] = {}
"""Of a vLLM that quantizes: those of its last version."""


def fault() -> str:
    try:
        return Path(os.environ["PLANTED_FAULT"]).read_text()
    except FileNotFoundError:
        return ""


@contextmanager
def plug_in(engine: str, folder: Path, file: Path) -> Iterator[None]:
    """Servers that start meanwhile have what plants faults: those that `file` says, while they run."""
    from tests.helpers.servers import declare_plugin

    if group := {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}.get(engine):
        declare_plugin(folder, group, "planted", f"faults.planted:{engine}")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), str(folder), os.environ.get("PYTHONPATH")]))
    main = patch(f"{COMMANDS}.embedded._EMBEDDED", "from faults.planted import embedded; embedded()")
    with main, patch.dict(os.environ, {"PLANTED_FAULT": str(file), "PYTHONPATH": path}):
        yield


def change_weights(model: Any) -> None:
    """After an update: one tensor, or an expert's, is not what was sent."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if fault() == "tensor" and name == NORM:
                parameter.mul_(1.5)
            elif fault() == "expert" and name.endswith(("experts.w2_weight", "experts.down_proj")):
                parameter[3].zero_()


def keep_scales(model: Any) -> None:
    """After an update: FP8 weights are the new ones, and their scales are those of the version before."""
    import torch

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "weight_scale" not in name:
                continue
            new = tensor.clone()
            if fault() == "scale" and name in SCALES:
                tensor.copy_(SCALES[name])
            SCALES[name] = new


def after(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Have `act` called with the arguments of each call, after it."""
    plain = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        act(*args)
        return result

    setattr(owner, name, called)


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """The same, before it."""
    plain = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, called)


def unless(owner: Any, name: str, faults: tuple[str, ...], otherwise: Any = None) -> None:
    """Under these faults, a call does nothing."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: otherwise if fault() in faults else plain(*args, **kwargs))


def vllm() -> None:
    """In each process of a vLLM server."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_worker import Worker

    def sample_from_a_part(_: Any, *args: Any, **kwargs: Any) -> None:
        for params in [*args, *kwargs.values()]:
            if fault() == "top_p" and isinstance(params, SamplingParams):
                params.top_p = TOP_P

    def forget_salt(_: Any, request: Any) -> None:
        if fault() == "prefix":  # behind our plug-in, which gives a request without a salt one
            request.cache_salt = None
            request.block_hashes.clear()
            request.update_block_hashes()

    def change(worker: Any, *_: Any) -> None:
        change_weights(worker.model_runner.model)
        keep_scales(worker.model_runner.model)

    after(Worker, "finish_weight_update", change)
    before(InputProcessor, "process_inputs", sample_from_a_part)
    before(Scheduler, "_enqueue_waiting_request", forget_salt)
    unless(Scheduler, "reset_prefix_cache", ("prefix", "kv"), True)
    try:
        from torchtitan.grpo.inside_vllm.adapters import ServedAdapters
    except ImportError:
        return
    unless(ServedAdapters, "serve", ("adapter",))


def sglang() -> None:
    """In each process of an SGLang server."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    updater = next(kind for kind in vars(weight_updater).values() if hasattr(kind, "end_weight_update"))

    def change(self: Any, *_: Any) -> None:
        for _, runner in self._select_runners("target"):
            change_weights(runner.model)

    def ask_otherwise(_: Any, request: Any, *__: Any) -> None:
        if fault() == "prefix":
            request.extra_key = None
        if fault() == "adapter":
            request.lora_path = None
        if fault() == "top_p":
            for params in request.sampling_params or []:
                params["top_p"] = TOP_P

    def keep_cache(_: Any, request: Any) -> None:
        if fault() in ("prefix", "kv"):
            request.mode = "in_place"

    after(updater, "end_weight_update", change)
    before(TokenizerManager, "generate_request", ask_otherwise)
    before(Scheduler, "pause_generation", keep_cache)
    unless(Scheduler, "flush_cache", ("prefix", "kv"), True)


def embedded() -> None:
    """An embedded server, with the arguments of the command line."""
    from torchtitan.grpo.engines.embedded import __main__ as server
    from torchtitan.grpo.engines.embedded import generator as generating
    from torchtitan.grpo.engines.embedded.model import ModelUpdate
    from torchtitan.grpo.engines.protocol import SamplingParams

    sample, cut = generating.sample, SamplingParams(1, 1.0, 1, top_p=TOP_P)

    def sample_from_a_part(logits: Any, *args: Any) -> Any:
        return sample(logits, *args[:4], dict.fromkeys(range(len(logits)), cut))

    def change(update: Any, *_: Any) -> None:
        change_weights(update.model)
        if fault() == "adapter":
            for name, parameter in update.model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.data.zero_()

    generating.sample = lambda *args: (sample_from_a_part if fault() == "top_p" else sample)(*args)
    after(ModelUpdate, "__init__", lambda update, model, *_: setattr(update, "model", model))
    after(ModelUpdate, "check_complete", change)
    unless(generating.Generator, "preempt", ("kv",))
    server.main()


if __name__ == "__main__":
    embedded()
