"""The control routes of one SGLang server (0.5.15 and newer): pause, weight updates. Synchronous, for threads."""

import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.model_identity import ModelIdentity, identity, identity_of_folder
from torchtitan.grpo.weight_wire.version_names import lives, other_run, owned_by

OLDEST = (0, 5, 15)
"""The oldest supported version. Older ones need torch versions that torchtitan 0.2.2 does not run on."""
FORGETS_IN_FLIGHT = (0, 5, 21)
"""Older versions cannot drop cached prefixes while answers are frozen, and exit if an update asks for it."""
_FORGET_S, _FORGET_AGAIN_S = 10.0, 0.05


class SglangControl(HttpControl):
    """See `HttpControl`. SGLang does not report whether it is paused, so `is_paused` knows of our own calls only."""

    # The scheduler answers this even while paused. /health generates a token, and would wait.
    health_path = "/server_info"
    length_flag = "--context-length"
    sampling_hint = "Is SGLANG_RETURN_ORIGINAL_LOGPROB set in the server's environment? Unset it."

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0):
        super().__init__(url, api_key, timeout_s)
        self._paused = False
        self._given: deque[str] = deque(maxlen=2)  # the two newest versions; the last may not have arrived
        self._has_sessions = True
        self._caches = True
        self._tells_checksums = True
        self.comparable: dict[str, list[str]] = {}
        """Tensors whose checksum has been the trainer's, by SGLang's names, and what each is made of; see
        `weight_sync.held`."""
        self.started_anew = True
        """Whether the server has been started since the connection before this one, perhaps with other flags."""
        self._startup_time: float | None = None

    def info(self) -> dict[str, Any]:
        """The server's resolved arguments and its version."""
        return self._json("GET", "/server_info", "server info", dict)

    def software_version(self) -> str:
        return str(self.info().get("version", ""))

    def world_size(self) -> int:
        """See `HttpControl.world_size`.

        Raises:
            UserError: The server has data-parallel replicas. SGLang then takes no weights over a process group.
        """
        info = self.info()
        with self._reading("phase world size: /server_info"):
            replicas, tp, pp = (int(info.get(name) or 1) for name in ("dp_size", "tp_size", "pp_size"))
        if replicas > 1:
            raise UserError(
                f"{self.url}: --dp-size {replicas}: SGLang cannot update data-parallel replicas; start one "
                "server for each, and list them all in [rollout] urls"
            )
        before, self._startup_time = self._startup_time, info.get("startup_time")
        self.started_anew = before is None or self._startup_time != before
        self.workers = tp * pp
        return self.workers

    def _check_setup(self, recomputes: bool) -> None:
        info = self.info()
        version = str(info.get("version", ""))
        if _numbers(version) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UserError(f"{self.url}: SGLang {version or 'of an unknown version'}: {oldest} or newer is needed")
        self._caches = not info.get("disable_radix_cache")
        if recomputes and self._caches and _numbers(version) < FORGETS_IN_FLIGHT:
            raise UserError(
                f"{self.url}: SGLang {version} cannot drop cached prefixes while answers wait for an update to end: "
                f"start it with --disable-radix-cache, use {'.'.join(map(str, FORGETS_IN_FLIGHT))} or newer, or set "
                "[async_grpo] recompute_kv_cache_after_weight_updates = false"
            )

    def _longest_tokens(self) -> int | None:
        if length := self.info().get("context_length"):
            return int(length)
        models = self.models()
        return models[0].get("max_model_len") if models else None

    def _answers(self) -> bool:
        self._check_owner()
        if self.is_paused():  # by us
            return False
        self.resume()  # a trainer that crashed may have left it paused
        return True

    def _check_routes(self, prompt_id: int, top_k: int) -> None:
        if not self.info().get("enable_return_routed_experts"):
            raise UserError(
                f"{self.url}: does not tell which experts compute an answer, which [grpo] routing_replay needs: start "
                "it with --enable-return-routed-experts"
            )

    def _check_kept(self, prompt_id: int, top_k: int, min_p: float) -> None:
        info = self.info()
        limit = int(info.get("sampling_mask_max_tokens") or 0)
        if not limit:
            raise UserError(
                f"{self.url}: SGLang {info.get('version')} does not tell which tokens it kept, which [rollout] top_k "
                "needs: use 0.5.23 or newer, or set top_k = 0"
            )
        if top_k > limit:
            raise UserError(
                f"{self.url}: --sampling-mask-max-tokens {limit} is under [rollout] top_k = {top_k}: raise the first "
                "or lower the second"
            )
        if min_p and info.get("enable_deterministic_inference"):  # the first such request would end the server
            raise UserError(
                f"{self.url}: SGLang has no min-p with --enable-deterministic-inference: set [rollout] min_p = 0, or "
                "start it without that flag"
            )

    def _check_owner(self) -> None:
        """SGLang knows no owner, but it has the name of the weights. A run on this host can be looked up, and one that
        took the server from us lives."""
        run = other_run(self.weight_version())
        if run and (lives(run) or (self._given and lives(run) is None)):
            raise UserError(f"{self.url}: {owned_by(run)}")

    def _identity(self) -> ModelIdentity:
        """SGLang tells its model's folder and architecture. The rest is known if the folder is on this machine."""
        model = self._json("GET", "/model_info", "model info", dict)
        here = identity_of_folder(str(model.get("model_path")))
        return identity(here.name, {"architectures": model.get("architectures")} | here.config)

    def pause(self, mode: str = "keep", clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """See `HttpControl.pause`. SGLang has no `wait`."""
        if mode != "keep":
            raise ValueError(f"SGLang has no pause mode {mode!r}")
        self._paused = True
        body = {"mode": "retract" if clear_cache else "in_place"}
        self._call("POST", "/pause_generation", "pause", body=body, timeout_s=timeout_s)

    def resume(self) -> None:
        self._call("POST", "/continue_generation", "resume", body={})
        self._paused = False

    def is_paused(self) -> bool:
        """Whether `pause` paused this very server: one that was restarted at its address has no version of ours."""
        return self._paused and self.weight_version() in self._given

    def check_takes_models(self) -> None:
        """
        Raises:
            UserError: The server was started for adapters.
        """
        if self.info().get("enable_lora"):
            raise UserError(
                f"{self.url}: was started with --enable-lora, and gets whole models: set [lora] enable = true, or "
                "start it without that flag"
            )

    def join_group(self, name: str, backend: str, address: str, port: int, world_size: int) -> None:
        """Have the server's workers join a process group as ranks 1.. . Returns when they have joined."""
        body = {"group_name": name, "backend": backend, "master_address": address, "master_port": port}
        body |= {"rank_offset": 1, "world_size": world_size}
        self._call("POST", "/init_weights_update_group", "connect", body=body)
        self._has_sessions = True  # a newer SGLang may have been started at this address

    def leave_group(self, name: str) -> None:
        self._call("POST", "/destroy_weights_update_group", "leave", body={"group_name": name})

    def start_update(self) -> None:
        """Open an update session, which SGLang has from 0.5.21 on. End one that a failed update left open."""
        path, body = "/begin_weight_update", {"selector": "all"}
        if not self._has_sessions:
            return
        reply = self._request("POST", path, "start", body=body)
        if reply.status == 404:
            self._has_sessions = False
            return
        if reply.status == 400 and b"already open" in reply.data:
            self._call("POST", "/end_weight_update", "start", body={})
            reply = self._request("POST", path, "start", body=body)
        self._check(reply, "start", path)

    def receive(
        self,
        name: str,
        tensors: list[tuple[str, str, list[int]]],
        flattened: bool,
        version: str | None,
        timeout_s: float,
    ) -> None:
        """Have the server receive tensors by broadcast and load them. Returns when it has loaded them.

        Args:
            name: Name of the process group.
            tensors: (Hugging Face name, dtype, shape), in the order in which they are sent.
            flattened: They come as one broadcast of bytes. Otherwise they come one by one.
            version: The weight version, with the last tensors of an update; None with the others.
            timeout_s: Longest wait for the reply.
        """
        if version is not None:
            self._given.append(version)
        names, dtypes, shapes = zip(*tensors, strict=True)
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": name, "flush_cache": False}
        body |= {"load_format": "flattened_bucket" if flattened else None, "weight_version": version}
        self._call("POST", "/update_weights_from_distributed", "update", body=body, timeout_s=timeout_s)

    def load_folder(self, folder: str, version: str, timeout_s: float) -> None:
        """Have the server load a folder of safetensors files. Returns when it has loaded them. Needs no session."""
        self._given.append(version)
        body = {"model_path": folder, "weight_version": version, "flush_cache": False}
        self._call("POST", "/update_weights_from_disk", "update", body=body, timeout_s=timeout_s)

    def forget(self) -> None:
        """Drop cached prefixes. This is a separate call: as part of an update it can make SGLang before 0.5.21 exit."""
        if not self._caches:
            return
        path, phase, deadline = "/flush_cache", "forget", time.monotonic() + _FORGET_S
        # SGLang refuses while a request runs, such as one that was just aborted.
        while (reply := self._request("POST", path, phase)).status == 400 and time.monotonic() < deadline:
            time.sleep(_FORGET_AGAIN_S)
        self._check(reply, phase, path)

    def finish_update(self) -> None:
        """End the session."""
        if self._has_sessions:
            self._call("POST", "/end_weight_update", "finish", body={})

    def weight_version(self) -> str | None:
        """See `HttpControl.weight_version`."""
        version = self._json("GET", "/model_info", "weight version", lambda said: said.get("weight_version"))
        return None if version is None else str(version)

    @property
    def tells_checksums(self) -> bool:
        """Old servers do not, and workers that hold a part each have no checksum of the whole."""
        return self._tells_checksums and self.workers == 1

    def checksums(self, without: Sequence[str] = (), timeout_s: float | None = None) -> dict[str, str] | None:
        """Of the tensors that the server holds now, by its own names. None if it does not tell them.

        Args:
            without: Names of tensors to leave out, which saves the server their time. It leaves out all whose names
                contain one of these.
        """
        if not self.tells_checksums:
            return None
        path, phase = "/weights_checker", "checksums"
        body = {"action": "checksum", "selector": "target", "skip_tensor_list": list(without)}
        reply = self._request("POST", path, phase, body=body, timeout_s=timeout_s)
        if reply.status in (400, 404, 422):
            self._tells_checksums = False
            return None
        self._check(reply, phase, path)

        def read(said: Any) -> dict[str, str] | None:
            ranks = said.get("ranks") or [{}]
            found = ranks[0].get("checksums")
            return None if found is None else {str(name): str(value) for name, value in found.items()}

        return self._read(reply, path, phase, read)

    def _top_logprobs(self, prompt_ids: list[int], temperature: float, k: int, top_k: int) -> dict[int, float]:
        sampling = {"temperature": temperature, "max_new_tokens": 1, "top_p": 1.0, "ignore_eos": True}
        sampling |= {"top_k": top_k or -1}
        body = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True}
        body |= {"top_logprobs_num": k, "stream": False}

        def read(said: Any) -> dict[int, float]:
            top = said["meta_info"]["output_top_logprobs"][0]
            return {int(token): float(logprob) for logprob, token, _ in top}

        return self._json("POST", "/generate", "sampling check", read, body=body)

    def _explain(self, status: int, phase: str, path: str, said: str) -> None:
        if status == 404:
            raise UserError(f"{self.url}: HTTP 404 on {path}: is this an SGLang server ([rollout] engine)?")
        if status == 403:
            raise UserError(
                f"{self.url}: HTTP 403 on {path}: the server has an --admin-api-key; [rollout] api_key_env must name "
                "the variable that holds it"
            )
        if "unhandled cuda error" in said:  # NCCL's message
            raise UserError(
                f"{self.url}: {said}: do both ends use NCCL's cuMem? SGLang sets NCCL_CUMEM_ENABLE=0 unless it is set: "
                "start it with torchtitan-grpo serve sglang, or with NCCL_CUMEM_ENABLE=-2, NCCL's own default"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """0.5.21.post1 -> (0, 5, 21)."""
    return tuple(int(number) for number in re.findall(r"(?:^|\.)(\d+)", version)[:3])
