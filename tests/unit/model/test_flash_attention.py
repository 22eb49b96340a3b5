"""Which attention kernels are chosen, and how two calls of theirs are merged; tests/gpu has what they compute."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model import flash_attention as module
from torchtitan.grpo.model import flash_operator
from torchtitan.grpo.model.documents import Documents, for_compiled_blocks
from torchtitan.grpo.model.flash_attention import choose_attention, flash_attention_2, flash_attention_4
from torchtitan.grpo.model.flash_operator import Kernels
from torchtitan.grpo.policy.rows import SharedPrompts

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (4, 2, 64)


@pytest.fixture(autouse=True)
def fresh():
    module._unfit.cache_clear()
    yield
    module._unfit.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_without_the_package_or_a_gpu_torchs_own_kernels_are_taken(monkeypatch):
    assert choose_attention("auto", CPU, *SHAPE) is flash_attention_2
    monkeypatch.setattr(module, "_installed", lambda: False)
    assert choose_attention("auto", CUDA, *SHAPE) is flash_attention_2
    assert choose_attention("FA2", CUDA, *SHAPE) is flash_attention_2


def test_what_is_asked_for_and_cannot_be_is_refused(monkeypatch, hopper):
    with pytest.raises(UserError, match=r'flash_attention = "FA4": it needs a GPU, and this is a cpu. "auto" runs'):
        choose_attention("FA4", CPU, *SHAPE)
    monkeypatch.setattr(flash_operator, "MODULE", "a_package_that_is_not_there")
    flash_operator.package.cache_clear()
    with pytest.raises(UserError, match="ModuleNotFoundError: No module named 'a_package_that_is_not_there'"):
        choose_attention("FA4", CUDA, *SHAPE)


def test_other_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"compute capabilities 9.x and 10.x, not \(8, 0\)"):
        choose_attention("FA4", CUDA, *SHAPE)


@pytest.mark.parametrize("error,taken", [(0.004, flash_attention_4), (0.5, flash_attention_2)])
def test_auto_takes_what_agrees_in_the_trial(monkeypatch, hopper, error, taken):
    def results(attention, *example):
        ones = torch.ones(8)
        return [ones * (1 + error) if attention is flash_attention_4 else ones]

    monkeypatch.setattr(module, "_installed", lambda: True)
    monkeypatch.setattr(module, "package", lambda: None)
    monkeypatch.setattr(module, "_example", lambda *shape: ())
    monkeypatch.setattr(module, "_results", results)
    assert choose_attention("auto", CUDA, *SHAPE) is taken
    if taken is flash_attention_2:
        with pytest.raises(UserError, match=r"differ from FlashAttention 2's by 0\.5 of their norm"):
            choose_attention("FA4", CUDA, *SHAPE)


def test_the_trial_has_documents_of_one_token_and_across_tiles():
    q, k, v, grad, starts, prompts = module._example(CPU, *SHAPE)
    assert (q.shape, k.shape, v.shape, grad.shape) == ((765, 4, 64), (765, 2, 64), (765, 2, 64), (765, 4, 64))
    assert starts.diff().tolist() == [1, 129, 256, 314, 65]
    assert prompts.tails.tolist() == [*range(386, 765)] and prompts.prompts.tolist() == [*range(130, 330)]


def exact_kernels() -> Kernels:
    """What FlashAttention computes, in the inputs' own precision: each sequence apart."""

    def probabilities(q, k, lse, causal, scale):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf)
        lse = scores.logsumexp(-1) if lse is None else lse
        return (scores - lse[..., None]).exp(), lse

    def spans(lengths):
        bounds = [pairwise(starts.tolist()) for starts in lengths[:2]]
        return [(slice(*q), slice(*k)) for q, k in zip(*bounds, strict=True)]

    def forward(q, k, v, lengths, causal, scale):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for at_q, at_k in spans(lengths):
            p, lse[:, at_q] = probabilities(q[at_q], k[at_k], None, causal, scale)
            out[at_q] = torch.einsum("hqk,khd->qhd", p, v[at_k].repeat_interleave(q.shape[1] // k.shape[1], 1))
        return out, lse

    def backward(grad, q, k, v, out, lse, lengths, causal, scale):
        """FlashAttention 2's formulas (arXiv 2307.08691): they take output and sum of the whole softmax as given."""
        repeats = q.shape[1] // k.shape[1]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at_q, at_k in spans(lengths):
            p, _ = probabilities(q[at_q], k[at_k], lse[:, at_q], causal, scale)
            values = v[at_k].repeat_interleave(repeats, 1)
            d = (grad[at_q] * out[at_q]).sum(-1).t()[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", grad[at_q], values) - d) * scale
            dq[at_q] = torch.einsum("hqk,khd->qhd", ds, k[at_k].repeat_interleave(repeats, 1))
            dk[at_k] = torch.einsum("hqk,qhd->khd", ds, q[at_q]).unflatten(1, (-1, repeats)).sum(2)
            dv[at_k] = torch.einsum("hqk,qhd->khd", p, grad[at_q]).unflatten(1, (-1, repeats)).sum(2)
        return dq, dk, dv

    return Kernels(forward, backward)


def test_documents_attend_to_a_prompt_of_an_earlier_one(monkeypatch):
    """The operator's algebra with exact kernels, against a softmax over whole documents by autograd, in float64."""
    monkeypatch.setitem(flash_operator.KERNELS, 2, exact_kernels())
    # Two groups, one document without a group, and padding. `shared`: how much each has of its group's first one.
    lengths, shared = [9, 3, 1, 5, 6, 4, 3], [0, 5, 5, 0, 0, 2, 0]
    positions = torch.cat([torch.arange(n) + p for n, p in zip(lengths, shared, strict=True)])
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    prompts = SharedPrompts.of(positions, starts)
    assert prompts.cu_tails.tolist() == [0, 4, 8] and prompts.cu_prompts.tolist() == [0, 5, 7]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(31, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 2, 2)]
    grad = torch.randn(31, 4, 8, generator=generator, dtype=torch.float64)

    def whole(q, k, v):
        """Every position attends to all of its own document up to itself."""
        outs, first = [], 0
        for n, p, start in zip(lengths, shared, starts.tolist(), strict=False):
            first = first if p else start
            at = torch.cat([torch.arange(first, first + p), torch.arange(start, start + n)])
            keys, values = (x[at].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
            mask = torch.ones(n, p + n).tril(p).bool()
            queries = q[start : start + n].transpose(0, 1)
            outs.append(F.scaled_dot_product_attention(queries, keys, values, mask, scale=0.3).transpose(0, 1))
        return torch.cat(outs)

    out = flash_attention_2(*inputs, starts, 9, prompts, 0.3)
    ours = [out, *torch.autograd.grad(out, inputs, grad)]
    expected = whole(*inputs)
    theirs = [expected, *torch.autograd.grad(expected, inputs, grad)]
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


def test_compile_knows_the_operator():
    """Shapes without a GPU: what torch.compile traces with."""
    q, k = torch.empty(10, 4, 64, device="meta"), torch.empty(10, 2, 64, device="meta")
    out = flash_attention_4(q.requires_grad_(), k, k, torch.empty(3, dtype=torch.int32, device="meta"), 10)
    assert out.shape == q.shape and out.requires_grad


def test_a_compiled_block_serves_rows_with_and_without_shared_prompts(monkeypatch):
    """In one graph, compiled once: without a GPU the operator's place in it, by exact kernels."""
    monkeypatch.setitem(flash_operator.KERNELS, 2, exact_kernels())
    torch._dynamo.reset()

    def block(q, k, documents):
        return flash_attention_2(q * 2, k, k, documents.cu_seq_q, documents.max_q, documents.prompts, 0.3) + q

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    rows = [([24], [0]), ([10, 3, 2, 9], [0, 4, 4, 0]), ([5, 2, 1, 1, 6, 9], [0, 2, 2, 2, 0, 3]), ([12, 12], [0, 0])]
    for i, (lengths, shared) in enumerate(rows):
        positions = torch.cat([torch.arange(n) + p for n, p in zip(lengths, shared, strict=True)])
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        q, k = torch.randn(24, 4, 8, requires_grad=True), torch.randn(24, 2, 8, requires_grad=True)
        prompts = for_compiled_blocks(SharedPrompts.of(positions, starts), 24, 24, starts.device)
        documents = Documents(starts, starts, 24, 24, prompts)
        expected = torch.autograd.grad(block(q, k, documents).square().sum(), (q, k))
        torch._dynamo.maybe_mark_dynamic(starts, 0)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(q, k, documents)
        for found, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k)), expected, strict=True):
            torch.testing.assert_close(found, wanted)
