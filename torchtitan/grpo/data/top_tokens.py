"""The likeliest tokens at each position, as servers send them."""

import base64

import msgspec
import numpy as np

from torchtitan.grpo.data.samples import IMPOSSIBLE, TopTokens

MASS_ERROR = 0.01
"""How far over 1 the rounding of a server may take the sum of probabilities."""


class Arrays(msgspec.Struct):
    """What `inside_vllm/prompt_scores.py` writes."""

    ids: str
    logprobs: str


def read(sent: Arrays, positions: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities, both [positions, 1 + k]: a token, then the likeliest ones in its place.

    Raises:
        ValueError: They are of another number.
    """
    wide, parts = 1 + k, ((sent.ids, np.int32), (sent.logprobs, np.float32))
    ids, logprobs = (np.frombuffer(base64.b64decode(text), dtype) for text, dtype in parts)
    if not len(ids) == len(logprobs) == positions * wide:
        raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities for {positions} x {wide}")
    return ids.reshape(-1, wide), logprobs.reshape(-1, wide)


def checked(ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> TopTokens:
    """Likeliest tokens and their log-probabilities, both [T, K], without those that the model does not have, or that
    are impossible.

    Raises:
        ValueError: They cannot be that: their probability is over 1, one is NaN, or a position has a token twice.
    """
    if not (total := np.exp(logprobs).sum(1).max(initial=0)) <= 1 + MASS_ERROR:
        raise ValueError(f"the likeliest tokens have a probability of {total:.3g}: are they logits (--logprobs-mode)?")
    usable = (ids >= 0) & (ids < vocab_size) & (logprobs > IMPOSSIBLE)
    ids = np.where(usable, ids, -1).astype(np.int32)
    in_order = np.sort(ids, 1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any():
        raise ValueError("a position has one of its likeliest tokens twice")
    return TopTokens(ids, np.where(usable, logprobs, -np.inf).astype(np.float32))
