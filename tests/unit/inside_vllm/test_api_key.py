"""The middleware that asks for the key, as a plain ASGI application."""

import asyncio
import json
from typing import Any

import pytest

from torchtitan.grpo.engines.protocol import error_text
from torchtitan.grpo.inside_vllm.api_key import ApiKeyMiddleware

KEY = "k\N{LATIN SMALL LETTER E WITH ACUTE}y"


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    reached: list[dict] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    middleware = ApiKeyMiddleware(app)
    monkeypatch.delenv("VLLM_API_KEY")  # read once, at the start

    def ask(path: str, authorization: bytes | None = None, **scope: Any) -> list[dict]:
        """What the middleware sends by itself; nothing if the application is reached."""
        headers = [] if authorization is None else [(b"host", b"a"), (b"authorization", authorization)]
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers} | scope
        before = len(reached)
        asyncio.run(middleware(scope, None, send))
        assert bool(sent) != (len(reached) == before + 1)
        return sent

    return ask


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weights", "/collective_rpc", "/v1/models", "/health/", "/x/health"]
)
@pytest.mark.parametrize(
    "given", [None, b"", b"Bearer", b"Bearer ", b"Bearer key", b"Basic " + KEY.encode(), KEY.encode()]
)
def test_every_route_asks_for_the_key(ask, path, given):
    start, body = ask(path, given)
    assert start["status"] == 401
    assert "bearer token" in error_text(body["body"]) and KEY not in json.dumps([str(start), str(body)])


def test_the_key_opens_every_route_and_health_is_open(ask):
    for given in (b"Bearer " + KEY.encode(), b"bearer " + KEY.encode()):
        assert ask("/collective_rpc", given) == ask("/v1/models", given) == []
    assert ask("/health", method="GET") == ask("/proxied/health", root_path="/proxied") == []
    assert ask("", type="lifespan") == []


def test_browsers_and_web_sockets_need_the_key_too(ask):
    assert ask("/pause", method="OPTIONS")[0]["status"] == 401
    assert ask("/health", type="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_a_server_does_not_start_unguarded(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ValueError, match="environment variable VLLM_API_KEY"):
        ApiKeyMiddleware(None)
