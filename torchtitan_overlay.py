"""`torchtitan` as a namespace package. Import this module before `torchtitan`; there is nothing to call.

Upstream's `torchtitan/__init__.py` (0.2.2) imports torch, Triton and every quantization scheme. That is an error where
Triton is missing. It costs seconds and 300 MiB where `torchtitan.grpo` needs none of it, as in a reward worker. Nothing
inside `torchtitan.grpo` could prevent it, because importing that package runs upstream's file first.

Here upstream's modules and `torchtitan.grpo` are found as before, and that file does not run. The first import of an
upstream module prepares it for this machine. If upstream's package was imported earlier, it is left as it is.
transformers, imported later, reads its folders once. Garbage is collected less often, which makes imports quicker; not
in vLLM, which is left as it is.

`grpo_train`, `sft_train`, the console script, the embedded server, rollout processes, reward workers, Ray's actors and
vLLM's entry point start with this module. In a checkout `torchtitan/__init__.py` does too.
"""

import functools
import gc
import importlib.util
import os
import pkgutil
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

NAME = "torchtitan"
_KERNELS = f"{NAME}.models.moe.kernels"
_ATTENTION = f"{NAME}.models.attention"
_TEXT_DATASETS = f"{NAME}.hf_datasets.text_datasets"
_LOADERS = ("build_text_dataloader", "build_text_validation_dataloader")
_TRANSFORMERS_IMPORTS = "transformers.utils.import_utils"


class _Around(MetaPathFinder):
    """Has a module executed by `execute`, which gets the loader's own function and the module."""

    def __init__(self, name: str, execute: Callable[[Callable[[types.ModuleType], None], types.ModuleType], None]):
        self._name, self._execute = name, execute

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            whole = functools.partial(self._whole, spec.loader.exec_module)
            spec.loader.exec_module = whole  # type: ignore[method-assign]
        return spec

    def _whole(self, execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        if self in sys.meta_path:  # not when it is found: some ask where a module is, and import it later
            sys.meta_path.remove(self)
        self._execute(execute, module)


def _uninterrupted(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    """An interrupt waits until torch is imported: its C++ code loses one, or aborts, or goes on with half of NumPy."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():  # the only one that is interrupted
        return execute(module)
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))  # a mask would leave it to another thread
    try:
        execute(module)
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _without_inductor(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    """`torchtitan.models.attention` compiles its functions when they are called, if ever. `torch.compile` loads
    Inductor, which takes a second of each process, and packed rows have attention of their own."""
    import torch
    import torch.nn.attention.flex_attention
    import torch.nn.attention.varlen  # what they compile themselves is not our business

    compile_now, torch.compile = torch.compile, _compile_when_called
    try:
        execute(module)
    finally:
        torch.compile = compile_now


def _compile_when_called(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():  # a part of what is compiled around it
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, **options))
        return compiled[0](*args, **kwargs)

    return call


def _when_called(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    """Upstream's model families name its data loaders, which nothing here calls. Their module imports `datasets`, with
    pandas and pyarrow: 0.3 s and 80 MiB of each process. It is executed once it is used."""

    def load(name: str) -> Any:
        if vars(module).pop("__getattr__", None):
            execute(module)
        return getattr(module, name)

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *args, **kwargs: load(name)(*args, **kwargs)) if name in _LOADERS else load(name)

    module.__getattr__ = find  # type: ignore[method-assign]


def _read_once(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    """`import transformers` reads its model folders once and quickly. It looks through thousands of files for what
    they export, and does so again for `transformers.models`: its own cache has room for fewer folders than there are.
    What it finds is the same. Each process of a run starts half a second sooner, or more where its files are remote."""
    execute(module)
    scan = getattr(module, "create_import_structure_from_path", None)
    if hasattr(scan, "__wrapped__"):
        module.create_import_structure_from_path = functools.cache(scan.__wrapped__)  # type: ignore[attr-defined]
    if read := getattr(module, "fetch__all__", None):
        # It wants the last line that begins so, and splits the whole file for it.
        module.fetch__all__ = lambda text: read(text[max(0, text.rfind("\n__all__") + 1) :])  # type: ignore[attr-defined]


class _BeforeUpstream(MetaPathFinder):
    """Finds nothing. It sees the first import of an upstream module, and prepares for it: not earlier, as that
    imports torch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{NAME}.") and not f"{name}.".startswith(f"{NAME}.grpo."):
            sys.meta_path.remove(self)
            _prepare_upstream()
            _one_worker_in_gloo()
            sys.meta_path.insert(0, _Around(_ATTENTION, _without_inductor))
            sys.meta_path.insert(0, _Around(_TEXT_DATASETS, _when_called))
        return None


def _prepare_upstream() -> None:
    """What torchtitan 0.2.2 needs where there is no Triton or no accelerator. Changes nothing on other machines.

    It imports Triton for its mixture-of-experts kernels, used or not. It assumes the device type "cuda" if torch finds
    no accelerator.
    """
    import torch._utils

    if importlib.util.find_spec("triton") is None:
        stand_in = types.ModuleType(_KERNELS)
        stand_in.generate_permute_indices = _refuse_moe  # type: ignore[attr-defined]
        sys.modules[_KERNELS] = stand_in

    detect = torch._utils._get_available_device_type
    if detect() is None:
        # torchtitan.tools.utils reads the device type when it is first imported: say "cpu" just then.
        torch._utils._get_available_device_type = lambda: "cpu"
        try:
            importlib.import_module(f"{NAME}.tools.utils")
        finally:
            torch._utils._get_available_device_type = detect


def _one_worker_in_gloo() -> None:
    """A group of torch's has two. They write the last operation's name without a lock (2.13, `ProcessGroupGloo`).
    A name over 15 letters, as of DTensor's all-gather, may be freed twice, and the process crashes some time later."""
    import torch.distributed as dist

    create = dist.ProcessGroupGloo.__init__

    def with_one_worker(self: dist.ProcessGroupGloo, *place: Any, timeout: Any = None) -> None:
        if timeout is None:  # not torch's own call: with options
            return create(self, *place)
        options, names = self._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
        options._timeout, options._threads = timeout, 1
        interfaces = [self.create_device(interface=name) for name in names.split(",")] if names else []
        options._devices = interfaces or [self.create_default_device()]
        create(self, *place, options)

    dist.ProcessGroupGloo.__init__ = with_one_worker


def _refuse_moe(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("torchtitan's mixture-of-experts kernels need Triton, which is not installed")


def command() -> None:
    """The console script."""
    from torchtitan.grpo.commands.console import main

    main()


def register_in_vllm() -> None:
    """vLLM's entry point."""
    from torchtitan.grpo.inside_vllm.plugin import register

    register()


if NAME not in sys.modules:
    _spec = ModuleSpec(NAME, None, is_package=True)
    _spec.submodule_search_locations = list(pkgutil.extend_path([], NAME))
    sys.modules[NAME] = importlib.util.module_from_spec(_spec)
    sys.meta_path.insert(0, _BeforeUpstream())
    sys.meta_path.insert(0, _Around(_TRANSFORMERS_IMPORTS, _read_once))
    sys.meta_path.insert(0, _Around("torch", _uninterrupted))
    if "vllm" not in sys.modules:
        # What is imported stays. To look through it each time that 700 objects are new takes a tenth of a start. All
        # generations together wait for half a million, so that cycles which requests leave do not add up.
        gc.set_threshold(50_000, 5, 2)
