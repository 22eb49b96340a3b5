"""SGLang with the trainer's LoRA adapters: each version is an adapter of its own, and a request names the one it wants.

SGLang serves several adapters at once. So an answer ends under the version that it began with, whatever is loaded
meanwhile, and nothing is paused. Its prefix cache is keyed by adapter: a cached prefix never meets another version.
"""

import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

from torchtitan.grpo.engines.http_client import Span
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams, error_text
from torchtitan.grpo.engines.sglang import SglangClient, _Meta
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.version_names import version_name, version_of

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
"""Layers that SGLang adapts together: naming one in --lora-target-modules makes place for all."""
_BASE = "the base alone"


class SglangAdapterClient(SglangClient):
    """As `SglangClient`, for servers of adapters.

    Every token of an answer counts as of the version whose adapter the request named. The version that the server
    reports is checked for its run only: it is the newest adapter's, also for answers that began earlier.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()

    def running_versions(self) -> set[int]:
        """See `HttpClient.running_versions`."""
        with self._lock:
            return set(self._running)

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, cohort: tuple[str, int] | None = None
    ) -> list[Completion]:
        """See `SglangClient.generate`."""
        with self._lock:  # a version that weight sync does not find here is named by no later request
            version = self._version()
            self._running[version] += 1
        try:
            return await self._generate(prompt_ids, params, request_id, version)
        finally:
            with self._lock:
                self._running[version] -= 1
                self._running += Counter()  # drops those at 0

    def weights(self, version: int) -> dict[str, Any]:
        named = super().weights(version)
        return named | {"lora_path": version_name(version)} if version >= 0 else named

    def _spans(self, meta: _Meta[int]) -> list[Span] | None:
        return None

    def _raise_for_status(self, route: str, status: int, payload: bytes, request_id: str) -> None:
        said = error_text(payload)
        if status == 400 and "LoRA adapter" in said:  # of a server that was restarted, or that another run has taken
            raise EngineError(f"{self.url}: request {request_id}: the server has lost its adapter: {said}")
        super()._raise_for_status(route, status, payload, request_id)


class SglangAdapterControl(SglangControl):
    """As `SglangControl`, for servers of adapters."""

    def _check_setup(self, recomputes: bool) -> None:
        super()._check_setup(False)  # no keys and values are ever computed again

    def check_takes_adapters(self, rank: int, layers: Collection[str]) -> None:
        """Whether the server was started with a place for adapters.

        Args:
            rank: Of the adapters.
            layers: Names of the adapted layers in a block, such as "q_proj".

        Raises:
            UserError: It was not. The message has the flags to start it with.
        """
        info = self.info()
        flags = f"--enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(layers)}"
        wrong = ""
        place, largest = set(info.get("lora_target_modules") or ()), info.get("max_lora_rank")
        missing = sorted(set(map(_fused, layers)) - set(map(_fused, place))) if place and "all" not in place else []
        if not info.get("enable_lora"):
            wrong = "was started without LoRA"
        elif largest is not None and rank > largest:
            wrong = f"[lora] rank = {rank} is over its --max-lora-rank {largest}"
        elif missing:
            named = [layer for layer in layers if _fused(layer) in missing]
            wrong = f"its --lora-target-modules {' '.join(sorted(place))} has no place for {', '.join(named)}"
        if wrong:
            raise UserError(f"{self.url}: {wrong}: start it with {flags}")
        if info.get("max_loaded_loras") is not None:
            raise UserError(
                f"{self.url}: --max-loaded-loras {info['max_loaded_loras']} has SGLang unload adapters by itself: "
                "start it without that flag; the trainer unloads versions that no answer needs"
            )

    def model_folder(self) -> str:
        """The folder that the server loaded, or a name on a hub."""
        return self._json("GET", "/model_info", "connect", lambda said: str(said["model_path"]))

    def adapters(self) -> list[str]:
        """Names of the adapters that requests may name."""
        return self._json(
            "GET", "/v1/models", "adapters", lambda said: [str(m["id"]) for m in said["data"] if m.get("parent")]
        )

    def load_adapter(self, name: str, folder: str, timeout_s: float) -> None:
        """Have the server load an adapter. Returns when all of its workers have it in memory."""
        self._given.append(name)
        self._call(
            "POST", "/load_lora_adapter", "apply", body={"lora_name": name, "lora_path": folder}, timeout_s=timeout_s
        )

    def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Have the server forget an adapter. It waits for the answers under it, and loads no other meanwhile."""
        self._call("POST", "/unload_lora_adapter", "unload", body={"lora_name": name}, timeout_s=timeout_s)

    def report(self, name: str) -> None:
        """What `weight_version` says from now on."""
        self._call("POST", "/update_weight_version", "finish", body={"new_version": name, "abort_all_requests": False})

    def weight_version(self) -> str | None:
        """See `HttpControl.weight_version`. A version of ours counts while its adapter is loaded."""
        name = super().weight_version()
        ours = name is not None and version_of(name) is not None
        return _BASE if ours and name not in self.adapters() else name

    def _explain(self, status: int, phase: str, path: str, said: str) -> None:
        if path == "/load_lora_adapter" and ("Repo id" in said or "No such file" in said):  # it looks on a hub then
            raise UserError(
                f'{self.url}: cannot read the adapter\'s folder: set [weight_sync] transport = "disk", and disk_folder '
                f"to a folder that the server's machine has at the same path: {said}"
            )
        super()._explain(status, phase, path, said)


def _fused(layer: str) -> str:
    return _FUSED.get(layer, layer)
