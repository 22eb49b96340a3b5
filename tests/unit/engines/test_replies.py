"""What no server may answer, whatever its engine: the client refuses it, and names server and request."""

import asyncio
import base64
import copy
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from torchtitan.grpo.data.routes import RouteShape, to_npy
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.engines.sglang import SglangClient
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.inside_vllm.flat_logprobs import kept_text
from torchtitan.grpo.inside_vllm.prompt_scores import as_text
from torchtitan.grpo.weight_wire.version_names import version_name

VOCAB, HAD, NEWEST = 1000, 3, 5


@dataclass
class Answer:
    ids: object = field(default_factory=lambda: [5, 999, 0])
    logprobs: object = field(default_factory=lambda: [-0.5, 1e-7, -103.0])
    spans: list = field(default_factory=lambda: [(3, 0, 1), (5, 1, 3)])
    finish: object = "stop"


GOOD = Answer()


def as_vllm(answers: list[Answer]) -> object:
    return {
        "choices": [
            {
                "index": i,
                "token_ids": a.ids,
                "token_logprobs": a.logprobs,
                "finish_reason": a.finish,
                "weight_versions": [
                    {"version": version_name(v) if isinstance(v, int) else v, "start": start, "end": end}
                    for v, start, end in a.spans
                ],
            }
            for i, a in enumerate(answers)
        ]
    }


def as_sglang(answers: list[Answer]) -> object:
    choices = as_vllm(answers)["choices"]
    return [
        {
            "output_ids": a.ids,
            "meta_info": {
                "finish_reason": {"type": a.finish, "message": "shutting down"},
                "output_token_logprobs": [[value, 7, None] for value in a.logprobs],
                "weight_versions": choice["weight_versions"],
            },
        }
        for a, choice in zip(answers, choices, strict=True)
    ]


class Replies(http.server.BaseHTTPRequestHandler):
    said = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.said)))
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replies) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str, engine: str, said: bytes | list[Answer], **params: object) -> list[Completion]:
    kind, form = (VllmClient, as_vllm) if engine == "vllm" else (SglangClient, as_sglang)
    Replies.said = said if isinstance(said, bytes) else json.dumps(form(said)).encode()

    async def generate() -> list[Completion]:
        client = kind(url, None, 10.0, lambda: HAD, lambda: NEWEST, VOCAB)
        try:
            return await client.generate([1, 2], replace(SamplingParams(2, 1.0, 3), **params), "r7")
        finally:
            await client.close()

    return asyncio.run(generate())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_may_be_answered(url, engine):
    for completion in ask(url, engine, [GOOD, replace(GOOD, spans=[], finish="length")]):
        assert completion.token_ids == [5, 999, 0]
        assert completion.logprobs == [-0.5, 1e-7, -103.0]
    assert completion.versions == [HAD] * 3


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"finish": "abort"}, "abort"),
        ({"finish": None}, ""),
        ({"finish": "error"}, ""),
        ({"ids": [], "logprobs": [], "spans": []}, "0 tokens, 1 to 3 were asked"),
        ({"ids": [1] * 4, "logprobs": [-0.5] * 4}, "4 tokens, 1 to 3 were asked"),
        ({"logprobs": [-0.5] * 2}, "3 tokens came with 2 log-probabilities"),
        ({"ids": [5, -1, 0]}, ">= 0"),
        ({"ids": [5, VOCAB, 0]}, "<= 999"),
        ({"ids": [5, 2**70, 0]}, "<= 999"),
        ({"ids": [5, 1.5, 0]}, "Expected `int`"),
        ({"ids": [5, None, 0]}, "Expected `int`"),
        ({"ids": "567"}, "Expected `array"),
        ({"logprobs": [-0.5, 50.0, -1.0]}, "<= 0.001"),
        ({"logprobs": [-0.5, -1e300, -1.0]}, "> -1000"),
        ({"logprobs": [-0.5, -9999.0, -1.0]}, "vLLM writes -9999 for NaN: are the logits finite?"),
        ({"logprobs": [-0.5, float("nan"), -1.0]}, "malformed"),
        ({"logprobs": [-0.5, "x", -1.0]}, "Expected `float`"),
        ({"spans": [(3, 0, 4)]}, "tokens 0 to 4 in an answer of 3"),
        ({"spans": [(3, 0, 10**12)]}, "in an answer of 3"),
        ({"spans": [(3, -1, 3)]}, "tokens -1 to 3"),
        ({"spans": [(3, 2, 1)]}, "tokens 2 to 1"),
        ({"spans": [(3, 0, 3), (4, 1, 3)]}, "tokens 1 to 3"),
        ({"spans": [(4, 0, 2), (3, 2, 3)]}, "go backwards"),
        ({"spans": [(2, 0, 1), (3, 1, 3)]}, "weights of version 2 sampled it, after the server had 3"),
        ({"spans": [(999999, 0, 3)]}, "weights of version 999999 sampled it, and 5 is the newest sent"),
        ({"spans": [("9" * 5000, 0, 3)]}, "was answered by weights '999"),
        ({"spans": [(None, 0, 3)]}, "Expected `str`"),
    ],
)
def test_what_cannot_be_is_the_servers_failure(url, engine, changed, said):
    with pytest.raises(EngineError) as raised:
        ask(url, engine, [GOOD, replace(GOOD, **changed)])
    assert str(raised.value).startswith(f"{url}: request r7") and said in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_answers_is_that_asked_for(url, engine, count):
    with pytest.raises(EngineError, match=f"{url}: request r7: .*{count} answers, 2 were asked"):
        ask(url, engine, [GOOD] * count)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "said", [b"", b"null", b"{}", b"[]", b'{"choices": 3}', b"\xff\xfe", b'{"x": ' + b"[" * 100_000, b"<html>"]
)
def test_what_is_no_answer(url, engine, said):
    with pytest.raises(EngineError, match=f"{url}: request r7: the answer is not as expected"):
        ask(url, engine, said)


def test_two_answers_of_one_number(url):
    said = as_vllm([GOOD, GOOD])
    said["choices"][1]["index"] = 0
    with pytest.raises(EngineError, match="answers, 2 were asked"):
        ask(url, "vllm", json.dumps(said).encode())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("masks", "wrong"),
    [
        ([[9, 5], list(range(VOCAB)), [0]], ""),
        (None, "says nothing of the tokens that were kept"),
        ([[9, 5], [999]], "2 positions say which tokens were kept, and 3 tokens came"),
        ([[9, 5], [999], [1, 2]], "token 0 was sampled at position 2 and is not among the kept"),
        ([[], [], []], "token 5 was sampled at position 0"),
        ([[5], [999, 7, 999], [0]], "kept twice"),
        ([[5], [999, VOCAB], [0]], "<= 999"),
        ([[5], [999, -1], [0]], ">= 0"),
        ([[5], [999, 0.5], [0]], "Expected `int`"),
        ([[5], 999, [0]], "Expected `array"),
    ],
)
def test_kept_tokens_hold_the_sampled_one(url, engine, masks, wrong):
    answers = [as_vllm, as_sglang][engine == "sglang"]([GOOD, GOOD])
    for answer in answers["choices"] if engine == "vllm" else [each["meta_info"] for each in answers]:
        if engine == "vllm":
            answer["sampling_mask"] = masks
        else:  # it sends the others too, which are among all tokens
            answer |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": [-0.25, -0.5, 0.0]}
    said, asked = json.dumps(answers).encode(), {"top_k": 20, "kept": True}
    if wrong:
        with pytest.raises(EngineError, match=f"{url}: request r7: the answer is not as expected: .*{wrong}"):
            ask(url, engine, said, **asked)
        return
    for completion in ask(url, engine, said, **asked):
        assert completion.logprobs == ([-0.5, 1e-7, -103.0] if engine == "vllm" else [-0.25, -0.5, 0.0])
        assert (completion.kept.counts.tolist(), completion.kept.ids.tolist()) == ([2, 0, 1], [5, 9, 0])
        assert completion.stopped_after(1).kept.ids.tolist() == [5, 9]
    if engine == "vllm":  # with our plug-in, and of the embedded server
        for text, wrong in {
            kept_text(masks): "",
            kept_text([[5, 9], [999]]): "do not say",
            kept_text([[5], [999, VOCAB], [0]]): "999 to|5 to 1000|0 to 1000",
            "?": "base64|padding|characters",
            "AAAA": "multiple of element size",
            kept_text(masks[:1]): "do not say what was kept in place of 3",
        }.items():
            for choice in answers["choices"]:
                choice["kept_tokens"] = text
            said = json.dumps(answers).encode()
            if wrong:
                with pytest.raises(EngineError, match=f"r7: the answer is not as expected: .*({wrong})"):
                    ask(url, engine, said, **asked)
            else:
                assert ask(url, engine, said, **asked)[1].kept.ids.tolist() == [5, 9, 0]
    assert all(completion.kept is None for completion in ask(url, engine, said, top_k=20)), "nobody asked for them"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_routes_come_in_the_form_of_each_engine(url, engine):
    """vLLM sends .npy files, and SGLang int32 numbers. SGLang ignores stop tokens with `ignore_eos`: we cut there."""
    shape = RouteShape(2, 2, 8)
    routes = np.random.default_rng(0).random((2 + 3 - 1, 2, 8)).argsort(-1)[..., :2]
    answers = [as_vllm, as_sglang][engine == "sglang"]([GOOD, GOOD])
    for answer in answers["choices"] if engine == "vllm" else [each["meta_info"] for each in answers]:
        as_int32 = base64.b64encode(routes.astype("<i4").tobytes()).decode()
        answer["routed_experts"] = to_npy(routes.astype(np.uint8)) if engine == "vllm" else as_int32
    said = json.dumps(answers).encode()
    for completion in ask(url, engine, said, routes=shape):
        assert completion.routes.dtype == np.uint8 and np.array_equal(completion.routes, routes)
    assert all(completion.routes is None for completion in ask(url, engine, said)), "nobody asked for them"
    with pytest.raises(EngineError, match=r"request r7: .*shape \[4, 2, 2\]|16 numbers"):
        ask(url, engine, said, routes=replace(shape, layers=3))
    if engine == "sglang":
        (cut, _) = ask(url, engine, said, routes=shape, ignore_eos=True, stop_token_ids=(999,))
        assert cut.token_ids == [5, 999] and np.array_equal(cut.routes, routes[:3])


LIKELIEST = [[[1, 7], [999, 3], [0, 8]], [[-0.5, -2.0], [-0.25, -9.0], [-0.125, -9999.0]]]
"""Ids and log-probabilities in place of three tokens. What top-p has cut has -9999."""


def with_likeliest(engine: str, ids: list[list[int]], logprobs: list[list[float]]) -> bytes:
    if engine == "vllm":
        said = as_vllm([GOOD, GOOD])
        for choice in said["choices"]:
            flat = [[value for position in part for value in (0, *position)] for part in (ids, logprobs)]
            choice["top_tokens"] = as_text(*flat)  # the sampled token is the first
    else:
        said = as_sglang([GOOD, GOOD])
        for answer in said:
            nulled = [[None if p == -9999 else p for p in own] for own in logprobs]
            pairs = [[[p, i, None] for i, p in zip(*own, strict=False)] for own in zip(ids, nulled, strict=True)]
            answer["meta_info"]["output_top_logprobs"] = pairs
    return json.dumps(said).encode()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_likeliest_tokens_come_in_the_form_of_each_engine(url, engine):
    ids, logprobs = copy.deepcopy(LIKELIEST)
    ids[1][1] = VOCAB  # an engine's padding, which the model does not have
    said = with_likeliest(engine, ids, logprobs)
    for completion in ask(url, engine, said, top_tokens=2, vocab_size=VOCAB):
        assert completion.top.ids.tolist() == [[1, 7], [999, -1], [0, -1]]
        assert completion.top.logprobs.tolist() == [[-0.5, -2.0], [-0.25, -np.inf], [-0.125, -np.inf]]
        assert completion.stopped_after(1).top.ids.tolist() == [[1, 7]]
    assert all(completion.top is None for completion in ask(url, engine, said)), "nobody asked for them"
    with pytest.raises(EngineError, match=r"request r7: .*names no likeliest tokens .*score_centering"):
        ask(url, engine, [GOOD, GOOD], top_tokens=2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("row", "last", "said"),
    [
        (0, [8, 8], "a position has one of its likeliest tokens twice"),
        (1, [-0.1, -0.2], "the likeliest tokens have a probability of 1.72"),
        (1, [-0.1, float("nan")], "a probability of nan|malformed"),
        (1, [-0.1], "9 token ids and 8 log-probabilities|3 positions of 2 likeliest tokens"),
    ],
)
def test_likeliest_tokens_that_cannot_be_are_the_servers_failure(url, engine, row, last, said):
    sent = copy.deepcopy(LIKELIEST)
    sent[row][1] = last
    with pytest.raises(EngineError, match=f"request r7: .*({said})"):
        ask(url, engine, with_likeliest(engine, *sent), top_tokens=2, vocab_size=VOCAB)


def test_a_likeliest_token_with_a_number_of_71_bits_is_the_servers_failure(url):
    ids, logprobs = copy.deepcopy(LIKELIEST)
    ids[0][1] = 2**70
    with pytest.raises(EngineError, match=r"request r7: the answer is not as expected: .*too (large|big)"):
        ask(url, "sglang", with_likeliest("sglang", ids, logprobs), top_tokens=2, vocab_size=VOCAB)
