"""Where an answer ends that has a stop string."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.engines.protocol import Completion
from torchtitan.grpo.engines.stop_strings import cut_at_stop, ends_in_stop

TOKENIZER = Tokenizer.from_file(str(TINY_QWEN3 / "tokenizer.json"))
decode = TOKENIZER.decode


def completion_of(text: str, finish_reason="length") -> Completion:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    numbers = [-float(i) for i in range(len(ids))], finish_reason, list(range(len(ids)))
    return Completion(ids, *numbers, "http://a", routes=np.arange(3 + len(ids) - 1))


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("12+3=15\nand more", ("\n",), "12+3=15\n"),
        ("12+3=15\n", ("\n",), "12+3=15\n"),
        ("12+3=15", ("\n",), None),
        ("a</answer>b</answer>", ("</answer>",), "a</answer>"),
        ("one two", ("zwei", "two", "one"), "one"),
        ("", ("x",), None),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(text, stop, kept):
    whole = completion_of(text)
    cut = cut_at_stop(whole, stop, decode)
    if kept is None:
        assert cut is whole
        return
    count = len(cut.token_ids)
    assert decode(cut.token_ids).startswith(kept) and not any(s in decode(cut.token_ids[:-1]) for s in stop)
    assert (cut.token_ids, cut.logprobs) == (whole.token_ids[:count], whole.logprobs[:count])
    # The prompt has three tokens. Each position but the last has experts.
    assert cut.routes is not None and cut.routes.tolist() == list(range(3 + count - 1))
    assert (cut.versions, cut.finish_reason, cut.server) == (list(range(count)), "stop", "http://a")


def test_a_server_that_asks_after_each_token_stops_at_the_same_one():
    text, stop = "the answer is: 78.\nfinal </answer> and some more", ("</answer>", "8.\nf")
    whole = completion_of(text)
    ends = [n for n in range(1, len(whole.token_ids) + 1) if ends_in_stop(whole.token_ids[:n], stop, decode)]
    assert ends[0] == len(cut_at_stop(whole, stop, decode).token_ids)
