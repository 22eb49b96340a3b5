"""Which requests get a teacher's tokens as arrays, and what is in them."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from torchtitan.grpo.inside_vllm.prompt_scores import ARGUMENT, packed, starts


def request(named: object = "2,3", **fields: object) -> SimpleNamespace:
    usual = {"vllm_xargs": {ARGUMENT: named}, "prompt_logprobs": 0, "n": 1, "logprobs": None, "echo": False}
    return SimpleNamespace(**usual | {"stream": False, "prompt": [[5, 6, 7], [5, 6, 7, 8]]} | fields)


def test_a_request_for_scores_alone_names_where_each_answer_begins():
    assert starts(request()) == [2, 3] and starts(request("2", n=None, prompt=[[5, 6, 7]])) == [2]


@pytest.mark.parametrize(
    "other",
    [
        request(vllm_xargs=None),
        request(vllm_xargs={"else": "2"}),
        request(named=2),
        request(named=""),
        request(named="2,-3"),
        request(named="2,x"),
        request(prompt_logprobs=None),
        request(n=2),
        request(logprobs=1),
        request(echo=True),
        request(stream=True),
        request(named="2"),
        request(prompt="two words"),
        request(prompt=["two", "texts"]),
        request(named="2,3,4", prompt=[5, 6, 7]),
    ],
)
def test_any_other_request_gets_vllms_own_reply(other):
    assert starts(other) == []


@pytest.mark.parametrize(("begin", "ids"), [(0, [8, 8, 3, 9, 4, 9]), (1, [8, 8, 3, 9, 4, 9]), (2, [9, 4, 9]), (3, [])])
def test_arrays_hold_the_positions_from_the_answer_on(begin, ids):
    """Three positions: the first token has no log-probability, others have their own and two likeliest ones."""
    flat = SimpleNamespace(
        start_indices=[0, 0, 3], token_ids=[8, 8, 3, 9, 4, 9], logprobs=[-1.0, -1.0, -2.0, -3.0, -0.5, -3.0]
    )
    found = packed(flat, begin)
    assert np.frombuffer(base64.b64decode(found["ids"]), np.int32).tolist() == ids
    logprobs = np.frombuffer(base64.b64decode(found["logprobs"]), np.float32)
    assert logprobs.tolist() == (flat.logprobs[-len(ids) :] if ids else [])
