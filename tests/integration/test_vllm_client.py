"""The asynchronous client against a real vLLM server on CPU."""

import asyncio
from typing import Any

import pytest
import torch
from conftest import RunningServer
from transformers import AutoModelForCausalLM

from torchtitan.grpo.engines.control import ServerControl
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.errors import UserError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def reference(vllm_server: RunningServer):
    return AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32).eval()


def generate(
    server: RunningServer, *requests: tuple[list[int], SamplingParams], **kwargs: Any
) -> list[list[Completion]]:
    async def ask() -> list[list[Completion]]:
        client = VllmClient(server.url, None, 60.0, lambda: -1)
        try:
            return await asyncio.gather(
                *[client.generate(prompt, params, f"r{i}", **kwargs) for i, (prompt, params) in enumerate(requests)]
            )
        finally:
            await client.close()

    return asyncio.run(ask())


@torch.no_grad()
def assert_logprobs(model, prompt: list[int], completion: Completion, temperature: float) -> None:
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1] / temperature
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_and_samples(vllm_server: RunningServer, reference, temperature: float) -> None:
    params = SamplingParams(n=4, temperature=temperature, max_tokens=9, seed=11, ignore_eos=True)
    prompts = [[5, 9, 300, 17], [8], [100, 101]]
    reported = ServerControl(vllm_server.url).weight_version()
    version = int(reported) if reported.isdecimal() else -1  # another test may have given it weights
    groups = generate(vllm_server, *[(prompt, params) for prompt in prompts], cohort=("ignored", 3))
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 4
        assert len({tuple(completion.token_ids) for completion in group}) == 4
        for completion in group:
            assert (len(completion.token_ids), completion.finish_reason) == (9, "length")
            assert completion.versions == [version] * 9
            assert_logprobs(reference, prompt, completion, temperature)
    assert generate(vllm_server, (prompts[0], params))[0][1].token_ids == groups[0][1].token_ids


def test_greedy(vllm_server: RunningServer, reference) -> None:
    prompt = torch.tensor([[5, 9, 300, 17]])
    expected = reference.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)[0, 4:].tolist()
    [[completion]] = generate(vllm_server, (prompt[0].tolist(), SamplingParams(1, 0.0, 10)))
    assert completion.token_ids == expected


def test_stop_token_is_part_of_the_answer(vllm_server: RunningServer) -> None:
    free = SamplingParams(1, 1.0, 20, seed=5, ignore_eos=True)
    [[completion]] = generate(vllm_server, ([6, 7], free))
    stop = completion.token_ids[8]
    stopping = SamplingParams(1, 1.0, 20, stop_token_ids=(stop,), seed=5, ignore_eos=True)
    [[stopped]] = generate(vllm_server, ([6, 7], stopping))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == completion.token_ids[: completion.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_refusals(vllm_server: RunningServer) -> None:
    with pytest.raises(UserError, match=rf"{vllm_server.url} refuses request r0: .*length 300"):
        generate(vllm_server, ([5] * 300, SamplingParams(1, 1.0, 4)))
    with pytest.raises(UserError, match="max_num_seqs"):
        generate(vllm_server, ([5], SamplingParams(17, 1.0, 4)))


def test_pause_keep_holds_requests(vllm_server: RunningServer, reference) -> None:
    control = ServerControl(vllm_server.url, None, 30.0)

    async def scenario() -> Completion:
        client = VllmClient(vllm_server.url, None, 60.0, lambda: -1)
        await asyncio.to_thread(control.pause)
        task = asyncio.create_task(client.generate([5, 6], SamplingParams(1, 0.7, 5, ignore_eos=True), "held"))
        await asyncio.sleep(1.0)
        assert not task.done()
        await asyncio.to_thread(control.resume)
        completions = await asyncio.wait_for(task, 30)
        await client.close()
        return completions[0]

    assert_logprobs(reference, [5, 6], asyncio.run(scenario()), 0.7)
