"""Texts that end an answer. Tokens are sampled, texts are not: an answer ends with the token that completes one."""

import bisect
from collections.abc import Callable, Sequence

from torchtitan.grpo.engines.protocol import Completion

Decode = Callable[[list[int]], str]
"""Token ids -> their text, without special tokens."""

_SPARE_TOKENS = 8
"""Beyond one token for each byte of the longest text: some tokens have no text."""


def ends_in_stop(token_ids: list[int], stop: Sequence[str], decode: Decode) -> bool:
    """Whether the newest tokens hold one of `stop`. Asked after each token, it is true for the one that completes it.

    Only so many tokens are decoded as the longest text may have.
    """
    window = max(len(text.encode()) for text in stop) + _SPARE_TOKENS
    return _has(decode(token_ids[-window:]), stop)


def cut_at_stop(completion: Completion, stop: Sequence[str], decode: Decode) -> Completion:
    """The answer up to the token that first completes one of `stop`; the whole answer if none does.

    Servers stop there by themselves. Some go on for a few tokens, and one without a tokenizer does not stop at all.
    """
    token_ids = completion.token_ids
    if not _has(decode(token_ids), stop):
        return completion
    end = len(token_ids)
    if _has(decode(token_ids[:-1]), stop):
        end = 1 + bisect.bisect_left(range(1, end), True, key=lambda tokens: _has(decode(token_ids[:tokens]), stop))
    return completion.stopped_after(end)


def _has(text: str, stop: Sequence[str]) -> bool:
    return any(one in text for one in stop)
