"""A tool: what the model writes is looked up, and it reads the result. A random model writes no call by itself."""

from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp
import verifiers.v1 as vf
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


class Lookup(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LookupTask]:
        for i in range(20):
            yield LookupTask(vf.TaskData(prompt=f"vowels {i}:"), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Letters(vf.SharedToolsetConfig())]


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
