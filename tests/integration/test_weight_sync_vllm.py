"""What is vLLM's own, against a real server on CPU; test_engine_conformance.py has what every engine must do."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RunningServer
from transformers import Qwen3ForCausalLM

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.integration.served_logprobs import worst_logprob_difference
from torchtitan.grpo import job_config
from torchtitan.grpo.engines.control import ServerControl
from torchtitan.grpo.engines.fleet import Fleet, FleetError, Server
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.models import load_hf_weights, resolve_model
from torchtitan.grpo.weight_sync.link import WeightSyncError
from torchtitan.grpo.weight_sync.sync import WeightSync

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
SYNC = job_config.WeightSync(timeout_seconds=30.0)


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


def test_a_missing_weight_is_an_error_and_the_server_recovers(vllm_server: RunningServer):
    control = ServerControl(vllm_server.url, None, 60.0)
    source, model = trainer_of(vllm_server.model_dir)

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
    reference = Qwen3ForCausalLM.from_pretrained(vllm_server.model_dir).eval()
    assert worst_logprob_difference(vllm_server.url, reference) <= 1e-4
    sync.close()


def test_a_name_the_server_does_not_know_leaves_it_paused_until_a_good_update(vllm_server: RunningServer):
    control = ServerControl(vllm_server.url, None, 60.0)
    source, model = trainer_of(vllm_server.model_dir)

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
    reference = Qwen3ForCausalLM.from_pretrained(vllm_server.model_dir).eval()
    assert worst_logprob_difference(vllm_server.url, reference) <= 1e-4
    sync.close()


def test_the_server_passes_the_sampling_check(vllm_server: RunningServer):
    ServerControl(vllm_server.url, None, 60.0).check(64)
    with pytest.raises(UserError, match="max-model-len"):
        ServerControl(vllm_server.url, None, 60.0).check(100_000)


def test_refusals(vllm_server: RunningServer) -> None:
    async def ask(prompt: list[int], params: SamplingParams) -> None:
        client = VllmClient(vllm_server.url, None, 60.0, lambda: -1)
        try:
            await client.generate(prompt, params, "r0")
        finally:
            await client.close()

    with pytest.raises(UserError, match=rf"{vllm_server.url} refuses request r0: .*length 300"):
        asyncio.run(ask([5] * 300, SamplingParams(1, 1.0, 4)))
    with pytest.raises(UserError, match="max_num_seqs"):
        asyncio.run(ask([5], SamplingParams(17, 1.0, 4)))


def test_pause_keep_holds_requests(vllm_server: RunningServer) -> None:
    control = ServerControl(vllm_server.url, None, 30.0)

    async def scenario() -> None:
        client = VllmClient(vllm_server.url, None, 60.0, lambda: -1)
        await asyncio.to_thread(control.pause)
        task = asyncio.create_task(client.generate([5, 6], SamplingParams(1, 0.7, 5, ignore_eos=True), "held"))
        await asyncio.sleep(1.0)
        assert not task.done()
        await asyncio.to_thread(control.resume)
        [completion] = await asyncio.wait_for(task, 30)
        await client.close()
        assert len(completion.token_ids) == 5

    asyncio.run(scenario())
