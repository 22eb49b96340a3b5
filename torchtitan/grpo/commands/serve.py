"""Start a vLLM or SGLang server as `process/server_commands` says. This process becomes the server.

It may run in the engine's environment, which need not have torchtitan. So it imports only what they do.
"""

import argparse
import os
import re
import shlex
import sys

from torchtitan.grpo.process.addresses import (
    LOOPBACK,
    UNSENDABLE,
    http_url,
    is_loopback,
    is_sendable,
    try_to_bind,
)
from torchtitan.grpo.process.server_commands.command import ServerCommand, ServerCommandError, check_exposure
from torchtitan.grpo.process.server_commands.table import COMMANDS

ENGINES = [engine for engine, command in COMMANDS.items() if not command.bundled]
_ELSEWHERE = re.compile(r"\w+://.+|\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
"""A model that an engine fetches: an address, or OWNER/NAME of the hub; one of its GGUF files may follow a colon."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=ENGINES)
    model = "folder with config.json and a tokenizer; without weights, add --load-format dummy: the trainer sends them"
    parser.add_argument("model", help=model)
    parser.add_argument("--port", type=int, default=8000, help="default 8000")
    host = "default 127.0.0.1. Whoever reaches the server can replace its weights"
    parser.add_argument("--host", default=LOOPBACK, help=host)
    expose = "needed with a HOST that other machines reach; such a server should have a key"
    parser.add_argument("--expose", action="store_true", help=expose)
    cpu = "float32 on the CPU, with the environment of a checkout's scripts/install_*_cpu.sh if there is one"
    parser.add_argument("--cpu", action="store_true", help=cpu)
    gpu = (
        "CUDA devices, e.g. 0 or 2,3, counted among the visible ones; several become a tensor-parallel server. "
        "Default: all that are visible, TP 1"
    )
    parser.add_argument("--gpu", type=gpu_list, default=(), metavar="N[,N...]", help=gpu)


def main(words: list[str]) -> int:
    try:
        command, port = _parsed(words)
        _check_port(command.host, port)
        argv, environment = command.argv(port, command.engine_folder()), command.environment()
    except ServerCommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    print("+", shlex.join(argv), file=sys.stderr, flush=True)
    os.execvpe(argv[0], argv, environment)


def _parsed(words: list[str]) -> tuple[ServerCommand, int]:
    """The server, and its port."""
    if len(words) < 2 or words[0] not in ENGINES or words[1].startswith("-"):
        raise ServerCommandError(
            f"serve ENGINE MODEL comes first: {' or '.join(ENGINES)}, and a folder with config.json and a tokenizer", 2
        )
    engine = COMMANDS[words[0]]
    key = engine.key_variable
    if any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in words):  # vLLM takes both
        raise ServerCommandError(f"--api-key shows the key to everyone who runs ps: export {key} instead", 2)
    parser = argparse.ArgumentParser(prog="torchtitan-grpo serve", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    given, flags = parser.parse_known_args(words)
    check_exposure(given.host, given.expose, f"Export {key}")
    if not is_sendable(os.environ.get(key, "")):
        raise ServerCommandError(f"{key} {UNSENDABLE}", 2)
    if not (os.path.exists(given.model) or _ELSEWHERE.fullmatch(given.model) or _is_cached(given.model)):
        where = "" if os.path.isabs(given.model) else f" in {os.getcwd()}"
        raise ServerCommandError(
            f"{given.model!r} is no folder{where}. Give a folder with config.json and a tokenizer, or a model of the "
            "hub with its owner, as in Qwen/Qwen3-0.6B",
            2,
        )
    named = any(flag.replace("_", "-").startswith("--hf-config-path") for flag in flags)  # to vLLM
    if os.path.isdir(given.model) and not (named or _has_config(given.model)):
        exported = os.path.join(given.model, "hf")  # of a checkpoint
        instead = exported if _has_config(exported) else "a folder with config.json and a tokenizer"
        raise ServerCommandError(f"{given.model!r} has no config.json: give {instead}", 2)
    if given.expose and not is_loopback(given.host) and not os.environ.get(key):
        said = f"warning: --expose without {key}: whoever reaches port {given.port} can replace the weights"
        print(said, file=sys.stderr)
    gpus = () if given.cpu else given.gpu or None
    return engine(given.model, gpus, tuple(flags), host=given.host, key_env=key), given.port


def _has_config(folder: str) -> bool:
    """Whether it has what an engine reads first; params.json is Mistral's."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("config.json", "params.json"))


def _check_port(host: str, port: int) -> None:
    """Refuse an address that no server can have. vLLM ends with a traceback there, and SGLang once it has the model;
    with a port over 65535 SGLang says that it is ready."""
    if not 0 < port < 2**16:
        raise ServerCommandError(f"--port {port} is no port: give one from 1 to {2**16 - 1}", 2)
    try:
        try_to_bind(host, port)
    except OSError as error:
        raise ServerCommandError(
            f"no server can listen at {http_url(host, port)} ({error.strerror}): give a free --port, and as --host an "
            "address of this machine",
            2,
        ) from error


def _is_cached(name: str) -> bool:
    """Whether the hub's cache has this model, which may have no owner, as `gpt2`."""
    from huggingface_hub import try_to_load_from_cache  # takes long
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def gpu_list(text: str) -> tuple[int, ...]:
    """Of "0,1"."""
    gpus = tuple(int(gpu) for gpu in text.split(",") if gpu)
    if min(gpus, default=0) < 0 or len(set(gpus)) < len(gpus):
        raise argparse.ArgumentTypeError(f"{text} is to name each device once, counted from 0")
    return gpus
