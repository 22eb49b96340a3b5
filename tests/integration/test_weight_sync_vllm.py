"""A running vLLM takes weights A, B, A from a trainer; after each it must answer as transformers does with them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.integration.served_logprobs import worst_logprob_difference
from torchtitan.grpo import job_config
from torchtitan.grpo.engines.control import ServerControl
from torchtitan.grpo.engines.fleet import Fleet, FleetError, Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.models import load_hf_weights, resolve_model
from torchtitan.grpo.weight_sync.link import WeightSyncError
from torchtitan.grpo.weight_sync.sync import WeightSync

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
SYNC = job_config.WeightSync(timeout_seconds=30.0)


@pytest.fixture(params=["untied", "tied"])
def server(request):
    return request.getfixturevalue("vllm_server" if request.param == "untied" else "tied_vllm_server")


def trainer_of(folder: Path):
    source = resolve_model(SimpleNamespace(flavor="", hf_assets_path=str(folder), weights="hf"), 64)
    model = source.build()
    with torch.no_grad():
        model.init_weights(buffer_device=CPU)
    load_hf_weights(model, source, folder)
    return source, model


def changed(folder: Path, seed: int, out: Path) -> Path:
    """Another random model of the same shape: every weight differs."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3ForCausalLM.from_pretrained(folder).config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(out)
    return out


def fleet_of(control: ServerControl) -> Fleet:
    return Fleet([control.url], lambda url: Server(url, control))


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_weights_a_b_a(server, transport, tmp_path):
    folders = {"A": server.model_dir, "B": changed(server.model_dir, 7, tmp_path / "B")}
    references = {name: Qwen3ForCausalLM.from_pretrained(folder).eval() for name, folder in folders.items()}
    control = ServerControl(server.url, None, 60.0)
    source, model = trainer_of(folders["A"])
    settings = dataclasses.replace(SYNC, transport=transport)
    sync = WeightSync(model, source.adapter, settings, fleet_of(control), CPU, source.tied)
    sync.connect()
    for version, name in ((1, "A"), (2, "B"), (3, "A"), (4, "B"), (5, "A")):
        load_hf_weights(model, source, folders[name])
        sync.publish(version)
        assert sync.finished()[0].bytes >= sum(p.numel() * 4 for p in model.parameters())
        assert control.weight_version() == str(version)
        assert not control.is_paused()
        assert worst_logprob_difference(server.url, references[name]) <= 1e-4
        other = references["B" if name == "A" else "A"]
        assert worst_logprob_difference(server.url, other) > 0.1, "A and B must differ for this test to mean much"
    sync.close()


def test_a_missing_weight_is_an_error_and_the_server_recovers(server):
    control = ServerControl(server.url, None, 60.0)
    source, model = trainer_of(server.model_dir)

    def without(name: str):
        def to_hf(state: dict) -> dict:
            return {key: value for key, value in source.adapter.to_hf(state).items() if key != name}

        return SimpleNamespace(to_hf=to_hf)

    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        sync = WeightSync(model, without(name), SYNC, fleet_of(control), CPU, source.tied)
        with pytest.raises(WeightSyncError, match=rf"phase connect.*lacks 1 weights.*{name}"):
            sync.connect()
        sync.close()
    assert not control.is_paused()

    sync = WeightSync(model, source.adapter, SYNC, fleet_of(control), CPU, source.tied)
    sync.connect()
    sync.publish(6)
    assert worst_logprob_difference(server.url, Qwen3ForCausalLM.from_pretrained(server.model_dir).eval()) <= 1e-4
    sync.close()


def test_a_name_the_server_does_not_know_leaves_it_paused_until_a_good_update(server):
    control = ServerControl(server.url, None, 60.0)
    source, model = trainer_of(server.model_dir)

    model.register_parameter("spare", torch.nn.Parameter(torch.zeros(3)))
    adapter = SimpleNamespace(
        to_hf=lambda state: {"model.spare": state["spare"]} if "spare" in state else source.adapter.to_hf(state)
    )
    sync = WeightSync(model, adapter, SYNC, fleet_of(control), CPU, source.tied)
    sync.connect()
    with pytest.raises(FleetError, match=r"version 7.*spare"):
        sync.publish(7)
    assert control.is_paused()
    sync.close()

    del model.spare
    sync = WeightSync(model, source.adapter, SYNC, fleet_of(control), CPU, source.tied)
    sync.connect()
    sync.publish(8)
    assert not control.is_paused()
    assert control.weight_version() == "8"
    assert worst_logprob_difference(server.url, Qwen3ForCausalLM.from_pretrained(server.model_dir).eval()) <= 1e-4
    sync.close()


def test_the_server_passes_the_sampling_check(server):
    ServerControl(server.url, None, 60.0).check(64)
    with pytest.raises(UserError, match="max-model-len"):
        ServerControl(server.url, None, 60.0).check(100_000)
