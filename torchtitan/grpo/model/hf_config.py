"""`config.json` and torchtitan's model arguments: the same shape in two vocabularies.

Everything that torchtitan 0.2.2 would compute differently is refused by name, never ignored.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

ModelArgs = Qwen3ModelArgs | TransformerModelArgs
FAMILIES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama3"}
FLAVORS: dict[str, dict[str, ModelArgs]] = {"qwen3": qwen3_args, "llama3": llama3_args}
CONFIGS: dict[str, type[PreTrainedConfig]] = {"qwen3": Qwen3Config, "llama3": LlamaConfig}

# A wavelength is at most 2 pi theta: with this original length none is long enough to be scaled.
_UNSCALED_ROPE = RoPEScalingArgs(scaling_factor=1.0, original_max_position_embeddings=1 << 60)


def from_folder(folder: Path) -> tuple[str, ModelArgs, dict[str, Any]]:
    raw = read_json(folder / "config.json")
    where = f"{folder / 'config.json'}"
    family = _family(raw, where)
    try:
        config = CONFIGS[family].from_dict(raw)
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where} is not a valid {CONFIGS[family].__name__}: {error}") from error
    _refuse_unsupported(raw, config, family, where)
    args = _qwen3_args(config) if family == "qwen3" else _llama3_args(config)
    architecture = next(name for name, known in FAMILIES.items() if known == family)
    tied = bool(config.tie_word_embeddings)
    return family, args, raw | {"architectures": [architecture], "tie_word_embeddings": tied}


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file of the model folder; UserError if folder or file is missing or broken."""
    if not path.parent.is_dir():
        raise UserError(
            f'[model] hf_assets_path = "{path.parent}": no such folder. Point it at a Hugging Face model folder '
            "(config.json, tokenizer.json, *.safetensors), e.g. from `hf download Qwen/Qwen3-0.6B --local-dir ...`"
        )
    if not path.is_file():
        raise UserError(f'[model] hf_assets_path = "{path.parent}" has no {path.name}: download the whole model folder')
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}: download it again")
    return content


def _family(raw: dict[str, Any], where: str) -> str:
    architectures = raw.get("architectures")
    if architectures:
        architecture = str(architectures[0]) if isinstance(architectures, list) else str(architectures)
    else:
        by_type = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
        architecture = by_type.get(str(raw.get("model_type")), f"model_type {raw.get('model_type')!r}")
    if "Moe" in architecture or "Mixtral" in architecture or raw.get("num_experts") or raw.get("num_local_experts"):
        raise UserError(f"{where}: {architecture} is a mixture of experts: choose a dense Qwen3 or Llama")
    if architecture not in FAMILIES:
        raise UserError(
            f'{where}: architecture "{architecture}" is not supported. [model] hf_assets_path must hold one of: '
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


def _refuse_unsupported(raw: dict[str, Any], config: PreTrainedConfig, family: str, where: str) -> None:
    def refuse(field: str, value: object, why: str) -> None:
        raise UserError(f"{where}: {field} = {value!r} is not supported: {why}. Choose another [model] hf_assets_path")

    # The generic key counts for every family: vLLM honours it even where transformers has no such attribute.
    sliding = raw.get("use_sliding_window") or (raw.get("sliding_window") and "use_sliding_window" not in raw)
    if sliding:
        refuse("sliding_window", raw.get("sliding_window"), "attention here reaches over the whole document")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or []):
        refuse("layer_types", sorted(set(raw["layer_types"])), "only full_attention layers train here")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, False):
            refuse(field, True, "torchtitan's linear layers have no bias")
    if raw.get("quantization_config"):
        refuse("quantization_config", raw["quantization_config"], "training needs float weights")
    if config.hidden_act != "silu":
        refuse("hidden_act", config.hidden_act, "torchtitan's feed-forward uses silu")
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size)
    if min(heads, kv_heads, head_dim, *sizes) < 1:
        raise UserError(f"{where}: sizes and counts must be 1 or more")
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads = {heads}")
    if head_dim % 2:
        refuse("head_dim", head_dim, "rotary embeddings need an even head_dim")
    if family == "llama3" and head_dim * heads != config.hidden_size:
        refuse(
            "head_dim",
            head_dim,
            f"torchtitan's Llama needs hidden_size / num_attention_heads = {config.hidden_size / heads:g}",
        )
    rope = config.rope_parameters
    known = ("default", "llama3") if family == "llama3" else ("default",)
    if rope["rope_type"] not in known:
        refuse("rope_type", rope["rope_type"], f"this family trains with {' or '.join(known)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", rope["partial_rotary_factor"], "rotary embeddings here cover the whole head")


def _qwen3_args(config: PreTrainedConfig) -> Qwen3ModelArgs:
    return Qwen3ModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        hidden_dim=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        max_seq_len=config.max_position_embeddings,
        enable_weight_tying=bool(config.tie_word_embeddings),
    )


def _llama3_args(config: PreTrainedConfig) -> TransformerModelArgs:
    rope = config.rope_parameters
    scaling = _UNSCALED_ROPE
    if rope["rope_type"] == "llama3":
        scaling = RoPEScalingArgs(
            scaling_factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )
    return TransformerModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        # torchtitan rounds its own guess of the feed-forward width up to `multiple_of`: a guess of at most the
        # true width, rounded up to a multiple of it, is the true width, odd ones included.
        multiple_of=config.intermediate_size,
        ffn_dim_multiplier=config.intermediate_size / int(8 * config.hidden_size / 3),
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling_args=scaling,
        max_seq_len=config.max_position_embeddings,
    )


def from_flavor(name: str, flavor: str) -> tuple[str, ModelArgs, dict[str, Any]]:
    if name not in FLAVORS:
        raise UserError(
            f'[model] name = "{name}" is not known{did_you_mean(name, FLAVORS)}; choose from {", ".join(FLAVORS)}'
        )
    dense = [key for key, args in FLAVORS[name].items() if not getattr(args, "moe_enabled", False)]
    if flavor in FLAVORS[name] and flavor not in dense:
        raise UserError(f'[model] flavor = "{flavor}" is a mixture of experts: choose a dense one: {", ".join(dense)}')
    if flavor not in dense:
        raise UserError(
            f'[model] flavor = "{flavor}" is not a flavour of {name}{did_you_mean(flavor, dense)}; choose from '
            f"{', '.join(dense)}, or leave it empty: config.json in hf_assets_path then decides the shape"
        )
    args = FLAVORS[name][flavor]
    n_kv_heads = args.n_kv_heads or args.n_heads
    rope = {"rope_type": "default", "rope_theta": float(args.rope_theta)}
    if name == "llama3":
        args = dataclasses.replace(args, n_kv_heads=n_kv_heads)
        scaling = args.rope_scaling_args
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    hf_config = {
        "architectures": [next(architecture for architecture, family in FAMILIES.items() if family == name)],
        "model_type": CONFIGS[name].model_type,
        "hidden_size": args.dim,
        "intermediate_size": _hidden_dim(args),
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": _head_dim(args),
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": getattr(args, "enable_weight_tying", False),
        "hidden_act": "silu",
        "attention_bias": False,
    }
    return name, args, hf_config


def _head_dim(args: ModelArgs) -> int:
    return args.head_dim if isinstance(args, Qwen3ModelArgs) else args.dim // args.n_heads


def _hidden_dim(args: ModelArgs) -> int:
    """Width of the feed-forward layer; for Llama by torchtitan's rule, which is that of Meta's release."""
    if isinstance(args, Qwen3ModelArgs):
        return args.hidden_dim
    width = int(2 * 4 * args.dim / 3)
    if args.ffn_dim_multiplier is not None:
        width = int(args.ffn_dim_multiplier * width)
    return -(-width // args.multiple_of) * args.multiple_of


def agree(family: str, args: ModelArgs, folder: Path, key: str) -> tuple[ModelArgs, dict[str, Any]]:
    """Weights come from the folder: its config.json must describe the flavour, and replaces it (longer context)."""

    def shape(args: ModelArgs, tied: bool) -> dict[str, Any]:
        names = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta")
        rope = dataclasses.asdict(args.rope_scaling_args) if isinstance(args, TransformerModelArgs) else {}
        widths = {"head_dim": _head_dim(args), "hidden_dim": _hidden_dim(args), "tied": tied}
        return {name: getattr(args, name) for name in names} | widths | rope

    folder_family, folder_args, folder_config = from_folder(folder)
    if folder_family != family:
        raise UserError(f'{key} is a {family}, but {folder} holds a {folder_family}: set [model] flavor = ""')
    wanted = shape(args, getattr(args, "enable_weight_tying", False))
    found = shape(folder_args, folder_config["tie_word_embeddings"])
    differing = [f"{name} {wanted[name]} != {found[name]}" for name in wanted if wanted[name] != found[name]]
    if differing:
        raise UserError(
            f"{key} and {folder / 'config.json'} differ: {'; '.join(differing)}. "
            'Set [model] flavor = "" to take the folder\'s shape'
        )
    return folder_args, folder_config
