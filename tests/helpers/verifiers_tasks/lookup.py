"""A tool: what the model writes is looked up, and it reads the result. A random model writes no call by itself."""

import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager

import aiohttp
import uvicorn
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

CALLS = 2


class Letters(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "letters"

    @vf.tool
    async def vowels(self, text: str) -> str:
        """How many vowels a text has."""
        return f"={sum(character in 'aeiou' for character in text)}?"


class LookupTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        return sum(character in "aeiou" for character in trace.last_reply) / 10


class LookupConfig(vf.TasksetConfig):
    url: str | None = None
    """Of a server that has the tool already."""


class Lookup(vf.Taskset[LookupTask, LookupConfig]):
    def load(self) -> Iterator[LookupTask]:
        for i in range(20):
            yield LookupTask(vf.TaskData(prompt=f"vowels {i}:"), self.config.task)

    @classmethod
    def toolsets(cls, config: LookupConfig) -> list[vf.Toolset]:
        return [Letters(vf.SharedToolsetConfig(url=config.url))]


@contextmanager
def served() -> Iterator[str]:
    """The address of the tool, served by a thread: a process of its own takes seconds to import verifiers."""
    app = MCPServer("letters")
    Letters(vf.SharedToolsetConfig()).register(app)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        served = app.streamable_http_app(json_response=True, stateless_http=True)
        server = uvicorn.Server(uvicorn.Config(served, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            thread.join(10)


class LookupHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, dispatch, connections = await connect_mcp(servers, stack)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            for call in range(CALLS + 1):
                body = {"model": ctx.model, "messages": messages, "tools": tools, "max_tokens": 6}
                async with http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as reply:
                    if reply.status != 200:
                        break
                    message = (await reply.json())["choices"][0]["message"]
                messages.append(message)
                if call < CALLS:
                    said = await call_mcp(connections, dispatch, next(iter(dispatch)), {"text": message["content"]})
                    messages.append({"role": "user", "content": said})
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Lookup", "LookupHarness"]

if __name__ == "__main__":
    Letters.run()
