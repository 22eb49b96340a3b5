"""The control routes of one vLLM or embedded server: pause, weight updates. Synchronous, for threads.

The routes are vLLM's development routes (0.25.1 to 0.33.0); the embedded server has the same ones.
"""

import json
import logging
from typing import Any, Literal

from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.inside_vllm.backend import BACKEND, FINGERPRINTS
from torchtitan.grpo.inside_vllm.before_vllm_0_32 import token_of
from torchtitan.grpo.weight_wire.model_identity import KEY, ModelIdentity, identity, identity_of_folder
from torchtitan.grpo.weight_wire.refusals import ADAPTERS, ELSEWHERE, PROTOCOL, PROTOCOLS, other_protocol
from torchtitan.grpo.weight_wire.version_names import OWNED

logger = logging.getLogger(__name__)


class VllmControl(HttpControl):
    """See `HttpControl`."""

    length_flag = "--max-model-len"
    sampling_hint = "Start vLLM with --logprobs-mode processed_logprobs."
    _reports_version = True  # until it says otherwise, on each connection

    def software_version(self) -> str:
        reply = self._request("GET", "/version", "software version")
        if reply.status == 404:  # the embedded server's is the trainer's own
            return ""
        return self._read(reply, "/version", "software version", lambda said: str(said["version"]))

    def world_size(self) -> int:
        """Over all of the server's parallelism."""
        params = {"include_dp": "true"}
        self.workers = self._json(
            "GET", "/get_world_size", "world size", lambda said: int(said["world_size"]), params=params
        )
        return self.workers

    def model_info(self) -> dict[str, Any]:
        """The served model's entry of `/v1/models`: `id`, `max_model_len` and more.

        Raises:
            UserError: The server lists no model.
        """
        models = self.models()
        if not models:
            raise UserError(f"{self.url}: /v1/models lists no model")
        return models[0]

    def _identity(self) -> ModelIdentity:
        return served_identity(self.model_info())

    def _longest_tokens(self) -> int | None:
        return self.model_info().get("max_model_len")

    def _answers(self) -> bool:
        if paused := self.is_paused():
            logger.info("%s is paused, as an interrupted weight update leaves it", self.url)
        return not paused

    def _check_routes(self, prompt_id: int, top_k: int) -> None:
        phase, path = "check of routing", "/inference/v1/generate"
        sampling = {"max_tokens": 1, "temperature": 1.0, "detokenize": False, "ignore_eos": True}
        sampling |= {"top_k": top_k} if top_k else {}
        body = {"token_ids": [prompt_id], "return_routed_experts": True, "sampling_params": sampling}
        if self._json("POST", path, phase, lambda said: said["choices"][0].get("routed_experts"), body=body) is None:
            raise UserError(
                f"{self.url}: does not tell which experts compute an answer, which [grpo] routing_replay needs: start "
                "vLLM with --enable-return-routed-experts --moe-backend triton"
            )

    def _check_kept(self, prompt_id: int, top_k: int, min_p: float) -> None:
        phase, path = "check of kept tokens", "/inference/v1/generate"
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": top_k, "detokenize": False, "ignore_eos": True}
        body = {"token_ids": [prompt_id] * 2, "return_sampling_mask": True, "sampling_params": sampling}
        if self._json("POST", path, phase, lambda said: said["choices"][0].get("sampling_mask"), body=body) is None:
            raise UserError(
                f"{self.url}: does not tell which tokens it kept, which [rollout] top_k needs: start vLLM (0.32 or "
                "newer) with --return-sampling-mask, or set top_k = 0"
            )

    def pause(self, mode: str = "keep", clear_cache: bool = True, timeout_s: float | None = None) -> None:
        params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        self._call("POST", "/pause", "pause", params=params, timeout_s=timeout_s)

    def resume(self) -> None:
        self._call("POST", "/resume", "resume")

    def sleep(self) -> None:
        self.asleep = True  # if no reply comes, it may be. To wake up a server that is not asleep has no effect
        self._call("POST", "/sleep", "sleep", params={"level": "2", "mode": "wait"})

    def wake_up(self, what: Literal["weights", "kv_cache"]) -> None:
        self._call("POST", "/wake_up", "wake up", params={"tags": what})
        self.asleep = what == "weights"

    def is_paused(self) -> bool:
        return self._json("GET", "/is_paused", "pause state", lambda said: bool(said["is_paused"]))

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Have the server join the weight-transfer group. Returns when it has joined.

        Args:
            init_info: Fields of `weight_wire.receiver.InitInfo`.
        """
        self._reports_version = True
        self._call("POST", "/init_weight_transfer_engine", "connect", body={"init_info": init_info})

    def update(self, update_info: dict[str, Any], timeout_s: float | None = None) -> None:
        """Have the server, which is paused, take one version into service. Returns when it has.

        Args:
            update_info: Fields of `weight_wire.receiver.UpdateInfo`.
            timeout_s: Longest wait for the reply: one call lasts for the whole transfer.
        """
        self._call("POST", "/update_weights", "update", timeout_s=timeout_s, body={"update_info": update_info})

    def weight_version(self) -> str | None:
        """The version that the server reports; None if it does not have the route (vLLM before 0.32).

        Without the route it is asked once on a connection, since the server is stopped meanwhile.
        """
        if not self._reports_version:
            return None
        phase, path = "weight version", "/weight_info"
        reply = self._request("GET", path, phase)
        if reply.status == 404:
            self._reports_version = False
            return None
        self._check(reply, phase, path)
        return self._read(reply, path, phase, lambda said: str(said["weight_version"]))

    def fingerprints(self, timeout_s: float | None = None) -> dict[str, str]:
        """Hugging Face name -> `weight_wire.adapters.fingerprint` of the weights that the server holds now, as far as
        it can read them back whole; of a server without our plug-in, none."""
        body = {"method": FINGERPRINTS}
        reply = self._request("POST", "/collective_rpc", "fingerprints", body=body, timeout_s=timeout_s)
        if reply.status != 200:
            return {}

        def read(said: Any) -> dict[str, str]:
            return {str(name): str(value) for worker in said["results"] for name, value in dict(worker or {}).items()}

        return self._read(reply, "/collective_rpc", "fingerprints", read)

    def _top_logprobs(self, prompt_ids: list[int], temperature: float, k: int, top_k: int) -> dict[int, float]:
        phase, path = "sampling check", "/inference/v1/generate"
        sampling = {"n": 1, "max_tokens": 1, "temperature": temperature, "top_p": 1.0, "min_p": 0.0, "seed": 0}
        sampling |= {"top_k": top_k} if top_k else {}
        sampling |= {"repetition_penalty": 1.0, "logprobs": k, "detokenize": False, "ignore_eos": True}
        reply = self._request("POST", path, phase, body={"token_ids": prompt_ids, "sampling_params": sampling})
        if reply.status in (403, 404):
            raise UserError(
                f"{self.url}: HTTP {reply.status} on {path}. Start vLLM with --enable-scale-out (0.32 and newer)."
            )
        self._check(reply, phase, path)

        def read(said: Any) -> dict[int, float]:
            entry = said["choices"][0]["logprobs"]["content"][0]
            return {token_of(top): float(top["logprob"]) for top in [entry, *(entry.get("top_logprobs") or [])]}

        return self._read(reply, path, phase, read)

    def _explain(self, status: int, phase: str, path: str, said: str) -> None:
        if status == 404:
            raise UserError(
                f"{self.url}: HTTP 404 on {path}: start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
            )
        if phase == "sampling check" and status == 400:
            raise UserError(
                f"{self.url}: does not tell the likeliest tokens: {said}. Lower [grpo] score_centering, or start vLLM "
                "with a higher --max-logprobs"
            )
        if phase != "connect":
            return
        if _OTHER_FIELDS in said:  # the plug-ins before protocol 4 did not look at the protocol first
            said = other_protocol(PROTOCOL, "3 or an earlier one")
        for mark in (OWNED, ADAPTERS, ELSEWHERE, PROTOCOLS):
            if mark in said:
                why = said[said.index(mark) :].partition(_VLLM_ADDS)[0]
                mend = '. Set [weight_sync] transport = "auto"' * (mark == ELSEWHERE)
                raise UserError(f"{self.url}: {why}{mend}")
        if _SAME_GPU in said:
            raise UserError(
                f"{self.url}: the server is on the trainer's GPU, where NCCL joins no two processes: set [weight_sync] "
                'transport = "ipc"'
            )
        if any(m in said for m in _WRONG_BACKEND) and "TorchtitanGrpoEngine" not in said:
            raise UserError(
                f"{self.url}: the server has another weight-transfer engine ({said}). Install torchtitan-grpo in its "
                f"environment and start it with --weight-transfer-config '{json.dumps({'backend': BACKEND})}'."
            )


def served_identity(model: dict[str, Any]) -> ModelIdentity:
    """Of an entry of `/v1/models`: what it tells, or else what the folder that it names says, if that is here."""
    name, config = str(model.get("root") or model.get("id")), model.get(KEY)
    return identity(name, config) if isinstance(config, dict) else identity_of_folder(name)


_VLLM_ADDS = "', please check the stack trace"
_OTHER_FIELDS = " InitInfo.__init__()"
"""Of `receiver.InitInfo`; other engines have longer names."""
_SAME_GPU = "Duplicate GPU detected"
"""NCCL's word (2.28)."""
_WRONG_BACKEND = ("Weight transfer not configured", "Invalid init_info for")
