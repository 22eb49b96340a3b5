"""A trainer's side of weight sync for tests: a model of a folder, other weights of its shape, a fleet of one server."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.model.lora import add_adapters, init_adapters, is_adapter
from torchtitan.grpo.model.peft_folder import gather_adapter, write_adapter
from torchtitan.grpo.model.source import ModelSource, load_hf_weights, resolve_model
from torchtitan.grpo.weight_sync.published import PublishedWeights, model_weights, published_weights

CPU = torch.device("cpu")
SYNC = job_config.WeightSync(timeout_seconds=60.0)


def trainer_of(folder: Path) -> tuple[ModelSource, nn.Module]:
    source = resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 64)
    model = source.build()
    with torch.no_grad():
        model.init_weights(buffer_device=CPU)
    load_hf_weights(model, source, folder)
    return source, model


def weights_of(source: ModelSource, model: nn.Module, adapter: Any = None) -> PublishedWeights:
    """What is published of `trainer_of`'s model, by its own adapter or another one."""
    return model_weights(model, adapter or source.adapter, torch.float32, source.tied)


def changed(folder: Path, seed: int, out: Path) -> Path:
    """Another random model of the same shape: every weight differs."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(out)
    return out


def fleet_of(control: VllmControl) -> Fleet:
    return Fleet([control.url], lambda url: Server(url, control, engine=ENGINES["vllm"]))


class AdapterTrainer:
    """A trainer of adapters of a folder's model, on one rank without FSDP.

    Args:
        folder: Of the base.
    """

    def __init__(self, folder: Path, rank: int = 4, alpha: float = 6.0) -> None:
        section = SimpleNamespace(hf_assets_path=str(folder), weights="hf")
        lora = SimpleNamespace(enable=True, rank=rank, alpha=alpha, target_modules=["all-linear"])
        self.source, self.folder = resolve_model(section, 64, lora), folder
        assert self.source.lora is not None
        self.model = self.source.build()
        with torch.no_grad():
            self.model.init_weights(buffer_device=CPU)
        add_adapters(self.model, self.source.lora, torch.float32)
        load_hf_weights(self.model, self.source, folder)
        init_adapters(self.model, 0)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Other adapters."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def learn(self, seed: int) -> nn.Module:
        """Other adapters. Returns `peft`'s model with them, which takes a while."""
        from peft import PeftModel

        self.draw(seed)

        with tempfile.TemporaryDirectory() as folder:
            write_adapter(gather_adapter(self.model), self.source, Path(folder), torch.float32)
            base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            return PeftModel.from_pretrained(base, folder).eval()

    def published(self) -> PublishedWeights:
        return published_weights(self.model, self.source, torch.float32)
