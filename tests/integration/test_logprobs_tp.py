"""Vocabulary-parallel log-probabilities on two gloo ranks against one process with the whole vocabulary."""

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchtitan.grpo.model.logprobs import token_logprobs
from torchtitan.grpo.policy.microbatch import Kept

TOKENS, DIM, TEMPERATURE = 23, 16, 0.8


def inputs(vocab: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(tokens, DIM, generator=rng)
    weight = torch.randn(vocab, DIM, generator=rng) / 2
    return hidden, weight, torch.randint(vocab, (tokens,), generator=rng)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, of_others: torch.Tensor) -> torch.Tensor:
    upstream = torch.linspace(-1, 2, len(logprobs))
    return (upstream * logprobs.exp()).sum() + (upstream.flip(0) * entropy).sum() + (of_others.exp() ** 2).sum()


def check(rank: int, mesh, vocab: int, tokens: int, chunk_tokens: int) -> None:
    hidden, weight, targets = inputs(vocab, tokens)
    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    others = torch.stack([targets, (targets + 1) % vocab, (targets + vocab // 2 + 1) % vocab], 1)[:, : vocab - 1]
    others[::3, 1:] = -1  # none
    expected = token_logprobs(whole_hidden, whole_weight, targets, TEMPERATURE, others=others)
    log_softmax = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(expected[0], log_softmax.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
    known = others >= 0
    of_known = log_softmax.gather(1, others.clamp(min=0))
    torch.testing.assert_close(expected[2][:, :-1][known], of_known[known], rtol=0, atol=1e-5)
    loss_of(*expected).backward()

    # as in a model: DTensor parameters, hidden states computed from a replicated one on every rank
    weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    assert weight.to_local().shape[0] == min(-(-vocab // 2), vocab - rank * -(-vocab // 2))
    hidden = torch.nn.Parameter(distribute_tensor(hidden, mesh, [Replicate()]))
    options = {"chunk_tokens": chunk_tokens, "mesh": mesh, "others": others}
    ours = token_logprobs(hidden.to_local(), weight.to_local(), targets, TEMPERATURE, **options)
    loss_of(*ours).backward()
    for a, b in (
        (ours[0], expected[0]),
        (ours[1], expected[1]),
        (ours[2], expected[2]),
        (hidden.grad.to_local(), whole_hidden.grad),
        (weight.grad.full_tensor(), whole_weight.grad),
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    # bfloat16 states and weights have float32 logits on both sides
    whole = token_logprobs(whole_hidden.detach().bfloat16(), whole_weight.detach().bfloat16(), targets, TEMPERATURE)
    low = [x.to_local().detach().bfloat16() for x in (hidden, weight)]
    for a, b in zip(token_logprobs(*low, targets, TEMPERATURE, mesh=mesh), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    gathered = [torch.empty_like(ours[0]) for _ in range(2)]
    dist.all_gather(gathered, ours[0].detach())
    assert torch.equal(*gathered)  # replicated to the last bit


def check_kept(mesh, vocab: int, tokens: int, chunk_tokens: int) -> None:
    """Some tokens of the vocabulary alone: at some positions of one rank's slice, at others all."""
    hidden, weight, targets = inputs(vocab, tokens)
    masks = [{int(t), *range(t % 3, vocab, 2 + i % 5)} if i % 4 else set() for i, t in enumerate(targets)]
    masks[1::4] = [{int(t), min(int(t) + 1, vocab - 1)} for t in targets[1::4]]
    counts = torch.tensor([len(mask) for mask in masks], dtype=torch.int32)
    ids = torch.tensor([token for mask in masks for token in sorted(mask)], dtype=torch.int32)
    kept, found = Kept(counts, ids, np.append(0, counts.numpy().cumsum())), []
    whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    parts = distribute_tensor(hidden, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(0)])
    sliced = tuple(torch.nn.Parameter(part) for part in parts)
    for leaves, own_mesh in ((whole, None), (sliced, mesh)):
        local = [leaf.to_local() if own_mesh else leaf for leaf in leaves]
        logprobs, entropy = token_logprobs(
            *local, targets, TEMPERATURE, kept=kept, mesh=own_mesh, softcap=2.0, chunk_tokens=chunk_tokens
        )
        loss_of(logprobs, entropy, logprobs).backward()
        grads = [leaf.grad.full_tensor() if own_mesh else leaf.grad for leaf in leaves]
        found.append((logprobs, entropy, *grads))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def worker(rank: int, store_path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for vocab, tokens, chunk_tokens in (
        (50, TOKENS, 8),
        (51, TOKENS, 1024),  # slices of 26 and 25
        (3, TOKENS, 1),
        (50, 1, 8),
        (50, 0, 8),
    ):
        check(rank, mesh, vocab, tokens, chunk_tokens)
        check_kept(mesh, vocab, tokens, chunk_tokens)
    dist.destroy_process_group()


def test_two_ranks_match_one_process(tmp_path):
    context = mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=2, join=False)
    try:
        finished = False
        for _ in range(2):  # join returns at the first process that ends
            finished = finished or context.join(timeout=120)
        assert finished, "a rank did not finish within 120 s"
    finally:
        for process in context.processes:
            process.kill()
