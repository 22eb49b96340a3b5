"""python -m torchtitan.grpo.engines.embedded --model DIR: serve one model over HTTP until SIGTERM or SIGINT."""

import argparse
import asyncio
import gc
import logging
import os
import signal
from pathlib import Path

import torch
from aiohttp import web

from torchtitan.grpo.engines.embedded.generator import Generator
from torchtitan.grpo.engines.embedded.kv_cache import cache_budget_bytes
from torchtitan.grpo.engines.embedded.model import end_token_ids, load_decode, load_model
from torchtitan.grpo.engines.embedded.server import EmbeddedApp
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import UNSENDABLE, http_url, is_sendable
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.server_commands.command import ServerCommandError, check_exposure

logger = logging.getLogger("torchtitan.grpo.engines.embedded")

PARENT_POLL_S = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchtitan.grpo.engines.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder; weights are optional")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need --expose")
    parser.add_argument("--expose", action="store_true", help="let other machines reach the server")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-sequences", type=int, default=256, help="answers decoded at once")
    parser.add_argument("--max-model-len", type=int, help="prompt and answer tokens; default: the model's own limit")
    parser.add_argument("--memory-share", type=float, default=0.0, help="of a GPU's memory at most; default: no limit")
    parser.add_argument("--parent-pid", type=int, help="exit when this process, the direct parent, is gone")
    parser.add_argument(
        "--api-key-env", default="", help="environment variable with the API key that clients must send"
    )
    arguments = parser.parse_args()
    if arguments.max_sequences < 1 or (arguments.max_model_len is not None and arguments.max_model_len < 2):
        parser.error("--max-sequences must be at least 1 and --max-model-len at least 2")
    if not 0 <= arguments.memory_share < 1:
        parser.error("--memory-share must be at least 0 and under 1")
    if arguments.api_key_env and not os.environ.get(arguments.api_key_env):
        parser.error(f"--api-key-env: the environment variable {arguments.api_key_env} is not set")
    if not is_sendable(os.environ.get(arguments.api_key_env, "")):
        parser.error(f"--api-key-env: the environment variable {arguments.api_key_env} {UNSENDABLE}")
    try:
        check_exposure(arguments.host, arguments.expose, "Give --api-key-env")
    except ServerCommandError as error:
        parser.error(str(error))
    return arguments


def build_app(arguments: argparse.Namespace) -> EmbeddedApp:
    device = torch.device(arguments.device)
    model = load_model(arguments.model, device, getattr(torch, arguments.dtype))
    own_limit = model.config.max_position_embeddings
    limit = arguments.max_model_len or own_limit
    if limit > own_limit:
        raise UserError(f"--max-model-len {limit}: the model's max_position_embeddings is {own_limit}")
    generator = Generator(
        model,
        max_sequences=arguments.max_sequences,
        max_model_len=limit,
        end_token_ids=end_token_ids(arguments.model),
        cache_bytes=cache_budget_bytes(device, arguments.memory_share),
        decode=load_decode(arguments.model),
    )
    api_key = os.environ[arguments.api_key_env] if arguments.api_key_env else None
    return EmbeddedApp(generator, str(arguments.model), api_key)


async def serve(app: EmbeddedApp, arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # handler_cancellation: a request must leave the batch when its client is gone.
    runner = web.AppRunner(app.application(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port)
    try:
        await site.start()
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {arguments.host} --port {arguments.port}: {error}") from error
    # What is loaded stays. Each collection would look at all of it again, while answers wait.
    gc.collect()
    gc.freeze()
    port = runner.addresses[0][1]
    logger.info("serving %s on %s", arguments.model, http_url(arguments.host, port))
    while not stop.is_set():
        if arguments.parent_pid is not None and os.getppid() != arguments.parent_pid:
            logger.warning("parent process %d is gone", arguments.parent_pid)
            break
        try:
            await asyncio.wait_for(stop.wait(), PARENT_POLL_S)
        except TimeoutError:
            continue
    await runner.cleanup()
    logger.info("stopped")


def main() -> None:
    init_log_lines()
    arguments = parse_arguments()
    try:
        app = build_app(arguments)
        asyncio.run(serve(app, arguments))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    os._exit(0)  # torch's teardown takes a second, for which the trainer would wait


if __name__ == "__main__":
    main()
