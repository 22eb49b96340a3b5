"""A harness of `verifiers` without a process: chat and tools, in a loop of the process that asks.

verifiers' own harnesses start a program for each conversation, in a sandbox or with `uv`. A task that needs neither
files nor commands needs no program. The harness's id is "in-process". It is the default of `[rollout] environment =
"verifiers:..."`.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

NO_TOKENS_LEFT = "the answer has no tokens left: this is the maximum context length ([rollout] max_answer_tokens)"
"""What a model call says that may sample nothing. verifiers' own harnesses know such words as the end of a budget."""


class InProcessConfig(HarnessConfig):
    id: str = "in-process"


class InProcessHarness(Harness[InProcessConfig]):
    """Asks the model, runs the tools that it calls, and asks again, until it calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # No limit of its own: the trace's stages have theirs, and so does the sample.
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
            request = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while (message := await _ask(http, f"{endpoint}/chat/completions", secret, request)) is not None:
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    break
                for call in calls:
                    name, text = call["function"]["name"], call["function"]["arguments"] or "{}"
                    said = await _called(connections, dispatch, name, text)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": said})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(http: aiohttp.ClientSession, url: str, secret: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """What the model says; None if it may say nothing more."""
    async with http.post(url, json=request, headers={"Authorization": f"Bearer {secret}"}) as reply:
        body = await reply.text()
    if reply.status == 400 and ("maximum context length" in body or "rollout stopped" in body):
        return None
    if reply.status != 200:
        raise HarnessError(f"model call: HTTP {reply.status}: {body[:500]}")
    message = json.loads(body)["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


async def _called(connections: dict[str, Any], dispatch: dict[str, Any], name: str, text: str) -> Any:
    """What a tool says. The model reads what it did wrong."""
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return f"error: the arguments are not JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    return await call_mcp(connections, dispatch, name, arguments)


__all__ = ["InProcessHarness"]
