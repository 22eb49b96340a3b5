"""Which attention kernels are chosen, and how documents reach a prompt. tests/gpu has what the kernels compute."""

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model import flash_attention as module
from torchtitan.grpo.model import flash_operator
from torchtitan.grpo.model.documents import Documents, documents_for_compiled_blocks, documents_of
from torchtitan.grpo.model.flash_attention import attention, choose_attention
from torchtitan.grpo.model.flash_operator import Kernels
from torchtitan.grpo.policy.microbatch import DocumentKeys

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
    assert choose_attention("auto", CPU, *SHAPE) == 2
    monkeypatch.setattr(module, "_installed", lambda: False)
    assert choose_attention("auto", CUDA, *SHAPE) == 2
    assert choose_attention("FA2", CUDA, *SHAPE) == 2


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


@pytest.mark.parametrize("error,taken", [(0.004, 4), (0.5, 2)])
def test_auto_takes_what_agrees_in_the_trial(monkeypatch, hopper, error, taken):
    def results(attends, *example):
        ones = torch.ones(8)
        return [ones * (1 + error) if attends.keywords["version"] == 4 else ones]

    monkeypatch.setattr(module, "_installed", lambda: True)
    monkeypatch.setattr(module, "package", lambda: None)
    monkeypatch.setattr(module, "_example", lambda *shape: ())
    monkeypatch.setattr(module, "_results", results)
    assert choose_attention("auto", CUDA, *SHAPE) == taken
    if taken == 2:
        with pytest.raises(UserError, match=r"differ from FlashAttention 2's by 0\.5 of their norm"):
            choose_attention("FA4", CUDA, *SHAPE)


def test_the_trial_has_documents_of_one_token_and_across_tiles():
    q, k, v, grad, documents = module._example(CPU, *SHAPE)
    assert (q.shape, k.shape, v.shape, grad.shape) == ((765, 4, 64), (765, 2, 64), (765, 2, 64), (765, 4, 64))
    assert documents.cu_seq_q.diff().tolist() == [1, 129, 256, 314, 65]
    assert documents.cu_seq_k.diff().tolist() == [1, 129, 256, 514, 265] and documents[2:4] == (314, 514)


def exact_kernels() -> Kernels:
    """What FlashAttention computes, in the inputs' precision, each document apart. The mask ends at the last key."""

    def parts(q, k, lengths, scale, window):
        """Of each document its queries, its keys, and softmax [heads, queries, keys]. Keys are repeated for heads."""
        bounds = [pairwise(starts.tolist()) for starts in lengths[:2]]
        for (start, end), (first, last) in zip(*bounds, strict=True):
            scores = torch.einsum("qhd,khd->hqk", q[start:end], many(k[first:last])) * scale
            offset = last - first - (end - start)
            seen = torch.ones(scores.shape[1:]).tril(offset)
            hidden = (seen.triu(offset + 1 - window) if window else seen) == 0
            yield slice(start, end), slice(first, last), scores.masked_fill(hidden, -torch.inf).softmax(-1)

    def many(x):
        return x.repeat_interleave(2, 1)

    def forward(q, k, v, lengths, scale, window):
        found = [torch.einsum("hqk,khd->qhd", p, many(v[at_k])) for _, at_k, p in parts(q, k, lengths, scale, window)]
        return torch.cat(found), q.new_zeros(q.shape[1], q.shape[0])

    def backward(grad, q, k, v, out, lse, lengths, scale, window):
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at_q, at_k, p in parts(q, k, lengths, scale, window):
            dp = torch.einsum("qhd,khd->hqk", grad[at_q], many(v[at_k]))
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            dq[at_q] = torch.einsum("hqk,khd->qhd", ds, many(k[at_k]))
            dk[at_k] = torch.einsum("hqk,qhd->khd", ds, q[at_q]).unflatten(1, (-1, 2)).sum(2)
            dv[at_k] = torch.einsum("hqk,qhd->khd", p, grad[at_q]).unflatten(1, (-1, 2)).sum(2)
        return dq, dk, dv

    return Kernels(forward, backward)


def row(lengths: list[int], shared: list[int]) -> tuple[torch.Tensor, DocumentKeys | None]:
    """Bounds and keys of a row. `shared`: how many positions of a document are in the last one that is whole."""
    positions = torch.cat([torch.arange(n) + p for n, p in zip(lengths, shared, strict=True)])
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return starts, DocumentKeys.of(positions, starts)


@pytest.mark.parametrize("window", [0, 4])
def test_documents_attend_to_a_prompt_of_an_earlier_one(window, monkeypatch):
    """The operator with exact kernels, against the same documents with a prompt each, by autograd, in float64."""
    monkeypatch.setitem(flash_operator.KERNELS, 2, exact_kernels())
    # Two groups, one document without a group, and padding.
    lengths, shared = [9, 3, 1, 5, 6, 4, 3], [0, 5, 5, 0, 0, 2, 0]
    starts, keys = row(lengths, shared)
    assert keys.cu_keys.diff().tolist() == [n + p for n, p in zip(lengths, shared, strict=True)] and keys.longest == 9
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(31, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 2, 2)]
    grad = torch.randn(31, 4, 8, generator=generator, dtype=torch.float64)

    def apart(q, k, v):
        q, k, v = (x[keys.positions].split(keys.cu_keys.diff().tolist()) for x in (q, k, v))
        outs = []
        for i, p in enumerate(shared):
            one = [x[i].transpose(0, 1) for x in (q, k, v)]
            mask = torch.ones(one[0].shape[1], one[0].shape[1], dtype=torch.bool).tril().triu(1 - (window or 99))
            attended = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=0.3, enable_gqa=True)
            outs.append(attended.transpose(0, 1)[p:])
        return torch.cat(outs)

    out = attention(*inputs, Documents(starts, keys.cu_keys, 9, keys.longest, keys), 0.3, window)
    ours = [out, *torch.autograd.grad(out, inputs, grad)]
    expected = apart(*inputs)
    theirs = [expected, *torch.autograd.grad(expected, inputs, grad)]
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_compile_knows_the_operator():
    """Shapes without a GPU: what torch.compile traces with."""
    q, k = torch.empty(10, 4, 64, device="meta"), torch.empty(10, 2, 64, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    out = attention(q.requires_grad_(), k, k, Documents(starts, starts, 10, 10), version=4)
    assert out.shape == q.shape and out.requires_grad


def test_a_compiled_block_serves_rows_with_and_without_shared_prompts(monkeypatch):
    """In one graph, compiled once: without a GPU the operator's place in it, by exact kernels."""
    monkeypatch.setitem(flash_operator.KERNELS, 2, exact_kernels())
    torch._dynamo.reset()

    def block(q, k, documents):
        return attention(q * 2, k, k, documents, 0.3) + q

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    rows = [([24], [0]), ([10, 3, 2, 9], [0, 4, 4, 0]), ([5, 2, 1, 1, 6, 9], [0, 2, 2, 2, 0, 3]), ([12, 12], [0, 0])]
    for i, layout in enumerate(rows):
        starts, keys = row(*layout)
        q, k = torch.randn(24, 4, 8, requires_grad=True), torch.randn(24, 2, 8, requires_grad=True)
        given = SimpleNamespace(tokens=q, cu_seqlens=starts, keys=keys, max_seqlen=24)
        expected = torch.autograd.grad(block(q, k, documents_of(given)).square().sum(), (q, k))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(q, k, documents_for_compiled_blocks(given, 24))
        for found, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k)), expected, strict=True):
            torch.testing.assert_close(found, wanted)
