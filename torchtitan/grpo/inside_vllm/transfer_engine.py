"""The worker's end of a weight update: vLLM's weight-transfer engine `torchtitan_grpo`.

vLLM's layer-wise reload fuses checkpoint tensors, slices them for tensor parallelism, quantises them and copies them
into the storage that CUDA graphs already use. Where all of that amounts to copies, `direct_load` makes the copies from
the second update on.
"""

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.worker.worker_base import WorkerBase

from torchtitan.grpo.inside_vllm import adapters, whole_update
from torchtitan.grpo.inside_vllm.adapters import ServedAdapters
from torchtitan.grpo.inside_vllm.backend import FINGERPRINTS
from torchtitan.grpo.inside_vllm.base_weights import base_fingerprints
from torchtitan.grpo.inside_vllm.before_vllm_0_32 import loaded_name
from torchtitan.grpo.inside_vllm.direct_load import DirectLoading
from torchtitan.grpo.inside_vllm.plugin import end_with_parent
from torchtitan.grpo.weight_wire import receiver
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, fingerprint
from torchtitan.grpo.weight_wire.buckets import Bucket
from torchtitan.grpo.weight_wire.refusals import ADAPTERS

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log


@dataclass
class InitInfo(receiver.InitInfo, WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(receiver.UpdateInfo, WeightTransferUpdateInfo):
    pass


_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""vLLM's stacks, and what a checkpoint has of each expert."""


def _is_scale(name: str) -> bool:
    """Whether vLLM computes this parameter by itself, where it quantizes what it loads."""
    return "_scale" in name.rpartition(".")[2]


def expected_names(
    model: torch.nn.Module, tied: bool, given: Collection[str] = (), quantizes: bool = False
) -> set[str]:
    """Hugging Face names of the weights that the model is made of.

    vLLM fuses checkpoint tensors (q, k and v into one); `packed_modules_mapping` says which. Its reload only warns when
    a layer received nothing, and is silent when a layer received a part. So the names are compared here. Experts are
    stacked, w1 and w3 in one; each worker counts all of them, wherever they are.

    Args:
        given: What comes. Some checkpoints have tensors fused as vLLM has them (GLM-4's `gate_up_proj`).
        quantizes: vLLM quantizes what it loads. Only then scales are its own: some models have weights of such names.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    names: set[str] = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        if (quantizes and _is_scale(name)) or (tied and name.startswith("lm_head.")):
            continue
        if ".experts." in name:  # beside them it may be the router, which has a name of its own
            layer, _, stack = name.partition(".experts.")
            kinds = _EXPERTS.get(stack.rpartition(".")[2], ())
            count = model.get_submodule(name.rpartition(".")[0]).global_num_experts if kinds else 0
            names.update(f"{layer}.experts.{expert}.{kind}.weight" for expert in range(count) for kind in kinds)
            continue
        *path, module, kind = name.split(".")
        parts = [module] if name in given else fused.get(module, [module])
        names.update(".".join([*path, part, kind]) for part in parts)
    return names


class TorchtitanGrpoEngine(WeightTransferEngine):
    """One worker's end of an update; the protocol is `receiver`'s."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _receiver: receiver.Receiver | None = None
    _direct: DirectLoading | None = None
    _adapters: ServedAdapters | None = None
    _base: dict[str, str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.parallel_config.distributed_executor_backend == "mp":  # else it is in another's process, maybe a user's
            end_with_parent()
        lora = self.vllm_config.lora_config
        if lora is not None:
            self._adapters = adapters.install(self.model, lora, self.device)
        workspaces = ((layer, getattr(layer, "workspace", None)) for layer in self.model.modules())
        self._workspaces = [(layer, kept) for layer, kept in workspaces if isinstance(kept, torch.Tensor)]
        setattr(WorkerBase, FINGERPRINTS, lambda worker: worker.weight_transfer_engine.held())
        setattr(WorkerBase, whole_update.TAKE, whole_update.in_worker)

    def held(self) -> dict[str, str]:
        """Fingerprints of the weights in service that this worker can read back whole: those that `direct_load` places.
        Not of adapters, whose base the files tell."""
        if self._direct is None:
            return {}
        return {name: fingerprint(tensor) for name, tensor in self._direct.held()}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group. It replaces the last connection, unless that is another run's and lives."""
        if self._receiver is not None:
            self._receiver.yield_to(init_info.run)
            self._receiver = None
        self._check_adapters(init_info)
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        joined = receiver.Receiver(asdict(init_info), self.device, rank)
        if self._adapters is not None:
            self._receiver = joined
            return
        missing = sorted(expected_names(self.model, self._tied, joined.names, self._quantizes) - set(joined.names))
        if missing and self._loads_checkpoint_names and parallel.pipeline_parallel_size == 1:
            joined.close()
            raise ValueError(
                f"the trainer's plan lacks {len(missing)} weights of the served model: {missing[:8]}. Serve the "
                "folder that the trainer's [model] hf_assets_path names."
            )
        self._receiver = joined
        if self._direct is None or self._direct.buckets != joined.buckets:
            self._direct = DirectLoading(
                self.model,
                joined.buckets,
                self.model.load_weights,
                self.device,
                excluded=self._tied_names(),
                refused=self._not_direct(),
                say=logger.info,
            )

    def _check_adapters(self, init_info: InitInfo) -> None:
        """Whether the server has a place for what this trainer sends, and the base that its adapters belong to.

        Raises:
            ValueError: It has not. The message begins with ADAPTERS.
        """
        sent, served = init_info.adapter, self._adapters
        if sent is None and served is None:
            return
        if sent is None:
            raise ValueError(
                f"{ADAPTERS} this server was started with --enable-lora and takes adapters, and the trainer sends all "
                "weights: set [lora] enable = true, or start the server without that flag"
            )
        if served is None:
            raise ValueError(
                f"{ADAPTERS} the trainer sends adapters, and this server has no place for them: start it with "
                f"--enable-lora --max-loras 1 --max-lora-rank {sent['rank']}, or vLLM's next greater size"
            )
        info = AdapterInfo(**sent)
        names = [entry[0] for bucket in init_info.plan for entry in bucket]
        served.check(info, names, self.parallel_config.pipeline_parallel_size == 1)
        info.check_base(Path(self.model_config.model).name, self._fingerprints)

    def _fingerprints(self) -> dict[str, str]:
        """Of the base. They are computed once."""
        if self._base is None:
            self._base = base_fingerprints(self.vllm_config, self.model, self.device)
        return self._base

    def start_weight_update(self) -> None:
        """Prepare the model. An update that failed before is undone first: vLLM would go on with it.

        vLLM keeps the tensors of a layer until the layer has all of them. Those of a failed update would count for this
        one, and a shape that does not fit would fail every later update.
        """
        if self._adapters is not None:
            return
        with self._vllm_config():
            unfinished = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
            for info in unfinished:
                info.loaded_weights.clear()
                info.load_numel = 0
            if unfinished:
                self._finish_layerwise()  # layers that got nothing have their last weights again
            if self._direct is None or not self._direct.begin():
                initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._receiver is not None and self._adapters is not None:
            self._receive_adapters(self._receiver, self._adapters, update_info)
            return
        if self._receiver is None or self._direct is None:
            raise RuntimeError("no trainer has connected: /init_weight_transfer_engine comes first")
        direct = self._direct
        loaded: set[str] = set()

        def load(bucket: Bucket, wire: torch.Tensor) -> None:
            loaded.update(direct.load(bucket, wire) or ())

        def complete() -> None:
            if direct.active:
                if not direct.complete:
                    raise RuntimeError("some buckets of the update were not loaded")
                return
            missing = sorted(self._own_names() - {loaded_name(name) for name in loaded})
            if missing and self._loads_checkpoint_names:
                raise RuntimeError(f"{len(missing)} weights of the served model got nothing: {missing[:8]}")

        with self._vllm_config():
            self._receiver.receive_buckets(asdict(update_info), load, complete, copies=direct.active)

    def _receive_adapters(self, link: receiver.Receiver, served: ServedAdapters, update_info: UpdateInfo) -> None:
        """The last version stays in service until all of the new one is here."""
        info, tensors = AdapterInfo(**(link.info.adapter or {})), dict[str, torch.Tensor]()
        with self._vllm_config():
            link.receive(asdict(update_info), tensors.update, lambda: served.serve(info, tensors))

    def finish_weight_update(self) -> None:
        if self._adapters is not None:
            return
        with self._vllm_config():
            if self._direct is None:
                self._finish_layerwise()
            else:
                self._direct.finish(self._finish_layerwise)

    def _finish_layerwise(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # CUDA graphs have the addresses of Marlin's, which it leaves zero. A reload makes new ones, and frees these
        # (vLLM 0.25; in 0.32 all layers share one). Sleep loses what they hold.
        for layer, workspace in self._workspaces:
            layer.workspace = workspace.zero_()
        if self.device.type == "cpu":
            self._repack_output()
            self._repack_experts()

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.25 declares this abstract. Our trainer sends without vLLM."""
        raise NotImplementedError("weights are sent by torchtitan.grpo.weight_sync.sync.WeightSync")

    @property
    def _quantizes(self) -> bool:
        """Whether vLLM quantizes the weights that it loads (`online`)."""
        quantization = self.vllm_config.quant_config
        return quantization is not None and quantization.get_name() == "online"

    @property
    def _loads_checkpoint_names(self) -> bool:
        """Whether vLLM gets the weights of an unquantized checkpoint, even if it then quantizes them."""
        return self.vllm_config.quant_config is None or self._quantizes

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def _own_names(self) -> set[str]:
        """vLLM's names of this worker's weights."""
        own = (name for name, _ in self.model.named_parameters())
        names = (name for name in own if not (self._quantizes and _is_scale(name)))
        return {loaded_name(name) for name in names} - self._tied_names()

    def _tied_names(self) -> set[str]:
        """Parameters of an output layer that is tied to the embedding, and so is not sent."""
        names = (name for name, _ in self.model.named_parameters() if name.startswith("lm_head."))
        return set(names) if self._tied else set()

    def _not_direct(self) -> str:
        """Why direct loading must not be used; empty if it may be."""
        if self.model_config.quantization is not None:
            return f"quantization is {self.model_config.quantization}"
        if getattr(self.parallel_config, "enable_eplb", False):
            return "expert load balancing moves experts between places"
        return ""

    def _repack_output(self) -> None:
        # On CPU a tied output layer keeps a packed copy of the embedding that no reload rebuilds (vLLM 0.32).
        for module in self.model.modules():
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)

    def _repack_experts(self) -> None:
        # On CPU the kernel of experts reads packed weights. vLLM packs them at the first load alone (0.32), and leaves
        # what it reloads as it came: answers would be noise. They are packed in place, where compiled code finds them.
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is None:
                continue
            places = {name: getattr(module, name) for name in _EXPERTS}
            kernel.fused_experts.process_weights_after_loading(module)
            for name, place in places.items():
                place.data.copy_(getattr(module, name).data)
                setattr(module, name, place)

    def _vllm_config(self) -> AbstractContextManager:
        # Some quantisation methods read it. vLLM 0.32 sets it around these calls, 0.25 does not.
        return set_current_vllm_config(self.vllm_config)
