"""The client against a server whose replies the test chooses: which weights sampled a token."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.weight_wire.version_names import version_name


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request with four tokens and `spans`, the weights that sampled them (None: not reported)."""

    spans: list[dict] | None = None
    flat = False
    asked: dict | None = None

    def do_POST(self) -> None:
        Answers.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6, 7, 2], "weight_versions": self.spans}
        if self.flat:
            choice |= {"logprobs": None, "token_logprobs": [-0.5, -1.0, 0.0, -0.25]}
        else:
            choice["logprobs"] = {"content": [{"logprob": -0.5}] * 4}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answers, "spans", None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str, version: int, first: bool = False) -> Completion:
    async def generate() -> list[Completion]:
        client = VllmClient(url, None, 10.0, lambda: version)
        try:
            return await client.generate([1, 2], SamplingParams(1, 1.0, 4, first=first), "r")
        finally:
            await client.close()

    return asyncio.run(generate())[0]


def span(version: int | str, start: int, end: int) -> dict:
    """By a version of ours, or by weights of another name."""
    return {"version": version if isinstance(version, str) else version_name(version), "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "version", "expected"),
    [
        (None, 3, [3, 3, 3, 3]),
        ([], 3, [3, 3, 3, 3]),
        ([span(3, 0, 4)], 3, [3, 3, 3, 3]),
        ([span(3, 0, 1), span(4, 1, 4)], 3, [3, 4, 4, 4]),
        ([span("default", 0, 4)], -1, [-1, -1, -1, -1]),  # a server that has not been given any weights yet
        ([span("default", 0, 3), span(0, 3, 4)], -1, [-1, -1, -1, 0]),
    ],
)
def test_every_token_has_the_version_that_sampled_it(url, spans, version, expected):
    Answers.spans = spans
    assert ask(url, version).versions == expected


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([span("default", 0, 4)], "'default' in place of version 0: the server was restarted"),
        ([span(3, 0, 3), span("default", 3, 4)], "'default' in place of version 0: the server was restarted"),
        ([span("0", 0, 4)], "'0' in place of version 0"),
        ([span("0@there-7-a1", 0, 4)], r"run there-7-a1 \(process 7 on there\) feeds the server too"),
    ],
)
def test_an_answer_by_weights_that_are_not_ours_is_an_error(url, spans, why):
    Answers.spans = spans
    with pytest.raises(EngineError, match=rf"{url}: request r .*{why}"):
        ask(url, 0)


@pytest.mark.parametrize(("flat", "expected"), [(True, [-0.5, -1.0, 0.0, -0.25]), (False, [-0.5] * 4)])
def test_log_probabilities_are_read_as_a_list_and_as_objects(url, monkeypatch, flat, expected):
    monkeypatch.setattr(Answers, "flat", flat)
    assert ask(url, 3).logprobs == expected


@pytest.mark.parametrize(("first", "priority"), [(True, -1), (False, None)])
def test_vllm_is_told_what_comes_first(url, first, priority) -> None:
    ask(url, 3, first)
    assert Answers.asked.get("priority") == priority
