"""`config.json` and model arguments: the same shape in two vocabularies.

What torchtitan 0.2.2 would compute differently is never ignored: transformers computes such a model, or it is refused
by name.
"""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.grpo.model.families import FAMILIES, GENERAL, MODEL_TYPES, ModelArgs, Unsupported, get_family
from torchtitan.tools.logging import logger

LANGUAGE_MODEL = "model.language_model."
"""Where transformers has the language model of a model with other parts."""


def from_folder(folder: Path, implementation: str = "auto") -> tuple[str, ModelArgs, dict[str, Any]]:
    """Read the model that `folder`/config.json describes, or its language model if it has other parts.

    Args:
        implementation: `[model] implementation`.

    Returns its family's name, its arguments, and the content of config.json with `architectures` and
    `tie_word_embeddings` filled in.

    Raises:
        UserError: The file is missing or broken, or describes what does not train here.
    """
    where = str(folder / "config.json")
    raw = read_json(folder / "config.json")
    if has_other_parts(raw):
        raw, config = _language_model(raw, where)
    else:
        config = _config(raw, _architecture(raw), where)
    (architecture,) = config.architectures
    own = next((name for name, architectures in FAMILIES.items() if architecture in architectures), None)
    if implementation == "torchtitan" and own is None:
        raise UserError(
            f'{where}: [model] implementation = "torchtitan" has {", ".join(MODEL_TYPES)}, and not "{architecture}": '
            'set it to "auto"'
        )
    name = GENERAL if own is None or implementation == "transformers" else own
    try:
        try:
            args = _args(name, raw, config, where)
        except Unsupported as error:
            dense = name != GENERAL and get_family(name).apply_expert_parallel is None
            if implementation != "auto" or not dense or error.everywhere:
                raise
            args, name = _args(GENERAL, raw, config, where), GENERAL
            logger.info(f"The model is computed by transformers, since torchtitan's has not what it needs: {error}")
    except Unsupported as error:
        raise UserError(f"{where}: {error}. Choose another [model] hf_assets_path") from error
    return name, args, raw | {"architectures": [architecture], "tie_word_embeddings": args.enable_weight_tying}


def _args(name: str, raw: dict[str, Any], config: PreTrainedConfig, where: str) -> ModelArgs:
    """The arguments of a family; raises `Unsupported`."""
    if raw.get("quantization_config"):
        raise Unsupported("quantization_config", raw["quantization_config"], "training needs float weights")
    family = get_family(name)
    if name != GENERAL:
        if getattr(config, "head_dim", None) is None:
            config = copy.copy(config)
            config.head_dim = config.hidden_size // max(config.num_attention_heads, 1)
        _refuse_unsupported(raw, config, family.rope_types, where)
    return family.args_from_hf(config)


def _config(raw: dict[str, Any], architecture: str, where: str) -> PreTrainedConfig:
    """transformers' config of an architecture.

    Raises:
        UserError: transformers has no causal language model of this name, or the file is not valid.
    """
    known = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()} | MODEL_TYPES
    model_type = known.get(architecture)
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(raw.get("model_type"))) == architecture:
        model_type = raw["model_type"]  # several types may have one class
    if model_type is None:
        own_code = ", whose code in the folder is not run" if raw.get("auto_map") else ""
        raise UserError(
            f'{where}: transformers {transformers.__version__} has no causal language model "{architecture}"'
            f"{own_code}{did_you_mean(architecture, known)}. [model] hf_assets_path must hold a model of a class that "
            "it has, such as " + ", ".join(MODEL_TYPES)
        )
    meant = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(raw.get("model_type")), architecture)
    if meant != architecture:
        raise UserError(
            f'{where}: "architectures" names {architecture}, and "model_type" = "{raw["model_type"]}" means {meant}, '
            "which servers would take: download the file again"
        )
    config = _valid(model_type, where)
    config.architectures = [architecture]
    return config


def _valid(model_type: str, where: str) -> PreTrainedConfig:
    config_cls = CONFIG_MAPPING[model_type]
    try:
        return config_cls.from_json_file(where)
    except Exception as error:  # the class's own code raises anything
        raise UserError(f"{where} is not a valid {config_cls.__name__}: {error}") from error


def has_other_parts(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of a model that sees or hears, whose language model is a class of its own."""
    text = raw.get("text_config")
    is_class = isinstance(text, dict) and str(text.get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return is_class and str(raw.get("model_type")) in CONFIG_MAPPING


def _language_model(raw: dict[str, Any], where: str) -> tuple[dict[str, Any], PreTrainedConfig]:
    """config.json and config of the language model alone."""
    whole = _valid(raw["model_type"], where)
    config = copy.copy(whole.text_config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.tie_word_embeddings = bool(whole.tie_word_embeddings)  # some files say null
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
    return {key: raw[key] for key in kept if key in raw} | raw["text_config"], config


def served_positions(raw: Mapping[str, Any], positions: int) -> int:
    """How many tokens a server of this config.json takes, whose model has so many `positions`; 0 if a server may scale
    them."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    return 0 if re.search("linear|dynamic|yarn", str(rope)) else positions


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file of the model folder; UserError if folder or file is missing, broken or shut."""
    try:
        _check_file(path)
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f'[model] hf_assets_path = "{path.parent}": {path.name} cannot be read ({error})') from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}: download it again")
    return content


def _check_file(path: Path) -> None:
    if path.parent.is_file():
        raise UserError(f'[model] hf_assets_path = "{path.parent}" is a file: give the folder that holds it')
    if not path.parent.is_dir():
        raise UserError(
            f'[model] hf_assets_path = "{path.parent}": no such folder. Point it at a Hugging Face model folder '
            "(config.json, tokenizer.json, *.safetensors), or name it by its id on the hub, as in Qwen/Qwen3-0.6B"
        )
    if not path.is_file():
        what = adapters_alone(path.parent) or "download the whole model folder"
        raise UserError(f'[model] hf_assets_path = "{path.parent}" has no {path.name}: {what}')


def adapters_alone(folder: Path) -> str:
    """What to do about a folder, or a checkpoint, of LoRA adapters without their base; "" for others."""
    if not any((folder / part / "adapter_config.json").is_file() for part in (".", "adapter")):
        return ""
    return "it holds LoRA adapters without their base; merge them (docs/lora.md), or export with [lora] merge = true"


def model_folder(path: Path) -> Path:
    """The Hugging Face folder of a checkpoint, or `path` itself if it is one.

    Raises:
        UserError: It is neither.
    """
    for folder in (path / "hf", path):
        if (folder / "config.json").is_file():
            return folder
    what = adapters_alone(path) or (
        "give a checkpoint of a run with [checkpoint] export_dtype, or a folder with config.json, weights and tokenizer"
    )
    raise UserError(f"{path} is no Hugging Face folder, and holds none as hf/: {what}")


def _architecture(raw: dict[str, Any]) -> str:
    """The class that `raw` names by `architectures`, or else by `model_type`."""
    architectures = raw.get("architectures")
    if architectures:
        return str(architectures[0]) if isinstance(architectures, list) else str(architectures)
    model_type = str(raw.get("model_type"))
    by_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {kind: name for name, kind in MODEL_TYPES.items()}
    return str(by_type.get(model_type, f"model_type {raw.get('model_type')!r}"))


def _refuse_unsupported(raw: dict[str, Any], config: PreTrainedConfig, rope_types: tuple[str, ...], where: str) -> None:
    # transformers' config knows whether the window is used, and Mistral's has one where config.json names none. vLLM
    # honours the key for families that have no such attribute, too.
    window = getattr(config, "sliding_window", None)
    if "use_sliding_window" not in raw:
        window = window or raw.get("sliding_window")
    if window or raw.get("use_sliding_window"):
        why = 'attention here reaches over the whole document (config.json must say "sliding_window": null)'
        raise Unsupported("sliding_window", window, why)
    if any(kind != "full_attention" for kind in raw.get("layer_types") or []):
        raise Unsupported("layer_types", sorted(set(raw["layer_types"])), "only full_attention layers train here")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, False):
            raise Unsupported(field, True, "torchtitan's linear layers have no bias")
    if config.hidden_act != "silu":
        raise Unsupported("hidden_act", config.hidden_act, "torchtitan's feed-forward uses silu")
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size)
    if min(heads, kv_heads, head_dim, *sizes) < 1:
        raise UserError(f"{where}: sizes and counts must be 1 or more")
    if heads % kv_heads:
        raise Unsupported("num_key_value_heads", kv_heads, f"it must divide num_attention_heads = {heads}")
    if head_dim % 2:
        raise Unsupported("head_dim", head_dim, "rotary embeddings need an even head_dim")
    rope = config.rope_parameters
    if rope["rope_type"] not in rope_types:
        raise Unsupported("rope_type", rope["rope_type"], f"this family trains with {' or '.join(rope_types)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        why = "rotary embeddings here cover the whole head"
        raise Unsupported("partial_rotary_factor", rope["partial_rotary_factor"], why)
