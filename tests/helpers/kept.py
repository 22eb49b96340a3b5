"""Which tokens a server should have kept, by transformers' logits in float64."""

import itertools

import numpy as np
import torch
from transformers import PreTrainedModel

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.engines.protocol import Completion, SamplingParams

NEAR = 1e-4
"""So near to a bound, rounding decides whether a token is kept."""


def positions_of(kept: KeptTokens) -> list[list[int]]:
    """The ids at each position."""
    ends = np.append(0, kept.counts.cumsum()).tolist()
    return [kept.ids[start:end].tolist() for start, end in itertools.pairwise(ends)]


@torch.no_grad()
def worst_difference(
    reference: PreTrainedModel, prompt: list[int], answer: Completion, params: SamplingParams, of_all: bool
) -> float:
    """Largest difference of a log-probability among the kept tokens, in nat. Which are kept is asserted.

    Args:
        of_all: Top-p is a share of all probability, as in SGLang; else of what min-p and top-k leave, as in vLLM.
    """
    logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1].double()
    worst, cut = 0.0, 0
    rows = zip((logits / params.temperature).softmax(-1), answer.token_ids, strict=True)
    for (shares, token), logprob, ids in zip(rows, answer.logprobs, positions_of(answer.kept), strict=True):
        best = shares.sort(descending=True)
        floor = params.min_p * float(best.values[0])
        left = best.values[: params.top_k]
        left = left[left >= floor]
        mass = 1.0 if of_all else float(left.sum())
        before = left.cumsum(0) - left
        expected = best.indices[: int((before < params.top_p * mass).sum())].tolist()
        near = {
            int(best.indices[i])
            for i, share in enumerate(left)
            if abs(float(before[i]) - params.top_p * mass) < NEAR or abs(float(share) - floor) < NEAR
        }
        assert set(ids) ^ set(expected) <= near, (ids, expected)
        cut += len(ids) < params.top_k
        worst = max(worst, abs(float((shares[token] / shares[ids].sum()).log()) - logprob))
    assert cut, "top-p or min-p does something"
    return worst
