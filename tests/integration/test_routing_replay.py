"""Routing replay: a trainer that routes as its sampler did computes the sampler's log-probabilities."""

import asyncio
import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers import TINY_QWEN3
from tests.helpers.embedded_servers import ServerThread
from tests.helpers.microbatches import microbatches
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import arguments, embedded_server, environment, steps, train
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.data.routes import RouteShape, to_npy
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.replay import route_shape
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.grpo.policy.sums import route_sums
from torchtitan.grpo.rollouts.buffer import StalenessBuffer
from torchtitan.grpo.rollouts.environment import Turns, checked
from torchtitan.grpo.rollouts.record import RolloutRecord, read_step

SHAPE = dict(
    vocab_size=json.loads((TINY_QWEN3 / "config.json").read_text())["vocab_size"],
    eos_token_id=2,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
ROUTES = RouteShape(3, 2, 8)
PROMPT = list(range(5, 17))
PARAMS = SamplingParams(4, 1.0, 24, seed=3, ignore_eos=True, routes=ROUTES)


class Attention(nn.Module):
    """Over the whole row. That on a CPU does not compile."""

    def forward(self, q, k, v, documents, scale=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )


def near_ties() -> PreTrainedModel:
    """Four experts each have nearly the same score, and do different things. A token goes to two of them."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.normal_(std=0.2)
            layer.mlp.experts.down_proj.normal_(std=0.2)
            router = layer.mlp.gate.weight
            router.normal_(std=0.5)
            router.copy_(router[::4].repeat_interleave(4, 0) + 1e-3 * router)
        model.lm_head.weight.normal_(std=0.2)
    return model.bfloat16().float().eval()  # values that both ends can hold


@dataclass
class Ends:
    """A sampler in bfloat16, and a trainer of the same weights in float32."""

    client: VllmClient
    trainer: nn.Module
    transformers: PreTrainedModel

    def ask(self, token_ids: list[int], params: SamplingParams = PARAMS) -> list[Completion]:
        return asyncio.run_coroutine_threadsafe(self.client.generate(token_ids, params, "a"), self.loop).result(60)

    loop: asyncio.AbstractEventLoop


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("near_ties") / "model"
    shutil.copytree(TINY_QWEN3, folder)
    near_ties().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ends(folder) -> Iterator[Ends]:
    model = near_ties()
    server = ServerThread(0, model=copy.deepcopy(model).bfloat16())
    client = VllmClient(server.url, None, 60.0, lambda: 0)
    try:
        yield Ends(client, trainer_of(folder), model, server.loop)
    finally:
        server.call(client.close())
        server.close()


def trainer_of(folder, checkpointing: str = "none") -> nn.Module:
    source = resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 128)
    assert route_shape(source.model_args) == ROUTES
    model = source.build()
    make_packed(model)
    with torch.no_grad():
        model.init_weights()
    load_hf_weights(model, source, folder)
    if checkpointing != "none":
        apply_ac(model, ActivationCheckpoint(mode=checkpointing), base_folder="")
    return model


def row_of(completions: list[Completion], prompt: list[int] = PROMPT) -> Microbatch:
    samples = [PackedSample(prompt, c.token_ids, 1.0, 1.0, c.logprobs, routes=c.routes) for c in completions]
    return microbatches(samples, 256, 1)[0][0]


def mismatch(model: nn.Module, row: Microbatch) -> float:
    """Mean |trainer - sampler| log-probability."""
    with torch.no_grad():
        return float((model(row, 1.0)[0] - row.sampler_logprobs).abs().mean())


def test_replay_makes_trainer_and_sampler_agree_where_routers_nearly_tie(ends):
    row = row_of(ends.ask(PROMPT))
    without, with_replay = mismatch(ends.trainer, row.without_routes()), mismatch(ends.trainer, row)
    assert with_replay < 0.05 < 0.5 < without
    # As the metrics count it: choices differ, though not everywhere.
    agrees = ends.trainer.agrees
    assert agrees.shape == (4 * 24, 3)
    row.weights[24:] = 0
    sums = {name: float(value) for name, value in route_sums(agrees, row.weights).items()}
    assert 0 < sums["route_tokens_alike"] < sums["route_agreement_sum"] < 24
    assert sums["route_agreement_sum"] == pytest.approx(float(agrees[:24].float().mean(1).sum()))


def test_the_server_tells_what_transformers_routers_choose(ends):
    model = copy.deepcopy(ends.transformers)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.gate.weight, std=0.5)  # without near ties
    generator = Generator(model.requires_grad_(False), max_sequences=4, max_model_len=128)
    request = Request("a", PROMPT, replace(PARAMS, n=2), routes=True)
    generator.add([request])
    while generator.busy:
        generator.step()
    tokens = torch.tensor([PROMPT + row.token_ids[:-1] for row in request.answers])
    with torch.no_grad():
        logits = model(tokens, output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(2).indices for layer in logits], 1)
    routes = torch.from_numpy(np.concatenate([each for row in request.answers for each in row.routes])).long()
    assert torch.equal(chosen.sort(-1).values, routes.sort(-1).values)


def test_recomputation_uses_the_routes_and_the_router_learns(ends, folder):
    row, gradients = row_of(ends.ask(PROMPT)), []
    for mode in ("none", "full"):
        model = trainer_of(folder, mode)
        model(row, 1.0)[0].sum().backward()
        gradients.append({n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()})
    assert not model.agrees.all()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=0, rtol=0, msg=name)
    assert gradients[0]["layers.0.moe.router.gate.weight"].abs().max() > 1e-3


def test_equal_prefixes_are_shared_where_their_routes_are_equal(ends):
    first, second = ends.ask(PROMPT, replace(PARAMS, n=2))
    second.routes = second.routes.copy()
    second.routes[3, 1] = [e for e in range(8) if e not in second.routes[3, 1]][:2]
    with torch.no_grad():
        together = ends.trainer(row_of([first, second]), 1.0)[0]
        alone = [ends.trainer(row_of([each]), 1.0)[0] for each in (first, second)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_turns_join_the_routes_of_their_answers(ends):
    turns = Turns(Prompt(0, PROMPT, ""))
    for given in ([20, 21, 22], []):
        (completion,) = ends.ask(turns.token_ids, replace(PARAMS, n=1, max_tokens=8))
        turns.sampled(completion)
        turns.given(given)
    sample = turns.sample()
    assert sample.routes is not None and len(sample.routes) == len(PROMPT) + 8 + 3 + 8 - 1
    packed = PackedSample(
        PROMPT, sample.token_ids, 1.0, 1.0, sample.logprobs, loss_mask=sample.loss_mask, routes=sample.routes
    )
    assert mismatch(ends.trainer, microbatches([packed], 256, 1)[0][0]) < 0.05
    known = sample.routes
    for routes in (None, known[:-10], known[:, :2], known.tolist(), known.astype(float)):
        with pytest.raises(UserError, match=r"'e': a sample has .*routing.* needs .* positions of 3 layers"):
            checked([replace(sample, routes=routes)], "e", sample.prompt, replace(PARAMS, max_tokens=99))
    with pytest.raises(ValueError, match=r"needs each turn to continue `Turns\.token_ids`"):
        turns.sampled(ends.ask(PROMPT[:3], replace(PARAMS, n=1))[0])
    [cut] = checked([sample], "e", sample.prompt, replace(PARAMS, max_tokens=10))
    assert cut.token_ids == sample.token_ids[:10], "cut as always"


def test_an_answer_across_an_update_keeps_what_older_weights_chose(ends):
    model = copy.deepcopy(ends.transformers)
    generator = Generator(model, max_sequences=4, max_model_len=128)
    request = Request("a", PROMPT, replace(PARAMS, n=2, max_tokens=12), routes=True)
    other = Request("b", PROMPT[:4], replace(PARAMS, n=1, max_tokens=20))
    generator.add([other, request])
    for _ in range(4):
        generator.step()
    row = request.answers[1]
    before, known = np.concatenate(row.routes), len(row.token_ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    generator.preempt()  # keys and values are computed again, with routers that choose otherwise
    while generator.busy:
        generator.step()
    after = np.concatenate(row.routes)
    assert len(after) == len(PROMPT) + 12 - 1 and len(before) == len(PROMPT) + known - 1
    assert np.array_equal(after[: len(before)], before)
    assert not other.answers[0].routes, "nobody asked for them"


@pytest.mark.parametrize("broken", ["missing", "expert", "twice", "shape"])
def test_routes_that_cannot_be_are_the_servers_failure(ends, monkeypatch, broken):
    sent = {
        "missing": np.zeros((0,), np.uint8),
        "expert": np.full((15, 3, 2), 8, np.uint8),
        "twice": np.zeros((15, 3, 2), np.uint8),
        "shape": np.zeros((14, 3, 2), np.uint8),
    }
    message = {
        "missing": "says nothing of its experts; start vLLM with --enable-return-routed-experts",
        "expert": "has experts 8 to 8, the model has 0 to 7",
        "twice": "names an expert twice at position 0",
        "shape": r"has shape \[14, 3, 2\], this model's 15 positions have \[15, 3, 2\]",
    }[broken]
    text = "" if broken == "missing" else to_npy(sent[broken])
    monkeypatch.setattr("torchtitan.grpo.engines.embedded.bodies.to_npy", lambda routes: text)
    with pytest.raises(EngineError, match=f"127.0.0.1.*request a: .*{message}"):
        ends.ask(PROMPT, replace(PARAMS, n=1, max_tokens=4))


def test_samples_keep_their_routes_in_checkpoints_and_records(tmp_path):
    def sample(tokens: int, seed: int | None) -> Sample:
        draw = np.random.default_rng(seed)
        routes = None if seed is None else draw.integers(0, 8, (len(PROMPT) + tokens - 1, 3, 2)).astype(np.uint8)
        return Sample(prompt, [7] * tokens, [-1.0] * tokens, [0] * tokens, "stop", reward=1.0, routes=routes)

    prompt = Prompt(0, PROMPT, "p")
    group = [sample(3, 1), sample(5, None), sample(1, 2)]
    buffer = StalenessBuffer(1, 1, 1)
    entry = buffer.add(prompt)
    buffer.begin(entry, 0)
    buffer.finish(entry, group)
    resumed = StalenessBuffer(1, 1, 1)
    resumed.load_state_dict(buffer.state_dict(), lambda numbers: [prompt for _ in numbers])
    record = RolloutRecord(Rollout(record_gib=1.0), tmp_path)
    record.write(1, [group])
    _, (read,) = read_step(tmp_path / "rollouts" / "step-000001.npz")
    for found in (resumed.entries[0].group, read):
        assert found is not None
        for ours, theirs in zip(group, found, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert np.array_equal(ours.routes, theirs.routes) if ours.routes is not None else theirs.routes is None
            assert ours.routes is None or ours.routes.dtype == theirs.routes.dtype


def test_compiled_and_checkpointed_blocks_replay_each_rows_routes(folder):
    """They are compiled once, and note in the forward pass alone whether they agree. bfloat16, which experts need."""
    draw, expected = np.random.default_rng(0), trainer_of(folder).bfloat16()
    model, compiler = trainer_of(folder, "full").bfloat16(), CompileCounterWithBackend("aot_eager")
    for block in [*model.layers.values(), *expected.layers.values()]:
        block.attention.inner_attention = Attention()
    torch._dynamo.reset()
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, torch.compile(block, backend=compiler, fullgraph=True))
    for _ in range(3):
        routes = np.stack([draw.permuted(np.arange(8))[:2] for _ in range(3 * 19)]).reshape(19, 3, 2).astype(np.uint8)
        (row,) = microbatches([PackedSample(PROMPT, PROMPT[:8], 1.0, 1.0, [0.0] * 8, routes=routes)], 32, 1, 32)[0]
        for each in (model, expected):
            each(row, 1.0)[0].sum().backward()
        assert torch.equal(model.agrees, expected.agrees)
    assert compiler.frame_count == 1
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-2, rtol=1e-2)


def test_a_run_of_two_ranks_and_its_record_with_and_without_replay(folder, tmp_path):
    """The same answers, trained on with the sampler's experts and with the trainer's own."""
    flags = {
        "--model.hf_assets_path": str(folder),
        "--model.weights": "hf",
        "--sft.steps": "0",
        "--training.steps": "1",
        "--validation.no-enable": None,
        "--rollout.max_logprob_mismatch": "10",
    }
    recorded = {"--grpo.routing_replay": None, "--rollout.record_gib": "1", "--grpo.minibatches": "2"}
    recorded |= {"--parallelism.expert_parallel_degree": "2"}
    with embedded_server(folder, tmp_path / "server.log", "--dtype", "bfloat16") as url:
        (line,) = train(tmp_path / "run", flags | recorded | {"--rollout.urls": url}, ranks=2)
    again = {}
    for name in ("routing_replay", "no-routing_replay"):
        more = ["--out", str(tmp_path / name), "--grpo.minibatches", "2", f"--grpo.{name}"]
        words = [str(tmp_path / "run"), *arguments(tmp_path / "run", flags), *more]
        run = Ranks(
            1, "torchtitan.grpo.commands", "replay", *words, log=tmp_path / f"{name}.log", environment=environment()
        )
        assert run.wait(120) == 0, run.log[-3000:]
        (again[name],) = steps(tmp_path / name)
    assert line["policy/mismatch_abs"] < 0.05 and 0 < line["policy/route_agreement_all_layers"] < 0.9
    assert again["routing_replay"]["policy/mismatch_abs"] == pytest.approx(line["policy/mismatch_abs"], rel=1e-3)
    for key in ("policy/route_agreement", "policy/route_agreement_all_layers"):  # a near tie may fall the other way
        assert again["routing_replay"][key] == pytest.approx(line[key], abs=5e-3), key
    assert again["no-routing_replay"]["policy/mismatch_abs"] > 0.5
    assert "policy/route_agreement" not in again["no-routing_replay"]
