"""The embedded server's model: built from a Hugging Face folder, updated in place."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtitan.grpo.engines.embedded.adapters import base_parameters, fit_adapters, remove_adapters
from torchtitan.grpo.engines.stop_strings import Decode
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.families import MODEL_TYPES, logit_rule
from torchtitan.grpo.model.logprobs import product
from torchtitan.grpo.weight_wire.adapters import AdapterInfo


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model that `folder`/config.json describes.

    Weights are those of the folder's safetensors. Without such files they are random (seed 0) until the first update.

    Raises:
        UserError: The folder has no config.json, or its model has no cache of keys and values in every layer, or is a
            mixture of experts of another family than `families.FAMILIES`.
    """
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json: --model must be a Hugging Face model folder")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    unfit = UserError(
        f"{folder}: the embedded server runs dense language models with attention in each layer, and "
        f"{', '.join(dict.fromkeys(MODEL_TYPES.values()))}, not {config.model_type!r}; "
        '[rollout] engine = "vllm" serves more'
    )
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kinds - {"full_attention", "sliding_attention"}:
        raise unfit
    # SDPA leaves a softcap of scores out.
    how = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    if any(folder.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **how)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **how)
    has_experts = any("expert" in name for name, _ in model.named_parameters())
    if not model._supports_attention_backend or (has_experts and config.model_type not in MODEL_TYPES.values()):
        raise unfit
    return model.to(device).eval().requires_grad_(False)


def logits_of(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The output layer's float32 logits of states [..., D], which the model's own forward rounds to its dtype."""
    scale, softcap = logit_rule(model.config)
    output = model.get_output_embeddings()
    logits = product(hidden.flatten(0, -2), output.weight.T, torch.float32).unflatten(0, hidden.shape[:-1])
    if output.bias is not None:
        logits = logits + output.bias
    if scale != 1:  # most have none: a pass over the vocabulary less
        logits = logits * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """The end tokens of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def load_decode(folder: Path) -> Decode | None:
    """Token ids -> text without special tokens, by the folder's tokenizer.json; None if there is none."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).decode if path.exists() else None


class ModelUpdate:
    """One weight update of a model, in place: call `load` for each bucket, then `check_complete`.

    It begins with making place for what comes: adapters as the trainer has them, or none.

    Args:
        adapter: If adapters are updated: how they apply.
        names: What an update holds.
    """

    def __init__(self, model: PreTrainedModel, adapter: AdapterInfo | None = None, names: Sequence[str] = ()) -> None:
        self._targets: dict[str, torch.Tensor] = {}
        if adapter is not None:
            self._targets |= fit_adapters(model, adapter, names)
            self._missing = set(self._targets)
            return
        remove_adapters(model)
        self._targets |= base_parameters(model)  # of two names of a tied embedding, either one fills it
        self._missing = set(base_parameters(model, twice=False))

    @torch.no_grad()
    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copy (Hugging Face name, tensor) pairs into the model, cast to its dtype.

        Raises:
            ValueError: A name or shape that the model does not have.
        """
        for name, tensor in tensors:
            target = self._targets.get(name)
            if target is None:
                raise ValueError(f"the served model has no parameter {name!r}")
            if target.shape != tensor.shape:
                raise ValueError(f"{name}: the served model has {tuple(target.shape)}, sent {tuple(tensor.shape)}")
            target.copy_(tensor)
            self._missing.discard(name)

    def check_complete(self) -> None:
        """Raise ValueError if any parameter was not sent."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:5])
            raise ValueError(f"{len(self._missing)} parameters were never sent: {some}")
