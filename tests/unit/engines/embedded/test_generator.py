"""The embedded engine's generator against plain transformers."""

import math
import queue
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.helpers import Unspeakable
from torchtitan.grpo.engines.embedded.bodies import reply
from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.engines.embedded.model import ModelUpdate
from torchtitan.grpo.engines.embedded.sampling import noise_key, sample, uniform
from torchtitan.grpo.engines.embedded.worker import GenerationWorker
from torchtitan.grpo.engines.protocol import SamplingParams

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # Larger than usual, so that distributions are far from uniform.
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}


def make_model(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)).eval()


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


def make_generator(model: PreTrainedModel, **kwargs) -> Generator:
    return Generator(model, **({"max_sequences": 64, "max_model_len": 128} | kwargs))


def prompts_of(lengths: list[int], seed: int = 1) -> list[list[int]]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=noise).tolist() for length in lengths]


def finish(generator: Generator) -> list[Request]:
    finished = []
    for _ in range(10_000):
        if not generator.busy:
            return finished
        finished += generator.step()
    raise AssertionError("the generator never became idle")


def answers(requests: list[Request]) -> list[list[list[int]]]:
    return [[row.token_ids for row in request.answers] for request in requests]


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float):
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)


def assert_logprobs(model: PreTrainedModel, requests: list[Request]) -> None:
    for request in requests:
        for row in request.answers:
            expected = reference_logprobs(model, request.prompt_ids, row.token_ids, request.params.temperature or 1.0)
            torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=1e-4, rtol=0)


def test_logprobs_match_a_plain_forward(model: PreTrainedModel) -> None:
    generator = make_generator(model)
    requests = []
    for i, prompt in enumerate(prompts_of([3, 17, 1, 9, 30])):
        params = SamplingParams(n=3, temperature=(0.7, 1.0)[i % 2], max_tokens=5 + 4 * i, seed=i)
        requests.append(Request(str(i), prompt, params))
    generator.add(requests)
    finish(generator)
    assert [len(row.token_ids) for row in requests[3].answers] == [17, 17, 17]
    assert_logprobs(model, requests)


def test_greedy_is_transformers_generate(model: PreTrainedModel) -> None:
    generator = make_generator(model)
    prompts = prompts_of([4, 11, 7])
    requests = [Request(str(i), p, SamplingParams(1, 0.0, 12)) for i, p in enumerate(prompts)]
    generator.add(requests)
    finish(generator)
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert request.answers[0].token_ids == expected[0, len(prompt) :].tolist()
    assert_logprobs(model, requests)


def cut(top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(1, 1.0, 1, top_p=top_p, top_k=top_k, min_p=min_p)


def test_top_p_keeps_the_likeliest_tokens_of_their_own_rows() -> None:
    probabilities = torch.tensor([0.4, 0.1, 0.3, 0.2])
    logits, temperatures = probabilities.log().expand(3000, 4), torch.ones(3000)
    keys, positions = torch.arange(3000) * 7919, torch.zeros(3000, dtype=torch.int64)
    cuts = {row: cut([0.65, 0.75, 0.0, 0.35][row % 4]) for row in range(1500)}
    tokens, logprobs, *_ = sample(logits, temperatures, keys, positions, cuts=cuts)
    plain, full, *_ = sample(logits, temperatures, keys, positions)
    assert torch.equal(tokens[1500:], plain[1500:]) and torch.equal(logprobs[1500:], full[1500:])
    for number, kept in enumerate([[0, 2], [0, 2, 3], [0], [0]]):
        own = slice(number, 1500, 4)
        assert set(tokens[own].tolist()) == set(kept)
        expected = (probabilities / probabilities[kept].sum())[tokens[own]].log()
        torch.testing.assert_close(logprobs[own], expected)
        shares = torch.bincount(tokens[own], minlength=4)[kept] / 375
        assert (shares - probabilities[kept] / probabilities[kept].sum()).abs().max() < 0.1


CUTS = [cut(top_k=5), cut(0.8, 6), cut(0.8, 0, 0.1), cut(1.0, 8, 0.3), cut(0.7, 9, 0.05), cut(0.9, 64), cut(1e-9, 3)]


def chi_square_bound(freedom: int) -> float:
    """The 99.9 % quantile of chi-square, by Wilson and Hilferty's approximation (1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9


@pytest.mark.parametrize("params", CUTS, ids=lambda params: f"{params.top_p}-{params.top_k}-{params.min_p}")
def test_cut_distributions(params: SamplingParams) -> None:
    """Which tokens are kept, against the definitions in float64; their counts, by a chi-square test; and all are told
    in chunks of any size."""
    draws = 8000
    logits = (torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2).double()
    temperature = 0.8
    order = (-logits).argsort().tolist()
    shares = (logits / temperature).softmax(0).tolist()
    best = [token for token in order if shares[token] >= params.min_p * shares[order[0]]][: params.top_k or None]
    mass = sum(shares[token] for token in best)
    before = [sum(shares[token] for token in best[:i]) for i in range(len(best))]
    best = [token for i, token in enumerate(best) if params.top_p == 1 or not i or before[i] < params.top_p * mass]
    expected = torch.tensor([shares[token] for token in best], dtype=torch.float64)
    expected /= expected.sum()

    told = {row: replace(params, kept=row % 2 == 0) for row in range(draws)}
    keys, positions = torch.arange(draws) * 104729, torch.zeros(draws, dtype=torch.int64)
    rows = logits.float().expand(draws, -1)
    tokens, logprobs, _, _, kept = sample(rows, torch.full((draws,), temperature), keys, positions, cuts=told)
    assert sorted(kept) == list(range(0, draws, 2))
    assert {tuple(ids.tolist()) for ids in kept.values()} == {tuple(sorted(best))}
    assert kept[0].dtype == np.int32
    counts = torch.bincount(tokens, minlength=64)[best].double()
    assert int(counts.sum()) == draws
    chi_square = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    assert chi_square <= chi_square_bound(len(best) - 1)
    of_token = dict(zip(best, expected.log().tolist(), strict=True))
    torch.testing.assert_close(logprobs.double(), torch.tensor([of_token[t] for t in tokens.tolist()]).double())


def test_a_stop_string_ends_its_own_rows(model: PreTrainedModel) -> None:
    generator = make_generator(model, decode=lambda ids: "".join(chr(32 + token) for token in ids))
    [prompt] = prompts_of([7])
    whole = Request("whole", prompt, SamplingParams(2, 1.0, 30, seed=3))
    generator.add([whole])
    finish(generator)
    text = generator.decode(whole.answers[0].token_ids)
    stopped = Request("stopped", prompt, SamplingParams(2, 1.0, 30, seed=3, stop=(text[10:13], "not in it")))
    beside = Request("beside", prompt, SamplingParams(2, 1.0, 30, seed=3))
    generator.add([stopped, beside])
    finish(generator)
    assert stopped.answers[0].token_ids == whole.answers[0].token_ids[: text.index(text[10:13]) + 3]
    assert (stopped.answers[0].finish_reason, whole.answers[0].finish_reason) == ("stop", "length")
    assert answers([beside]) == answers([whole])


def test_answers_do_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    def make() -> list[Request]:
        lengths = [5, 23, 2, 14, 9, 31]
        return [
            Request(str(i), p, SamplingParams(n=2, temperature=1.0, max_tokens=4 + 5 * i, seed=100 + i))
            for i, p in enumerate(prompts_of(lengths))
        ]

    together = make()
    generator = make_generator(model)
    generator.add(together)
    finish(generator)

    alone = make()
    for request in alone:
        generator = make_generator(model)
        generator.add([request])
        finish(generator)

    staggered = make()
    generator = make_generator(model, max_sequences=5)
    for request in reversed(staggered):
        generator.add([request])
        generator.step()
        generator.step()
    finish(generator)

    assert answers(together) == answers(alone) == answers(staggered)
    assert len({tuple(row.token_ids) for row in together[5].answers}) == 2  # two samples, two answers


def computed_tokens(model: PreTrainedModel, requests: list[Request]) -> list[list[int]]:
    """[rows, tokens] of each forward pass that generates the requests' answers."""
    shapes: list[list[int]] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: shapes.append([*inputs[0].shape]))
    generator = make_generator(model)
    generator.add(requests)
    finish(generator)
    hook.remove()
    return shapes


def test_answers_are_computed_once_until_they_differ(model: PreTrainedModel) -> None:
    prompts = prompts_of([9, 6])
    greedy = [Request(str(i), prompt, SamplingParams(5, 0.0, 4)) for i, prompt in enumerate(prompts)]
    assert computed_tokens(model, greedy) == [[2, 9], [2, 1], [2, 1], [2, 1]]
    sampled = [Request(str(i), prompt, SamplingParams(8, 0.4, 12, seed=i)) for i, prompt in enumerate(prompts)]
    (rows, width), *decoded = computed_tokens(model, sampled)
    assert (rows, width) == (2, 9)
    for number, (rows, width) in enumerate(decoded, start=1):
        begun = [{tuple(answer.token_ids[:number]) for answer in request.answers} for request in sampled]
        assert (rows, width) == (sum(map(len, begun)), 1)
    assert 2 < decoded[0][0] < decoded[-1][0], "they branch more than once"
    assert_logprobs(model, sampled)


def test_branches_end_one_after_another_and_others_take_their_places(model: PreTrainedModel) -> None:
    """Rows are copied within one step from and to each other's places."""
    generator = make_generator(model, end_token_ids=tuple(range(0, VOCAB, 5)), max_sequences=24)
    prompts = prompts_of([4, 12, 7, 3, 9, 5])
    requests = [Request(str(i), prompt, SamplingParams(8, 0.6, 25, seed=i)) for i, prompt in enumerate(prompts)]
    generator.add(requests)
    finish(generator)
    assert len({len(answer.token_ids) for request in requests for answer in request.answers}) > 5
    assert_logprobs(model, requests)


def test_a_branched_request_is_preempted(model: PreTrainedModel) -> None:
    generator = make_generator(model)
    whole, broken = [Request("r", prompts_of([6])[0], SamplingParams(8, 0.5, 14, seed=5)) for _ in range(2)]
    generator.add([whole])
    finish(generator)
    generator.add([broken])
    begun = []
    for _ in range(3):
        generator.step()
        begun.append(len({tuple(answer.token_ids) for answer in broken.answers}))
        generator.preempt()
    assert 1 < begun[0] < 8
    finish(generator)
    assert answers([broken]) == answers([whole])
    assert_logprobs(model, [broken])


def test_small_memory_only_delays(model: PreTrainedModel) -> None:
    prompts = prompts_of([6, 10, 3, 8])
    params = SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=3)
    roomy, tight = [[Request(str(i), p, params) for i, p in enumerate(prompts)] for _ in range(2)]
    generator = make_generator(model)
    generator.add(roomy)
    finish(generator)
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
    generator = make_generator(model, cache_bytes=40 * token_bytes)
    generator.add(tight)
    most = 0
    while generator.busy:
        generator.step()
        most = max(most, generator.running)
    assert 1 <= most <= 4
    assert answers(roomy) == answers(tight)
    with pytest.raises(ValueError, match="memory holds 40"):
        generator.check(30, 20)


def test_few_long_answers_after_many_short_ones_take_no_more_memory(model: PreTrainedModel) -> None:
    """Keys and values are rows of equal length: most rows times most tokens would be four times what it may have."""
    token_bytes = 2 * 2 * 2 * 16 * 4
    results = []
    for tokens in (1280, 1 << 20):
        short = [Request(f"s{i}", [1, 2], SamplingParams(1, 1.0, 10 + i % 21, seed=i)) for i in range(60)]
        long = [Request(f"l{i}", [1, 2], SamplingParams(1, 1.0, 126, seed=i)) for i in range(9)]
        generator = make_generator(model, cache_bytes=tokens * token_bytes)
        generator.add(short + long)
        while generator.busy:
            generator.step()
            assert generator._cache.row_capacity * generator._cache.token_capacity <= tokens
        results.append(answers(short + long))
    assert results[0] == results[1]


def test_stop_end_and_length(model: PreTrainedModel) -> None:
    prompt = prompts_of([6])[0]

    def run(end_token_ids: tuple[int, ...] = (), **kwargs):
        generator = make_generator(model, end_token_ids=end_token_ids)
        request = Request(
            "r", prompt, SamplingParams(**({"n": 1, "temperature": 1.0, "max_tokens": 20, "seed": 5} | kwargs))
        )
        generator.add([request])
        assert finish(generator) == [request]
        return request.answers[0]

    free = run()
    assert (len(free.token_ids), free.finish_reason) == (20, "length")
    stop = free.token_ids[7]
    cut = free.token_ids[: free.token_ids.index(stop) + 1]
    stopped = run(stop_token_ids=(stop,))
    assert (stopped.token_ids, stopped.finish_reason) == (cut, "stop")
    ended = run(end_token_ids=(stop,))
    assert (ended.token_ids, ended.finish_reason) == (cut, "stop")
    ignored = run(end_token_ids=(stop,), ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == (free.token_ids, "length")
    assert run(max_tokens=1).token_ids == free.token_ids[:1]
    both = run(end_token_ids=(stop,), ignore_eos=True, stop_token_ids=(stop,))
    assert both.token_ids == cut


def test_length_limit(model: PreTrainedModel) -> None:
    generator = make_generator(model, max_model_len=32)
    request = Request("r", prompts_of([31])[0], SamplingParams(1, 1.0, 1, seed=0))
    generator.add([request])
    finish(generator)
    assert len(request.answers[0].token_ids) == 1
    with pytest.raises(ValueError, match=r"32 tokens.*--max-model-len is 32"):
        generator.check(32, 1)
    with pytest.raises(ValueError, match=r"30 \+ 3 tokens.*--max-model-len is 32"):
        generator.check(30, 3)


def test_cancelled_requests_leave_at_the_next_step(model: PreTrainedModel) -> None:
    generator = make_generator(model, max_sequences=4)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=30, seed=2)
    requests = [Request(str(i), p, params) for i, p in enumerate(prompts_of([5, 6, 7]))]
    generator.add(requests)
    generator.step()
    requests[0].cancelled = True  # running
    generator.step()
    assert generator.running == 4  # the third request took its place
    requests[2].cancelled = True
    assert finish(generator) == [requests[1]]
    assert_logprobs(model, [requests[1]])


def test_preempted_rows_are_computed_again_under_new_weights() -> None:
    model, other = make_model(seed=0), make_model(seed=1)
    generator = make_generator(model)
    params = SamplingParams(n=2, temperature=0.7, max_tokens=12, seed=4)
    requests = [Request(str(i), p, params) for i, p in enumerate(prompts_of([5, 13]))]
    generator.add(requests)
    generator.step()
    generator.step()
    old = [[(list(row.token_ids), list(row.logprobs)) for row in request.answers] for request in requests]
    update = ModelUpdate(model)
    update.load(list(other.state_dict().items()))
    update.check_complete()
    generator.version = "7"
    generator.preempt()
    assert finish(generator)
    for request, before in zip(requests, old, strict=True):
        for row, (tokens, logprobs) in zip(request.answers, before, strict=True):
            cut = len(tokens)
            assert (row.token_ids[:cut], row.logprobs[:cut]) == (tokens, logprobs)
            assert row.version_starts == [("default", 0), ("7", cut)]
            expected = reference_logprobs(other, request.prompt_ids, row.token_ids, 0.7)[cut:]
            torch.testing.assert_close(torch.tensor(row.logprobs[cut:]), expected, atol=1e-4, rtol=0)


def test_dropped_requests_keep_what_they_have(model: PreTrainedModel) -> None:
    generator = make_generator(model, max_sequences=2)
    params = SamplingParams(n=1, temperature=1.0, max_tokens=30, seed=2)
    requests = [Request(str(i), p, params) for i, p in enumerate(prompts_of([5, 6, 7]))]
    generator.add(requests)
    generator.step()
    assert generator.drop() == requests
    assert [len(request.answers[0].token_ids) for request in requests] == [2, 2, 0]
    assert {request.answers[0].finish_reason for request in requests} == {"abort"}
    assert not generator.busy


def test_top_logprobs_follow_the_temperature(model: PreTrainedModel) -> None:
    gaps = []
    for temperature in (1.0, 2.0):
        generator = make_generator(model)
        params = SamplingParams(1, temperature, 1, seed=0)
        request = Request("r", prompts_of([6])[0], params, top_logprobs=VOCAB)
        generator.add([request])
        finish(generator)
        row = request.answers[0]
        values = dict(zip(*row.top_tokens[0], strict=True))
        assert len(values) == VOCAB and values[row.token_ids[0]] == row.logprobs[0]
        gaps.append(values[1] - values[2])
    assert gaps[1] == pytest.approx(gaps[0] / 2, rel=1e-4)


def test_a_reply_has_no_infinity(model: PreTrainedModel) -> None:
    generator = make_generator(model)
    request = Request("r", prompts_of([6])[0], SamplingParams(1, 1.0, 1, seed=0, top_p=0.01), top_logprobs=VOCAB)
    generator.add([request])
    finish(generator)
    assert -math.inf in request.answers[0].top_tokens[0][1]
    content = reply(request, "model")["choices"][0]["logprobs"]["content"]
    values = [top["logprob"] for top in content[0]["top_logprobs"]]
    assert len(values) == VOCAB and min(values) == -9999 and max(values) == content[0]["logprob"]


def test_nan_weights_are_an_error() -> None:
    model = make_model()
    generator = make_generator(model)
    generator.add([Request("r", [1, 2, 3], SamplingParams(1, 1.0, 4, seed=0))])
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        generator.step()


def test_updates_name_what_is_wrong() -> None:
    model = make_model()
    update = ModelUpdate(model)
    with pytest.raises(ValueError, match=r"no parameter 'model\.nothing'"):
        update.load([("model.nothing", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"model\.norm\.weight: the served model has"):
        update.load([("model.norm.weight", torch.zeros(3))])
    update.load([("model.norm.weight", torch.ones(64))])
    with pytest.raises(ValueError, match=r"were never sent: lm_head\.weight"):
        update.check_complete()
    tied = make_model("llama")
    update = ModelUpdate(tied)
    update.load([(name, p) for name, p in tied.named_parameters()])
    update.check_complete()


def test_samples_follow_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 2
    logits[0, 3] = -math.inf
    draws = 20_000
    keys = torch.tensor([noise_key(0, i) for i in range(draws)])
    positions = torch.arange(draws) % 7
    for temperature in (1.0, 0.5):
        temperatures = torch.full((draws,), temperature)
        tokens, logprobs, *_ = sample(logits.expand(draws, -1), temperatures, keys, positions)
        expected = torch.softmax(logits[0] / temperature, -1)
        observed = torch.bincount(tokens, minlength=12) / draws
        # Five standard deviations of a binomial frequency.
        assert bool(((observed - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all())
        torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_noise_is_uniform_and_belongs_to_key_and_position() -> None:
    keys = torch.tensor([noise_key(seed, row) for seed in range(50) for row in range(4)])
    noise = torch.stack([uniform(keys, torch.full_like(keys, position)) for position in range(500)])  # [500, 200]
    assert 0 <= noise.min() < noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / noise.numel()) ** 0.5)
    assert noise.flatten().unique().numel() == noise.numel()
    correlation = torch.corrcoef(noise.T)  # between rows
    assert (correlation - torch.eye(len(keys))).abs().max() < 0.25
    later = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert abs(later) < 0.02


def test_a_step_whose_error_cannot_say_what_it_is_ends_its_requests(monkeypatch) -> None:
    def step(admit: bool) -> list[Request]:
        raise Unspeakable

    generator, ended = make_generator(make_model()), queue.SimpleQueue[list[Request]]()
    monkeypatch.setattr(generator, "step", step)
    worker = GenerationWorker(generator, ended.put)
    worker.start()
    for _ in range(2):
        worker.add([Request("r", [1], SamplingParams(1, 0.0, 4))])
        (request,) = ended.get(timeout=10)
        assert request.error == "generation failed: (what Unspeakable says cannot be read)"
    worker.close(10)


def test_requests_whose_step_runs_out_of_memory_are_told_and_the_next_ones_are_served(monkeypatch) -> None:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    generator, ended = make_generator(model), queue.SimpleQueue[list[Request]]()
    worker = GenerationWorker(generator, ended.put)
    worker.start()

    def answered() -> Request:
        worker.add([Request("r", [1, 2], SamplingParams(1, 0.0, 60), routes=True)])
        while not (requests := ended.get(timeout=10)):
            pass
        return requests[0]

    whole = answered()
    cache = generator._cache
    for part, name in ((model.base_model.norm, "forward"), (cache, "reserve"), (cache.layers[1], "resize")):
        generator.drop_cache()
        runs_out = Mock(side_effect=torch.OutOfMemoryError("no memory"))
        with monkeypatch.context() as patch:
            patch.setattr(part, name, runs_out)
            assert answered().error == "generation failed: no memory", name
        assert answered().answers[0].token_ids == whole.answers[0].token_ids, name
    worker.close(10)


@pytest.mark.parametrize("part", ["_decode", "_arrange"])
def test_a_request_that_is_complete_is_answered_though_its_step_fails(
    model: PreTrainedModel, part, monkeypatch
) -> None:
    generator, ended = make_generator(model), queue.SimpleQueue[list[Request]]()
    short, long = (Request(f"r{tokens}", [1, 2], SamplingParams(1, 0.0, tokens)) for tokens in (1, 60))
    monkeypatch.setattr(generator, part, Mock(side_effect=torch.OutOfMemoryError("no memory")))
    worker = GenerationWorker(generator, ended.put)
    worker.start()
    worker.add([short, long])
    assert ended.get(timeout=10) == [short, long]
    assert (short.error, long.error) == (None, "generation failed: no memory")
    assert [short.answers[0].finish_reason, long.answers[0].finish_reason] == ["length", "abort"]
    worker.close(10)
