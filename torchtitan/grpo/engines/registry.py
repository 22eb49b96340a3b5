"""Which classes speak to which engine: the one place to add another."""

from torchtitan.grpo.engines.fleet import Server
from torchtitan.grpo.engines.sglang import SglangClient
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import ServerControl

ENGINES = {
    "embedded": (ServerControl, VllmClient),  # it has vLLM's routes
    "vllm": (ServerControl, VllmClient),
    "sglang": (SglangControl, SglangClient),
}
"""`[rollout] engine` -> control routes for weight sync, client of the generation route for the collector."""


def make_server(
    engine: str, url: str, api_key: str | None, control_timeout_s: float, request_timeout_s: float
) -> Server:
    """A server of `[rollout] urls`; nothing is sent to it yet."""
    control, client = ENGINES[engine]
    server = Server(url, control(url, api_key, control_timeout_s))
    server.client = client(url, api_key, request_timeout_s, lambda: server.version)
    return server
