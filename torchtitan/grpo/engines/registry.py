"""The engines: one row each, and the one place to add another."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan.grpo.data.samples import ANY_VOCAB
from torchtitan.grpo.engines.engine import Engine
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.sglang import SglangClient
from torchtitan.grpo.engines.sglang_adapters import SglangAdapterClient, SglangAdapterControl
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.process.server_commands.embedded import EmbeddedCommand
from torchtitan.grpo.process.server_commands.sglang import SglangCommand
from torchtitan.grpo.process.server_commands.vllm import VllmCommand

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

_LINKS, _SCORERS = "torchtitan.grpo.weight_sync", "torchtitan.grpo.rollouts.teachers.scorers"

_VLLM = Engine(
    VllmCommand,
    VllmControl,
    VllmClient,
    f"{_LINKS}.link:GroupLink",
    f"{_LINKS}.disk:FolderLink",
    f"{_SCORERS}:VllmScorer",
    f"{_LINKS}.held:Fingerprints",
    repeats_in_flight=False,
)
_EMBEDDED = replace(  # it has vLLM's routes
    _VLLM, command=EmbeddedCommand, scorer=f"{_SCORERS}:EmbeddedScorer", repeats_in_flight=True
)
_SGLANG = Engine(
    SglangCommand,
    SglangControl,
    SglangClient,
    f"{_LINKS}.sglang_link:SglangLink",
    f"{_LINKS}.sglang_link:SglangFolderLink",
    f"{_SCORERS}:SglangScorer",
    f"{_LINKS}.held:HeldBySglang",
    repeats_in_flight=False,
)
_SGLANG_ADAPTERS = replace(
    _SGLANG,
    control=SglangAdapterControl,
    client=SglangAdapterClient,
    link=f"{_LINKS}.sglang_adapter_link:SglangAdapterLink",
    disk_link=f"{_LINKS}.sglang_adapter_link:SglangAdapterLink",
)

# vLLM 0.32 cannot score prompts under adapters: its output layer knows the adapter of a sequence, not of a token. On a
# CPU the engine ends (vLLM's issue 51594).
_VLLM_ADAPTERS = replace(_VLLM, scorer="")

ENGINES = {
    row.command.engine: row
    for row in (
        _EMBEDDED,
        replace(_VLLM, with_adapters=_VLLM_ADAPTERS),
        replace(_SGLANG, with_adapters=_SGLANG_ADAPTERS),
    )
}
"""`[rollout] engine` -> its row."""


def server_maker(config: "JobConfig", newest: Callable[[], int], vocab_size: int) -> Callable[[str], Server]:
    """Makes the server of an address, as the configuration says. The arguments are those of `make_server`."""
    rollout = config.rollout
    api_key = os.environ.get(rollout.api_key_env) if rollout.api_key_env else None
    timeouts = config.weight_sync.timeout_seconds, rollout.request_timeout_seconds
    adapters = config.lora.enable
    return lambda url: make_server(rollout.engine, url, api_key, *timeouts, newest, vocab_size, adapters)


def make_server(
    engine: str,
    url: str,
    api_key: str | None,
    control_timeout_s: float,
    request_timeout_s: float,
    newest: Callable[[], int] | None = None,
    vocab_size: int = ANY_VOCAB,
    adapters: bool = False,
) -> Server:
    """A server of `[rollout] urls`. Nothing is sent to it yet.

    Args:
        control_timeout_s: Longest wait for one control call.
        request_timeout_s: Longest wait for one answer.
        newest, vocab_size: Bounds of an answer's weight versions and token ids, see `HttpClient`.
        adapters: It gets LoRA adapters, not whole models.
    """
    row = ENGINES[engine]
    row = (adapters and row.with_adapters) or row
    server = Server(url, row.control(url, api_key, control_timeout_s), engine=row)
    server.client = row.client(url, api_key, request_timeout_s, lambda: server.version, newest, vocab_size)
    return server
