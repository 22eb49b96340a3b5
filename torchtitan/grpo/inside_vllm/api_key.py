"""ASGI middleware for vLLM: every route asks for the API key, except /health.

vLLM's own check covers `/v1` and a few more prefixes. The routes that pause a server, replace its weights or call its
workers stay open. `torchtitan-grpo serve vllm` adds this class when VLLM_API_KEY is set:

    --middleware torchtitan.grpo.inside_vllm.api_key.ApiKeyMiddleware

This module imports without vLLM.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

KEY_VARIABLE = "VLLM_API_KEY"
_UNAUTHORIZED = json.dumps(
    {"error": {"message": "send the server's API key as a bearer token", "type": "Unauthorized", "code": 401}}
).encode()


class ApiKeyMiddleware:
    """Passes on requests that carry the key of VLLM_API_KEY as a bearer token, and answers others with HTTP 401.

    Raises:
        ValueError: VLLM_API_KEY is not set. A server must not run unguarded because of a missing variable.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "").encode()
        if not self._key:
            raise ValueError(f"{type(self).__name__} needs the API key in the environment variable {KEY_VARIABLE}")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _UNAUTHORIZED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] == scope.get("root_path", "") + "/health":
            return True
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(key, self._key) and scheme.lower() == b"bearer"
