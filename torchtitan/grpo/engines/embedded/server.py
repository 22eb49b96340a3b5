"""The embedded inference server: vLLM's routes for token generation and weight updates, over one model."""

import asyncio
import hmac
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
from aiohttp import web
from transformers import AutoTokenizer

from torchtitan.grpo.engines.embedded import bodies
from torchtitan.grpo.engines.embedded.adapters import check_adapters, held_fingerprints
from torchtitan.grpo.engines.embedded.bodies import BadRequest
from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.engines.embedded.model import ModelUpdate
from torchtitan.grpo.engines.embedded.scoring import completions, token_logprobs
from torchtitan.grpo.engines.embedded.sleep import sleep_routes
from torchtitan.grpo.engines.embedded.worker import PAUSE_MODES, GenerationWorker
from torchtitan.grpo.engines.protocol import COHORT_HEADER
from torchtitan.grpo.errors import shown
from torchtitan.grpo.inside_vllm.backend import FINGERPRINTS
from torchtitan.grpo.weight_wire.adapters import AdapterInfo
from torchtitan.grpo.weight_wire.model_identity import KEY, identity
from torchtitan.grpo.weight_wire.version_names import version_name

logger = logging.getLogger(__name__)

COHORT_TIMEOUT_S = 10.0
BODY_BYTES_MAX = 64 << 20


class Cohort:
    """Requests that start as one batch, in the order of their ids, whenever each of them arrives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.requests: list[Request] = []
        self.timer: asyncio.TimerHandle | None = None


class EmbeddedApp:
    """The HTTP application.

    Routes, bodies and replies are those of vLLM 0.32 with our plug-in (its development and scale-out routes), as far as
    a trainer uses them, so one client serves both. Three things differ. Weight updates are refused unless the server is
    paused. A server with an unfinished update does not resume (I3). Requests with the same `COHORT_HEADER` start as one
    batch.
    """

    def __init__(self, generator: Generator, model_name: str, api_key: str | None = None) -> None:
        self.generator = generator
        self.model_name = model_name
        self.api_key = api_key
        self.worker = GenerationWorker(generator, self._on_finished)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[Request, asyncio.Future] = {}
        self._cohorts: dict[str, Cohort] = {}
        self._receiver: Any = None
        self._joining: Future | None = None
        self.torn = False
        self._tokenizer: Any = None

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._errors], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.post("/inference/v1/generate", self.generate),
                web.post("/v1/completions", self.completions),
                web.post("/tokenize", self.tokenize),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/is_paused", self.is_paused),
                web.get("/get_world_size", self.get_world_size),
                web.post("/init_weight_transfer_engine", self.init_weight_transfer_engine),
                web.post("/update_weights", self.update_weights),
                web.get("/weight_info", self.weight_info),
                web.post("/collective_rpc", self.collective_rpc),
                *sleep_routes(self),
            ]
        )
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self._loop = asyncio.get_running_loop()
        self.worker.start()

    async def _stop(self, _: web.Application) -> None:
        await asyncio.to_thread(self.worker.close, 10.0)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        """vLLM's error bodies: {"error": {"message", "type", "code"}}."""
        given = request.headers.get("Authorization", "")
        if (
            self.api_key
            and request.path != "/health"
            and not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self.api_key}".encode())
        ):
            return _error(401, "unauthorized: send the server's API key as a bearer token")
        try:
            return await handler(request)
        except BadRequest as error:
            return _error(400, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason)
        except Exception as error:
            logger.exception("%s failed", request.path)
            return _error(500, f"{type(error).__name__}: {error}")

    # Generation

    async def generate(self, http: web.Request) -> web.Response:
        request = bodies.generation(await bodies.json_of(http), self.generator)
        done = asyncio.get_running_loop().create_future()
        self._waiting[request] = done
        try:
            cohort = http.headers.get(COHORT_HEADER)
            if cohort:
                self._join(cohort, request)
            else:
                self.worker.add([request])
            await done
        finally:
            # This also runs when the client is gone, since aiohttp then cancels the handler.
            del self._waiting[request]
            request.cancelled = True
        if request.error:
            return _error(500, request.error)
        # Faster than `json`: the thread that generates needs the interpreter too.
        body = msgspec.json.encode(bodies.reply(request, self.model_name))
        return web.Response(body=body, content_type="application/json")

    async def completions(self, http: web.Request) -> web.Response:
        """Scores given tokens and completes nothing. The temperature is that of vLLM's pull request 37082."""
        body = await bodies.json_of(http)
        asked = body.get("prompt")
        top_k, vocab_size = body.get("prompt_logprobs"), self.generator.model.config.vocab_size
        if type(top_k) is not int:
            raise BadRequest("this server only scores here: set prompt_logprobs, or use /inference/v1/generate")
        if not 0 <= top_k <= vocab_size:
            raise BadRequest(f"prompt_logprobs must lie in 0..{vocab_size}, the size of the vocabulary, not {top_k}")
        if not isinstance(asked, list) or not asked:
            raise BadRequest("prompt must be a list of lists of token ids")
        sequences = [bodies.token_ids_of(ids, "prompt", self.generator) for ids in asked]
        for ids in sequences:
            if len(ids) > self.generator.max_model_len:
                raise BadRequest(f"a prompt has {len(ids)} tokens, --max-model-len is {self.generator.max_model_len}")
        temperature = bodies.checked_temperature(body.get("prompt_logprobs_temperature", 1.0))
        if not temperature:
            raise BadRequest("prompt_logprobs_temperature must be over 0")
        model = self.generator.model
        logprobs = await self._call_whole(lambda: token_logprobs(model, sequences, temperature, top_k))
        return web.json_response(completions(self.model_name, logprobs))

    async def tokenize(self, http: web.Request) -> web.Response:
        text = (await bodies.json_of(http)).get("prompt")
        if not isinstance(text, str):
            raise BadRequest("prompt must be a text")
        if self._tokenizer is None:
            if not os.path.isfile(os.path.join(self.model_name, "tokenizer.json")):
                raise BadRequest(f"{self.model_name} has no tokenizer.json")
            load = AutoTokenizer.from_pretrained
            self._tokenizer = await asyncio.to_thread(load, self.model_name, local_files_only=True)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.generator.max_model_len})

    def _on_finished(self, requests: list[Request]) -> None:
        """Runs on the generation thread. Wakes the event loop once for all requests that a step has finished."""
        if requests:
            self._loop.call_soon_threadsafe(self._deliver, requests)

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            done = self._waiting.get(request)
            if done is not None and not done.done():
                done.set_result(None)

    def _join(self, header: str, request: Request) -> None:
        name, _, size = header.rpartition("/")
        if not name or not re.fullmatch("[1-9][0-9]{0,8}", size):
            raise BadRequest(f"{COHORT_HEADER} must be <name>/<size>, not {shown(header)}")
        cohort = self._cohorts.setdefault(name, Cohort(int(size)))
        cohort.requests.append(request)
        if cohort.timer is None:
            cohort.timer = asyncio.get_running_loop().call_later(COHORT_TIMEOUT_S, self._release, name)
        if len(cohort.requests) >= cohort.size:
            self._release(name)

    def _release(self, name: str) -> None:
        cohort = self._cohorts.pop(name)
        cohort.timer.cancel()
        if len(cohort.requests) < cohort.size:
            logger.warning("cohort %s: %d of %d requests came", name, len(cohort.requests), cohort.size)
        self.worker.add(sorted(cohort.requests, key=lambda request: request.request_id))

    # Weights

    async def pause(self, http: web.Request) -> web.Response:
        mode, clear = http.query.get("mode", "abort"), http.query.get("clear_cache", "true").lower()
        if mode not in PAUSE_MODES or clear not in ("true", "false"):
            raise BadRequest("mode must be abort, wait or keep, and clear_cache true or false")
        await asyncio.wrap_future(self.worker.pause(mode, clear == "true"))
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._call_whole(self.worker.resume)
        return web.json_response({"status": "resumed"})

    async def init_weight_transfer_engine(self, http: web.Request) -> web.Response:
        # Imported here: a server that never gets an update does not need process groups.
        from torchtitan.grpo.weight_wire.receiver import InitInfo, Receiver
        from torchtitan.grpo.weight_wire.transport import in_thread

        init_info = (await bodies.json_of(http)).get("init_info")
        if not isinstance(init_info, dict):
            raise BadRequest("init_info must be an object")
        info = InitInfo(**init_info)
        before = self._receiver
        if before is not None:
            await asyncio.to_thread(before.yield_to, info.run)
            if self._receiver is before:
                self._receiver = None
        if info.adapter is not None:
            names = [entry[0] for bucket in info.plan for entry in bucket]
            adapter = AdapterInfo(**info.adapter)
            await asyncio.to_thread(check_adapters, self.generator.model, self.model_name, adapter, names)
        # A trainer may never join. Generation does not wait for it, and a newer connection takes its place.
        joining = self._joining = in_thread(lambda: Receiver(init_info, self.generator.model.device), "weight-transfer")
        try:
            receiver = await asyncio.wrap_future(joining)
        except asyncio.CancelledError:  # the trainer has hung up
            joining.add_done_callback(_close_late)
            raise
        if joining is not self._joining:
            receiver.close()
            raise BadRequest("another trainer has connected since")
        self._receiver = receiver
        return web.json_response({"message": "Weight transfer initialized"})

    async def update_weights(self, http: web.Request) -> web.Response:
        from torchtitan.grpo.weight_wire.receiver import UpdateInfo

        update_info = (await bodies.json_of(http)).get("update_info")
        receiver, model = self._receiver, self.generator.model
        if receiver is None:
            raise BadRequest("call /init_weight_transfer_engine first")
        if not isinstance(update_info, dict):
            raise BadRequest("update_info must be an object")
        info = UpdateInfo(**update_info)
        adapter = receiver.info.adapter
        served = AdapterInfo(**adapter) if adapter is not None else None

        def take() -> None:
            if not self.worker.paused:
                raise BadRequest("pause the server before a weight update")
            self.torn = True  # until an update succeeds
            update = ModelUpdate(model, served, receiver.names)
            receiver.receive(update_info, update.load, update.check_complete, copies=True)
            if receiver is not self._receiver:
                raise BadRequest("a trainer has connected since this update began")
            self._serve(version_name(info.version, info.run), info.resume)

        await self._call(take)
        return web.json_response({"message": "Weights updated"})

    def _serve(self, version: str, resume: bool) -> None:
        """All of this version is here."""
        self.generator.version, self.torn = version, False
        if resume:
            self.worker.resume()

    async def collective_rpc(self, http: web.Request) -> web.Response:
        """vLLM's route, with the one method that our plug-in adds there."""
        if (await bodies.json_of(http)).get("method") != FINGERPRINTS:
            raise BadRequest(f"this server knows the method {FINGERPRINTS} alone")
        model = self.generator.model
        return web.json_response({"results": [await self._call_whole(lambda: held_fingerprints(model))]})

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.worker.call(function))

    async def _call_whole(self, function: Callable[[], Any]) -> Any:
        """Refused if the weights are torn when its turn comes on the generation thread."""

        def call() -> Any:
            if self.torn:
                what = "a weight update failed or is not finished: the weights are a mix of two versions"
                raise web.HTTPServiceUnavailable(text=what)
            return function()

        return await self._call(call)

    # State

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.worker.is_alive() else 503)

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.model_name,
            "object": "model",
            "owned_by": "torchtitan-grpo",
            "root": self.model_name,
            "max_model_len": self.generator.max_model_len,
            KEY: identity(self.model_name, self.generator.model.config).config,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.worker.paused})

    async def get_world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.generator.version})


def _close_late(joining: Future) -> None:
    if joining.exception() is None:
        joining.result().close()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "Error", "code": status}}, status=status)
