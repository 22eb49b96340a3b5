"""A server that generates nothing: vLLM's routes, as far as a run's rollouts ask for them, and replies made beforehand.

    python -m arrivals_bench.server --port 8001 --model FOLDER --tokens-per-s 100000

A request for n answers of at most L tokens gets n answers of exactly L random tokens. The first such request makes the
reply, and later ones get the same bytes. With a rate, a reply comes when a server with that rate would have it. A
server that is paused does not reply. The route /metrics counts the tokens of all replies.
"""

import argparse
import asyncio
import functools
import os
import random
import struct
from typing import Any

import msgspec
from aiohttp import web

FIRST_TOKEN = 300
"""Lower ids are special tokens and bytes."""
LONGEST_TOKENS = 1 << 20


class Sampling(msgspec.Struct):
    """What is read of a request's sampling parameters. `logprobs` is 0 in a run, and more in the check before it."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    logprobs: int = 0


class Request(msgspec.Struct):
    sampling_params: Sampling


class Server:
    """See the module. `tokens_per_s` 0 replies at once."""

    def __init__(self, model: str, vocab_size: int, tokens_per_s: float) -> None:
        self.model, self.vocab_size, self.tokens_per_s = model, vocab_size, tokens_per_s
        self.sent, self.due = 0, 0.0
        self.turn, self.running = asyncio.Lock(), asyncio.Event()
        self.running.set()
        self.read = msgspec.json.Decoder(Request).decode
        self.reply = functools.cache(self._reply)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        models = {"data": [{"id": self.model, "root": self.model, "max_model_len": LONGEST_TOKENS}]}
        facts: dict[str, Any] = {"/health": {}, "/version": {"version": "0.32.0"}, "/v1/models": models}
        facts |= {"/get_world_size": {"world_size": 1}, "/is_paused": {"is_paused": False}}
        for path, said in facts.items():
            app.router.add_get(path, functools.partial(_say, said))
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_post("/inference/v1/generate", self.generate)
        return app

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=f"vllm:generation_tokens_total {self.sent}\n")

    async def pause(self, http: web.Request) -> web.Response:
        self.running.clear()
        return web.json_response({})

    async def resume(self, http: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({})

    async def generate(self, http: web.Request) -> web.Response:
        params = self.read(await http.read()).sampling_params
        if params.logprobs:
            tops = [{"token": f"token_id:{i}", "logprob": -i / params.temperature} for i in (1, 2)]
            content = {"content": [tops[0] | {"top_logprobs": tops}]}
            return web.json_response({"choices": [{"index": 0, "token_ids": [1], "logprobs": content}]})
        body, tokens = self.reply(params.n, params.max_tokens), params.n * params.max_tokens
        async with self.turn:
            await self.running.wait()
            if self.tokens_per_s:
                now = asyncio.get_running_loop().time()
                self.due = max(self.due, now) + tokens / self.tokens_per_s
                await asyncio.sleep(self.due - now)
                await self.running.wait()
        self.sent += tokens
        return web.Response(body=body, content_type="application/json")

    def _reply(self, n: int, tokens: int) -> bytes:
        draw, ids = random.Random(0), range(FIRST_TOKEN, self.vocab_size)
        choices: list[dict[str, Any]] = []
        for i in range(n):
            logprobs = struct.pack(f"{tokens}f", *(-draw.random() for _ in range(tokens)))
            own = {"token_ids": draw.choices(ids, k=tokens), "token_logprobs": struct.unpack(f"{tokens}f", logprobs)}
            choices.append({"index": i, "finish_reason": "length"} | own)
        return msgspec.json.encode({"choices": choices})


async def _say(said: dict[str, Any], http: web.Request) -> web.Response:
    return web.json_response(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="folder that it names as its model")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="0: replies come at once")
    parser.add_argument("--cpus", type=int, nargs="*", default=[], help="that it runs on; default: all")
    args = parser.parse_args()
    if args.cpus:
        os.sched_setaffinity(0, args.cpus)
    app = Server(args.model, args.vocab_size, args.tokens_per_s).app()
    web.run_app(app, host="127.0.0.1", port=args.port, access_log=None, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
