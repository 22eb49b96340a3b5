"""What `torchtitan_overlay` prepares before upstream's modules are imported."""

import importlib.util
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torchtitan_overlay

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from torchtitan.models.attention import FlexAttentionWrapper, VarlenAttentionWrapper

LOSES_AN_INTERRUPT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except KeyboardInterrupt:  # torch's C++ code goes on without NumPy
    pass
"""


@pytest.mark.parametrize("before", ["", "find_spec('torch')", "Thread(target=sleep, args=[9], daemon=True).start()"])
def test_an_interrupt_while_torch_is_imported_is_not_lost(tmp_path, before):
    (tmp_path / "torch.py").write_text(LOSES_AN_INTERRUPT)
    program = "import signal\nfrom importlib.util import find_spec\nfrom threading import Thread\n"
    program += "from time import sleep\n"
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
    program += f"import torchtitan_overlay\n{before}\n"
    program += "try:\n    import torch\nexcept KeyboardInterrupt:\n    print('interrupted')"
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    said = subprocess.check_output([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, text=True)
    assert said == "interrupted\n"


@pytest.mark.parametrize(("interfaces", "devices"), [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_a_group_of_gloo_has_one_worker(interfaces, devices, monkeypatch):
    """Two would write the name of the last operation at once."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    limit = timedelta(seconds=7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        for group in (dist.group.WORLD, dist.new_group(backend="gloo", timeout=limit)):
            options = group._get_backend(torch.device("cpu")).options
            assert (options._threads, options._timeout, len(options._devices)) == (1, limit, devices)
            dist.barrier(group)
    finally:
        dist.destroy_process_group()


def test_upstreams_attention_is_compiled_when_it_is_called(monkeypatch):
    name = torchtitan_overlay._compile_when_called.__qualname__
    for function in (FlexAttentionWrapper._compiled_flex_attn, VarlenAttentionWrapper._compiled_varlen_attn):
        assert function.__qualname__.startswith(name)
    assert torch.compile.__module__ == "torch", "as it was"
    compiled = []

    def compiles(function, **options):
        compiled.append(options)
        return lambda *args, **kwargs: -function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compiles)
    function = torchtitan_overlay._compile_when_called(lambda x, by: x * by, mode="reduce-overhead")
    assert compiled == []
    assert [function(3, by=2), function(4, by=2)] == [-6, -8]
    assert compiled == [{"mode": "reduce-overhead"}], "once"


def test_upstreams_data_loaders_are_imported_when_they_are_used(tmp_path, monkeypatch):
    name = "torchtitan.hf_datasets.text_datasets"
    # The process has one until it imports a model family.
    others = [finder for finder in sys.meta_path if getattr(finder, "_name", "") != name]
    monkeypatch.setattr(sys, "meta_path", others)

    def made() -> ModuleType:
        sys.meta_path.insert(0, torchtitan_overlay._Around(name, torchtitan_overlay._when_called))
        spec = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "DATASETS" not in vars(module)
        return module

    monkeypatch.delitem(sys.modules, name, raising=False)
    module = made()
    load = module.build_text_dataloader  # as `from ... import` does
    assert "DATASETS" not in vars(module)
    with pytest.raises(TypeError, match=r"build_text_dataloader\(\) missing"):
        load()
    assert module.build_text_dataloader is not load and "c4" in module.DATASETS
    module = made()
    assert "c4" in module.DATASETS and module.build_text_dataloader.__module__ == name, "anything else at once"

    script = tmp_path / "script.py"
    script.write_text("import sys, grpo_train, torchtitan.models.qwen3\nassert 'datasets' not in sys.modules\n")
    Ranks(1, script, log=tmp_path / "log").check()


def test_transformers_finds_the_same_exports_when_it_reads_its_folders_once(monkeypatch):
    name = "transformers.utils.import_utils"

    def made_again():
        spec = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    import transformers  # its own has been found

    monkeypatch.delitem(sys.modules, name)
    others = [finder for finder in sys.meta_path if not isinstance(finder, torchtitan_overlay._Around)]
    monkeypatch.setattr(sys, "meta_path", list(others))
    plain = made_again()
    sys.meta_path.insert(0, torchtitan_overlay._Around(name, torchtitan_overlay._read_once))
    quick = made_again()
    assert sys.meta_path == others, "it has done its work"
    models = Path(transformers.__file__).parent / "models"
    found = plain.define_import_structure(str(models))
    assert quick.define_import_structure(models) == found  # as `transformers` asks
    misses = quick.create_import_structure_from_path.cache_info().misses
    assert quick.define_import_structure(str(models)) == found  # as `transformers.models` does
    assert quick.create_import_structure_from_path.cache_info().misses == misses + 1, "each folder was read again"
    for text in (
        "",
        "x = 1\n",
        '__all__ = ["A", "B"]\n',
        'x = "__all__"\n\n__all__ = [\n    "A",\n    "B",\n]\ny = 1\n',
    ):
        assert quick.fetch__all__(text) == plain.fetch__all__(text)
