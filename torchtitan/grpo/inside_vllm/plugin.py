"""A weight-transfer engine for vLLM 0.25 to 0.32, named `torchtitan_grpo`.

vLLM loads `register` through the `vllm.general_plugins` entry point in its API server, engine core and workers; the
server is started with `--weight-transfer-config '{"backend": "torchtitan_grpo"}'`. vLLM's layer-wise reload does the
rest: fusing, tensor-parallel slicing, quantisation, and a copy into the storage that CUDA graphs already use. Where
that comes down to copies, `direct_load` does them itself from the second update on.
"""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from torchtitan.grpo.inside_vllm import bundled_outputs, flat_logprobs, token_versions
from torchtitan.grpo.inside_vllm.backend import BACKEND
from torchtitan.grpo.inside_vllm.direct_load import DirectLoading
from torchtitan.grpo.inside_vllm.replies import in_api_server
from torchtitan.grpo.weight_wire import receiver
from torchtitan.grpo.weight_wire.buckets import Bucket

logger = init_logger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log


@dataclass
class InitInfo(receiver.InitInfo, WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(receiver.UpdateInfo, WeightTransferUpdateInfo):
    pass


def expected_names(model: torch.nn.Module, tied: bool) -> set[str]:
    """Hugging Face names of the weights that the model is made of.

    vLLM fuses checkpoint tensors (q, k and v into one); `packed_modules_mapping` says which. Its reload only warns when
    a layer got nothing and says nothing when it got a part, so that names are what has to be counted.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    names = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        if tied and name.startswith("lm_head."):
            continue
        *path, module, kind = name.split(".")
        parts = fused.get(module, [module])
        names.update(".".join([*path, part, kind]) for part in parts)
    return names


class TorchtitanGrpoEngine(WeightTransferEngine):
    """One worker's end of an update; the protocol is `receiver`'s."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _receiver: receiver.Receiver | None = None
    _direct: DirectLoading | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group. A trainer that connects again, after a failure or a restart, replaces the last."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        joined = receiver.Receiver(asdict(init_info), self.device, rank)
        missing = sorted(expected_names(self.model, self._tied) - set(joined.names))
        if missing and self.model_config.quantization is None and parallel.pipeline_parallel_size == 1:
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

    def start_weight_update(self) -> None:
        with self._vllm_config():
            if self._direct is None or not self._direct.begin():
                initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
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
            missing = sorted(self._own_names() - loaded)
            if missing and self.model_config.quantization is None:
                raise RuntimeError(f"{len(missing)} weights of the served model got nothing: {missing[:8]}")

        with self._vllm_config():
            self._receiver.receive_buckets(asdict(update_info), load, complete)

    def finish_weight_update(self) -> None:
        with self._vllm_config():
            if self._direct is None:
                self._finish_layerwise()
            else:
                self._direct.finish(self._finish_layerwise)

    def _finish_layerwise(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_output()

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @staticmethod
    def trainer_send_weights(iterator, trainer_args) -> None:
        """vLLM 0.25 declares this abstract; our trainer sends without vLLM."""
        raise NotImplementedError("weights are sent by torchtitan.grpo.weight_sync.sync.WeightSync")

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def _own_names(self) -> set[str]:
        """vLLM's names of this worker's weights."""
        return {name for name, _ in self.model.named_parameters()} - self._tied_names()

    def _tied_names(self) -> set[str]:
        """The output layer's, where it is the embedding and not sent."""
        names = (name for name, _ in self.model.named_parameters() if name.startswith("lm_head."))
        return set(names) if self._tied else set()

    def _not_direct(self) -> str:
        """Why direct loading is not tried, or nothing."""
        if self.model_config.quantization is not None:
            return f"quantization is {self.model_config.quantization}"
        if getattr(self.parallel_config, "enable_eplb", False):
            return "expert load balancing moves experts between places"
        return ""

    def _repack_output(self) -> None:
        # On CPU a tied output layer keeps its own packed copy of the embedding, which no reload rebuilds (vLLM 0.32).
        for module in self.model.modules():
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)

    def _vllm_config(self) -> AbstractContextManager:
        # vLLM 0.32 sets it around these calls, 0.25 does not, and some quantisation methods read it.
        return set_current_vllm_config(self.vllm_config)


def register() -> None:
    """Entry point; vLLM may call it more than once in a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TorchtitanGrpoEngine)
    bundled_outputs.install()  # in the API server too: where the engine's process is forked, it is not asked again
    if in_api_server():
        flat_logprobs.install()
        if not token_versions.reported_by_vllm():
            token_versions.install()
