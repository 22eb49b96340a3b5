import functools
import shutil

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.model.logprobs import token_logprobs
from torchtitan.grpo.policy.microbatch import Kept

TOKENS, DIM, VOCAB = 37, 16, 50


def inputs(dtype=torch.float32, tokens=TOKENS, vocab=VOCAB, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, DIM, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(vocab, DIM, generator=rng).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=rng)
    return hidden, weight, targets


def naive(hidden, weight, targets, temperature, others=None, softcap=0.0, round_logits=False):
    """The definition, over the whole [T, V] at once."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = (hidden @ weight.T).to(dtype) if round_logits else hidden.to(dtype) @ weight.to(dtype).T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    log_p = (logits / temperature).log_softmax(-1)
    of_target, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    if others is None:
        return of_target, entropy
    known = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, others.long(), True)
    rest = log_p.masked_fill(known, -torch.inf).logsumexp(1, keepdim=True)
    return of_target, entropy, torch.cat([log_p.gather(1, others.long()), rest], 1)


def different_tokens(tokens=TOKENS, vocab=VOCAB, k=4, seed=1):
    """[T, K] int32, at some positions with the target of `inputs` and with token 0, on which absent tokens fall."""
    rng = torch.Generator().manual_seed(seed)
    others = torch.stack([torch.randperm(vocab, generator=rng)[:k] for _ in range(tokens)]).int()
    targets = inputs(tokens=tokens, vocab=vocab)[2].int()
    for t in range(0, tokens, 3):
        if targets[t] not in others[t]:
            others[t, t % k] = targets[t]
        if 0 not in others[t]:
            others[t, (t + 1) % k] = 0
    return others


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1024])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_match_log_softmax(temperature, chunk_tokens, with_entropy):
    hidden, weight, targets = inputs()
    upstream = torch.linspace(-1, 2, TOKENS)
    results = []
    for function in (naive, lambda *a: token_logprobs(*a, chunk_tokens=chunk_tokens)):
        logprobs, entropy = function(hidden, weight, targets, temperature)
        assert logprobs.dtype == entropy.dtype == torch.float32
        loss = (upstream * logprobs).sum() + (upstream.flip(0) * entropy).sum() * with_entropy
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept_bytes", [0, 2 * 8 * VOCAB * 4])
def test_a_softcap_bends_logits_before_the_temperature(kept_bytes):
    """With other tokens and entropy, in chunks of which some are kept."""
    hidden, weight, targets = inputs()
    others, results = different_tokens(), []
    ours = functools.partial(token_logprobs, chunk_tokens=8, kept_bytes=kept_bytes)
    for function in (naive, ours):
        logprobs, entropy, of_others = function(hidden, weight, targets, 0.7, others=others, softcap=3.0)
        loss = logprobs.sum() + 0.3 * entropy.sum() + (of_others * torch.linspace(-1, 2, 5)).sum()
        results.append((logprobs, entropy, of_others, *torch.autograd.grad(loss, (hidden, weight))))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (naive(hidden, weight, targets, 0.7)[0] - results[0][0]).abs().max() > 1, "the softcap does something"


def kept_tokens(targets: torch.Tensor, vocab=VOCAB, seed=2) -> KeptTokens:
    """Some tokens at each position, the target among them; at every fifth one all."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 12, targets.shape, generator=rng).tolist()
    masks = [{int(t), *torch.randperm(vocab, generator=rng)[:n].tolist()} for t, n in zip(targets, sizes, strict=True)]
    masks[::5] = [set(range(vocab)) for _ in masks[::5]]
    return KeptTokens.of([list(mask) for mask in masks], targets.tolist(), vocab)


def kept_on(device, kept: KeptTokens) -> Kept:
    counts, ids = (torch.from_numpy(array).to(device) for array in (kept.counts, kept.ids))
    return Kept(counts, ids, np.append(0, kept.counts.cumsum()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("chunk_tokens", "kept_bytes"), [(8, 0), (8, 2 * 8 * VOCAB * 8), (1024, 0)])
def test_of_kept_tokens_alone(dtype, softcap, chunk_tokens, kept_bytes):
    """Values and gradients against float64 code with -inf for the tokens that the sampler cut."""
    hidden, weight, targets = inputs(dtype)
    kept = kept_tokens(targets)
    assert not kept.counts[::5].any() and kept.counts[1::5].all()
    own = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    logits = own[0] @ own[1].T
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7
    cut: np.ndarray = np.repeat(kept.counts[:, None] > 0, VOCAB, 1)
    cut[np.repeat(np.arange(TOKENS), kept.counts), kept.ids] = False
    log_p = logits.masked_fill(torch.from_numpy(cut), -torch.inf).log_softmax(-1)
    shares = log_p.exp()
    of_target = log_p.gather(1, targets[:, None])[:, 0]
    expected = of_target, -(shares * log_p.masked_fill(torch.from_numpy(cut), 0)).sum(1)
    options = {"softcap": softcap, "chunk_tokens": chunk_tokens, "kept_bytes": kept_bytes, "predictions": True}
    *found, likeliest = token_logprobs(hidden, weight, targets, 0.7, kept=kept_on("cpu", kept), **options)
    upstream, results = torch.linspace(-1, 2, TOKENS).double(), []
    for (logprobs, entropy), leaves in ((expected, own), (found, (hidden, weight))):
        loss = (upstream * logprobs).sum() + 0.3 * entropy.sum()
        results.append((logprobs, entropy, *torch.autograd.grad(loss, leaves)))
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)
    assert torch.equal(likeliest, of_target >= log_p.amax(1))
    alone = token_logprobs(hidden, weight, targets, 0.7, softcap=softcap)[0]
    assert (alone - found[0]).abs().max() > 1, "without the kept tokens it is another policy"


@pytest.mark.parametrize(("kept_bytes", "chunks"), [(0, 0), (8 * VOCAB * 4 - 1, 0), (2 * 8 * VOCAB * 4, 2), (10**9, 5)])
def test_kept_logits_change_nothing_but_memory(kept_bytes, chunks):
    """37 tokens in chunks of 8: the last one has 5, which would fit where a whole chunk does not."""
    hidden, weight, targets = inputs()
    results, saved = [], []
    for room in (0, kept_bytes):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            logprobs, entropy = token_logprobs(hidden, weight, targets, 0.9, chunk_tokens=8, kept_bytes=room)
        results.append((logprobs, *torch.autograd.grad((logprobs - 0.1 * entropy).sum(), (hidden, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    kept = [t for t in saved if t.ndim == 2 and t.shape[1] == VOCAB]
    assert len(kept) == chunks and sum(t.nbytes for t in kept) <= kept_bytes
    with torch.no_grad():
        assert torch.equal(token_logprobs(hidden, weight, targets, 0.9, chunk_tokens=8)[0], results[1][0])


@pytest.mark.parametrize("chunk_tokens", [8, 1024])
@pytest.mark.parametrize("parts", [(1, 0, 1), (0, 0, 1), (1, 1, 1), (1, 0, 0)], ids=str)
def test_other_tokens_have_their_logprobs_and_gradients(chunk_tokens, parts):
    hidden, weight, targets = inputs()
    others, upstream = different_tokens(), torch.linspace(-1, 2, TOKENS)
    assert (others == targets[:, None]).any(1).sum() > 10 and (others == 0).any(1).sum() > 10
    results = []
    for function in (naive, lambda *a: token_logprobs(*a[:-1], others=a[-1], chunk_tokens=chunk_tokens)):
        logprobs, entropy, of_others = function(hidden, weight, targets, 0.8, others)
        terms = (upstream * logprobs).sum(), entropy.sum(), (upstream.flip(0)[:, None] * of_others.exp()).sum()
        loss = sum(part * term for part, term in zip(parts, terms, strict=True) if part)
        results.append((logprobs, entropy, of_others, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_no_token_among_the_others_has_no_gradient_and_disturbs_none():
    """-1 stands for none, wherever it is: beside token 0 and beside none of it."""
    hidden, weight, targets = inputs(tokens=2)
    others = torch.tensor([[0, 3, 5], [7, 3, 5]])
    padded = torch.tensor([[-1, 0, 3, -1, 5], [7, -1, 3, 5, -1]])
    known = padded >= 0
    expected = token_logprobs(hidden, weight, targets, 1.0, others=others)[2]
    found = token_logprobs(hidden, weight, targets, 1.0, others=padded)[2]
    assert torch.equal(found[:, -1], expected[:, -1])
    expected, found = expected[:, :-1], found[:, :-1]
    assert torch.equal(found[known].view(2, 3), expected)
    share = torch.tensor([[0.5, 0.25, 2.0], [1.0, -1.0, 0.125]])
    ours = torch.autograd.grad((share * found[known].view(2, 3)).sum(), (hidden, weight))
    plain = naive(hidden, weight, targets, 1.0, others)[2][:, :-1]
    plain = torch.autograd.grad((share * plain).sum(), (hidden, weight))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"others must be \[T, K\] with T = 2"):
        token_logprobs(hidden, weight, targets, 1.0, others=others[:1])


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_no_token_among_the_others_is_harmless_where_all_logits_are_large(shift):
    hidden, weight, targets = inputs(tokens=2)
    high = torch.cat([hidden.detach(), torch.full((2, 1), shift)], 1).requires_grad_()
    weight = torch.cat([weight.detach(), torch.ones(VOCAB, 1)], 1).requires_grad_()
    *_, found = token_logprobs(high, weight, targets, 1.0, others=torch.tensor([[0, 3, -1], [2, 3, -1]]))
    found[:, :2].sum().backward()
    assert found.isfinite().all() and high.grad.isfinite().all() and weight.grad.isfinite().all()


def test_a_student_that_has_the_teachers_probabilities_gets_no_gradient_in_bfloat16():
    """p - q of each of the teacher's tokens is computed in float32: bfloat16 would leave 0.4 % of p."""
    hidden, weight, targets = inputs(torch.bfloat16, vocab=12)
    every = torch.arange(12).expand(TOKENS, 12)
    of_others = token_logprobs(hidden, weight, targets, 1.0, others=every)[2][:, :-1]
    teacher = of_others.detach().exp()
    loss = -(teacher * of_others).sum()  # the cross-entropy, whose gradient by the logits is p - q
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert max(grad.abs().max() for grad in grads) < 1e-5


def test_gradcheck():
    hidden, weight, targets = inputs(torch.float64, tokens=5, vocab=7)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, 0.9, chunk_tokens=2), (hidden, weight))


def test_entropy_alone_and_one_input_alone():
    hidden, weight, targets = inputs(torch.float64, tokens=6)
    expected = torch.autograd.grad(naive(hidden, weight, targets, 1.3)[1].sum(), (hidden, weight))
    ours = torch.autograd.grad(token_logprobs(hidden, weight, targets, 1.3, chunk_tokens=4)[1].sum(), (hidden, weight))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    frozen = weight.detach()
    (a,) = torch.autograd.grad(token_logprobs(hidden, frozen, targets, 1.3)[0].sum(), hidden)
    (b,) = torch.autograd.grad(naive(hidden, frozen, targets, 1.3)[0].sum(), hidden)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("kept_bytes", [0, 2 * 8 * VOCAB * 4])
@pytest.mark.parametrize("round_logits", [False, True])
def test_bfloat16_products_float32_softmax(round_logits, kept_bytes, softcap):
    """With other tokens and entropy. Rounded logits round once more at the softcap."""
    hidden, weight, targets = inputs(torch.bfloat16)
    others, options = different_tokens(), {"softcap": softcap, "round_logits": round_logits}
    tolerance = {"rtol": 1e-2, "atol": 5e-2} if round_logits and softcap else {"rtol": 1e-5, "atol": 1e-5}
    results = []
    for function in (naive, functools.partial(token_logprobs, chunk_tokens=8, kept_bytes=kept_bytes)):
        found = function(hidden, weight, targets, 0.8, others=others, **options)
        loss = found[0].sum() + 0.3 * found[1].sum() + (found[2] * torch.linspace(-1, 2, 5)).sum()
        results.append((found, torch.autograd.grad(loss, (hidden, weight))))
    (expected, expected_grads), (ours, grads) = results
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, **tolerance)
    for a, b in zip(grads, expected_grads, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


def test_logits_are_not_rounded_unless_asked_for():
    """Against float64 of the same bfloat16 states and weights, at the size of a language model's logits."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 256, generator=rng).bfloat16()
    weight = (torch.randn(4096, 256, generator=rng) / 4).bfloat16()
    exact = hidden.double() @ weight.double().T
    targets = exact.softmax(-1).multinomial(1, generator=rng)[:, 0]
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    expected, entropy = naive(*leaves, targets, 1.0)
    (0.3 * expected.sum() + entropy.sum()).backward()
    errors = {}
    for rounded in (False, True):
        ours = [x.clone().requires_grad_() for x in (hidden, weight)]
        logprobs, of_entropy = token_logprobs(*ours, targets, 1.0, round_logits=rounded)
        (0.3 * logprobs.sum() + of_entropy.sum()).backward()
        of_grads = [((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in zip(ours, leaves, strict=True)]
        errors[rounded] = (logprobs - expected).abs().mean().item(), *of_grads
    assert errors[False][0] < 1e-5 < 5e-3 < errors[True][0] < 0.1
    for of_exact, of_rounded in zip(errors[False][1:], errors[True][1:], strict=True):
        assert of_exact < 0.004 and of_exact < of_rounded


@pytest.mark.parametrize(("round_logits", "chunks"), [(False, 2), (True, 4)])
def test_twice_as_many_rounded_logits_are_kept(round_logits, chunks):
    hidden, weight, targets = inputs(torch.bfloat16)
    options = {"chunk_tokens": 8, "kept_bytes": 2 * 8 * VOCAB * 4, "round_logits": round_logits}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        token_logprobs(hidden, weight, targets, 0.9, **options)
    kept = [t.dtype for t in saved if t.shape == (8, VOCAB)]
    assert kept == [torch.bfloat16 if round_logits else torch.float32] * chunks


def test_float32_weight_is_used_in_hiddens_dtype():
    hidden, weight, targets = inputs(torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    logprobs, _ = token_logprobs(hidden, master, targets, 1.0)
    torch.testing.assert_close(logprobs, token_logprobs(hidden, weight, targets, 1.0)[0], rtol=0, atol=0)
    assert torch.autograd.grad(logprobs.sum(), master)[0].dtype == torch.float32


def test_no_tokens_still_reach_the_weights():
    """A row of padding must backpropagate, or the other ranks wait for its gradient."""
    hidden, weight, targets = inputs(tokens=0)
    logprobs, entropy = token_logprobs(hidden, weight, targets, 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, DIM) and torch.equal(weight.grad, torch.zeros(VOCAB, DIM))


def test_extreme_logits_stay_finite():
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(hidden * 1e3, weight, targets, 1.0)
    assert logprobs.isfinite().all() and entropy.isfinite().all() and (entropy >= -1e-3).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight)))


def test_bad_arguments_are_errors():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, weight, targets, 0.0)
    with pytest.raises(ValueError, match=r"\[T, D\]"):
        token_logprobs(hidden[None], weight, targets, 1.0)
    with pytest.raises(ValueError, match=r"\[T\]"):
        token_logprobs(hidden, weight, targets[1:], 1.0)


class LargestFloat(TorchDispatchMode):
    """Records the number of elements of the largest float tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.elements = max(self.elements, leaf.numel())
        return result


def test_no_full_logits_in_forward_or_backward():
    tokens, vocab, chunk_tokens = 256, 128, 16
    hidden, weight, targets = inputs(tokens=tokens, vocab=vocab)
    with LargestFloat() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, targets, 1.0, chunk_tokens=chunk_tokens)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.elements == max(tokens * DIM, vocab * DIM, chunk_tokens * vocab) < tokens * vocab
    with LargestFloat() as largest:  # the recorder sees the definition's
        naive(hidden, weight, targets, 1.0)[0].sum().backward()
    assert largest.elements == tokens * vocab


def test_nothing_of_the_logits_is_saved_for_backward():
    hidden, weight, targets = inputs(tokens=256, vocab=128)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        token_logprobs(hidden, weight, targets, 1.0, chunk_tokens=256)
    assert max(saved) <= max(hidden.numel(), weight.numel())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs g++")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_compiled_matches_eager(dtype, tolerance):
    """In bfloat16 only its gradients are rounded."""
    hidden, weight, targets = inputs(dtype)
    results = []
    options = {"chunk_tokens": 16, "others": different_tokens()}
    for compile in (False, True):
        logprobs, entropy, others = token_logprobs(hidden, weight, targets, 0.7, compile=compile, **options)
        grads = torch.autograd.grad((logprobs + 0.1 * entropy).sum() + others.square().sum(), (hidden, weight))
        results.append((logprobs, entropy, others, *grads))
    for a, b in zip(*results, strict=True):
        near = 1e-5 if a.dtype == torch.float32 else tolerance
        torch.testing.assert_close(a, b, rtol=near, atol=near)
