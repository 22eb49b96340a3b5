"""Which model is trained, and how its weights go in and out.

A folder's `config.json` names the family and the shape, so any size of a supported family trains without an entry
of its own. Weights are safetensors under Hugging Face's names.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.errors import UserError, UserErrorOfAllRanks
from torchtitan.grpo.model.families import MODEL_TYPES, Family, ModelArgs, get_family, uses_of
from torchtitan.grpo.model.finite import bad_weights
from torchtitan.grpo.model.hf_config import from_folder, has_other_parts, read_json, served_positions
from torchtitan.grpo.model.lora import A, B, Lora, is_adapter, merged, resolve_lora
from torchtitan.grpo.model.mlp_chunks import chunk_mlps
from torchtitan.grpo.model.replay import route_shape
from torchtitan.grpo.model.shards import fill, whole
from torchtitan.grpo.model.tied_embedding import TiedEmbedding
from torchtitan.grpo.model.weight_files import check_headers, has_weights, not_finite, weight_files
from torchtitan.grpo.weight_wire.model_identity import ModelIdentity, identity
from torchtitan.tools.logging import logger


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """What to build and how its weights are named outside.

    Attributes:
        name: The family's, of `families.FAMILIES`.
        family: How such a model is built, sharded and compiled.
        model_args: Its arguments; `max_seq_len` is the run's, the length of the RoPE table.
        adapter: State-dict adapter between torchtitan's names and Hugging Face's; takes partial state dicts.
        hf_config: Content of a `config.json` that describes the model to transformers and to servers.
        folder: `model.hf_assets_path`.
        lora: The adapters that are trained; None: all weights are.
        routes: With routing replay: the shape of a sampler's routes.
        positions: The longest document that a server of the model takes, in tokens; 0 if it may scale them itself.
        is_part: The folder's model has other parts, and this is its language model.
    """

    name: str
    family: Family
    model_args: ModelArgs
    adapter: TiedEmbedding
    hf_config: dict[str, Any]
    folder: Path
    lora: Lora | None = None
    routes: RouteShape | None = None
    positions: int = 0
    is_part: bool = False

    @property
    def identity(self) -> ModelIdentity:
        """What a server must serve, too."""
        return identity(str(self.folder), self.hf_config)

    @property
    def tied(self) -> bool:
        """Embedding and output are one parameter."""
        return self.model_args.enable_weight_tying

    @property
    def has_experts(self) -> bool:
        """It is a mixture of experts."""
        return self.family.apply_expert_parallel is not None

    @property
    def pad_token(self) -> int | None:
        """`pad_token_id` of config.json if the vocabulary has it. Negative ones count from the end, as in PyTorch."""
        token, size = self.hf_config.get("pad_token_id"), self.model_args.vocab_size
        return token % size if token is not None and -size <= token < size else None

    def build(self) -> nn.Module:
        """The model on torch's current default device, its weights not initialised.

        As in transformers, looking up the pad token does not train its embedding. As an output it is trained.
        """
        model = self.family.model_cls(self.model_args)
        model.tok_embeddings.padding_idx = self.pad_token
        return model


def resolve_model(model_cfg: Any, seq_len: int, lora_cfg: Any = None) -> ModelSource:
    """Find the model that `[model]` names.

    Args:
        model_cfg: The `[model]` section. Family and shape are those of `config.json` in `hf_assets_path`.
        seq_len: `[training] seq_len`, the longest document in tokens.
        lora_cfg: The `[lora]` section; None is as `enable = false`.

    Raises:
        UserError: The folder or its config is missing, broken or not supported. Or `seq_len` is over the model's
            maximum, or the model lacks a layer that `[lora]` names.
    """
    folder = Path(model_cfg.hf_assets_path)
    name, args, hf_config = from_folder(folder, getattr(model_cfg, "implementation", "auto"))
    if seq_len > args.max_seq_len:
        raise UserError(
            f"[training] seq_len = {seq_len} is over this model's maximum of {args.max_seq_len} tokens: lower seq_len"
        )
    family, positions = get_family(name), served_positions(hf_config, args.max_seq_len)
    args = dataclasses.replace(args, max_seq_len=seq_len, **family.of_packed_rows)
    adapter, lora = family.adapter_cls(args, None), None
    if lora_cfg is not None and lora_cfg.enable:
        if uses_of(args).by_document:
            raise UserError(
                f"[lora] enable = true: {hf_config['architectures'][0]} has layers that run along a document "
                "(convolutions, recurrent states), and adapters of those are not built. Set [lora] enable = false"
            )
        with torch.device("meta"):
            one_block = next(family.model_cls(dataclasses.replace(args, n_layers=1)).layers.children())
        lora = resolve_lora(lora_cfg, adapter, one_block)
    is_part = has_other_parts(read_json(folder / "config.json"))
    return ModelSource(name, family, args, adapter, hf_config, folder, lora, positions=positions, is_part=is_part)


def resolve_for_run(config: Any) -> ModelSource:
    """`resolve_model`, and what is refused of `[model]` beside the folder's files."""
    source = resolve_model(config.model, config.training.seq_len, config.lora)
    if source.folder.resolve() == Path(config.job.dump_folder).resolve():
        raise UserError(
            f'[job] dump_folder = "{config.job.dump_folder}" is the model\'s folder ([model] hf_assets_path): name '
            "another one for what the run writes"
        )
    if config.model.weights == "random" and has_weights(source.folder):
        logger.warning(f'The weights in {source.folder} are not loaded: [model] weights = "random"')
    return source


def resolve_and_check(config: Any) -> ModelSource:
    """`resolve_for_run`, and what is checked before anything is started: parallelism, and the folder's weights with
    `[model] weights = "hf"`."""
    source = resolve_for_run(config)
    check_model(source, config, torch.cuda.is_available())
    if config.grpo.routing_replay:
        source = dataclasses.replace(source, routes=route_shape(source.model_args))
    if config.model.weights == "hf":
        check_hf_weights(source)
    return source


def check_model(source: ModelSource, config: Any, cuda: bool) -> None:
    """Raises a UserError if the configuration asks for what this model or its kernels cannot do.

    Args:
        cuda: The run computes on GPUs.
    """
    check_degrees(source, config.parallelism)
    check_chunks(source, config)
    if config.grpo.routing_replay:
        route_shape(source.model_args)
    computed = config.training.mixed_precision_param
    if source.has_experts and config.compile.enable and computed == "float32":
        raise UserError(
            "[compile] enable = true: a mixture of experts compiles in bfloat16 only. Set [training] "
            'mixed_precision_param = "bfloat16"'
        )
    beyond_kernels = uses_of(source.model_args).beyond_kernels
    if beyond_kernels and cuda and computed != "float32":
        raise UserError(
            f'[training] mixed_precision_param = "{computed}": this model has {beyond_kernels}, and no attention '
            'kernel here computes that on a GPU. "float32" does without kernels, and is slow and takes memory for the '
            "square of a document's length"
        )


def check_chunks(source: ModelSource, config: Any) -> None:
    """Raises a UserError if `[activation_checkpoint] mlp_chunk_tokens` is not for this model or its parallelism."""
    if tokens := config.activation_checkpoint.mlp_chunk_tokens:
        if (degree := config.parallelism.tensor_parallel_degree) > 1:
            raise UserError(
                f"[activation_checkpoint] mlp_chunk_tokens = {tokens}: [parallelism] tensor_parallel_degree = {degree} "
                "splits the same layers by width, and their sums by tokens. Leave one of them out"
            )
        with torch.device("meta"):
            chunk_mlps(source.build().layers.children(), tokens)


def check_degrees(source: ModelSource, parallelism: Any) -> None:
    """Check that the degrees of `[parallelism]` split this model.

    Raises:
        UserError: One does not divide what it splits, or there is nothing to split.
    """
    args: Any = source.model_args
    tensor, expert = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    heads = {"attention heads": args.n_heads, "key/value heads": args.n_kv_heads}
    if source.has_experts:
        if tensor > 1:
            raise UserError(
                f"[parallelism] tensor_parallel_degree = {tensor}: a mixture of experts is not split that way here. "
                "Set it to 1, and expert_parallel_degree if a rank cannot gather all experts of a layer"
            )
        widths = {"experts": (args.moe_args.num_experts, expert)}
    else:
        if tensor > 1 and source.family.apply_tensor_parallel is None:
            raise UserError(
                f"[parallelism] tensor_parallel_degree = {tensor}: a model that is built by transformers is not split "
                "that way. Set it to 1, or choose a model of " + ", ".join(MODEL_TYPES)
            )
        if expert > 1:
            raise UserError(
                f"[parallelism] expert_parallel_degree = {expert}: a {source.name} has no experts. Set it to 1"
            )
        widths = {name: (width, tensor) for name, width in (heads | {"feed-forward width": args.hidden_dim}).items()}
    context = parallelism.context_parallel_degree
    if context > 1:
        _check_context(source, context)
    uneven = [f"{width} {name}" for name, (width, degree) in widths.items() if width % degree]
    if uneven:
        key = f"expert_parallel_degree = {expert}" if source.has_experts else f"tensor_parallel_degree = {tensor}"
        raise UserError(
            f"[parallelism] {key} does not divide this model's {' and '.join(uneven)}: choose a degree that does"
        )


def _check_context(source: ModelSource, degree: int) -> None:
    args: Any = source.model_args
    start = f"[parallelism] context_parallel_degree = {degree}"
    if source.has_experts:
        raise UserError(f"{start}: rows of a mixture of experts are not split. Set it to 1")
    if uses_of(args).by_document:
        raise UserError(f"{start}: this model has layers that run along a document as a whole. Set it to 1")
    heads, kv_heads = args.n_heads, args.n_kv_heads
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        raise UserError(
            f"{start} does not divide this model's {heads} attention heads and {kv_heads} key/value heads, which are "
            "repeated where they are fewer: choose a degree that does"
        )


def load_hf_weights(model: nn.Module, source: ModelSource, folder: str | Path) -> None:
    """Fill `model` from the safetensors files in `folder`, except adapters. Call on every rank, after the model is
    materialised.

    Each rank maps the files and copies its own shard, for any FSDP2 and tensor-parallel placement. Nothing is
    gathered or sent. Values are cast to the parameters' dtype.

    Raises:
        UserError: There are no weights, a file is missing or broken, or names, shapes or dtypes do not fit the model.
            On every rank: a weight is infinite or NaN.
    """
    folder = Path(folder)
    parameters = {name: value for name, value in get_model_state_dict(model).items() if not is_adapter(name)}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise RuntimeError("load_hf_weights needs a materialised model: call to_empty and init_weights first")
    expected = _expected(source, parameters)
    files = weight_files(folder)
    check_headers(files, expected, source.tied, folder)
    with torch.no_grad():
        for each in files:
            with each as file:
                for hf_name in file.names:
                    if hf_name not in expected:
                        continue
                    row = source.adapter.expert(hf_name)
                    for name, value in source.adapter.from_hf({hf_name: file.get_tensor(hf_name)}).items():
                        fill(parameters[name], value, row)
    if bad_weights(parameters) is not None:
        bad = not_finite(files, expected, next(iter(parameters.values())).dtype)
        raise UserErrorOfAllRanks(
            f"[model] hf_assets_path: the weights in {folder} hold NaN or infinity and cannot be trained: "
            f"{bad}. Download or export them again"
        )


def check_hf_weights(source: ModelSource) -> None:
    """Check the safetensors files of `source.folder` by their headers and sizes, before anything is built or started.

    Raises:
        UserError: As `load_hf_weights`. All files that are missing or broken are named.
    """
    with torch.device("meta"):
        expected = _expected(source, get_model_state_dict(source.build()))
    check_headers(weight_files(source.folder), expected, source.tied, source.folder)


def _expected(source: ModelSource, parameters: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the model is made of, by Hugging Face name."""
    on_meta = {name: torch.empty(parameter.shape, device="meta") for name, parameter in parameters.items()}
    return {name: tuple(value.shape) for name, value in source.adapter.to_hf(on_meta).items()}


def write_hf_config(source: ModelSource, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write config.json, generation_config.json (if the model's folder has one) and the tokenizer into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A file may have no token ids, and transformers would use its own defaults.
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = ids | source.hf_config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    generation_config = source.folder / "generation_config.json"
    if generation_config.is_file():
        shutil.copyfile(generation_config, folder / generation_config.name)


def gather_hf(model: nn.Module, source: ModelSource, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole model on rank 0 in `dtype` in host memory, by Hugging Face name; nothing on others. Collective.

    Adapters are merged into its weights. Tensors are gathered one at a time.
    """
    # Every rank runs the generator, because gathering is collective; only rank 0 keeps the tensors.
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _gathered(model, source):
        if _is_writer():
            tensors |= by_hf_name(source, name, value.to("cpu", dtype))
    return tensors


def by_hf_name(source: ModelSource, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one of torchtitan's tensors is outside, each with storage of its own.

    What is gathered from uneven shards is a view of padded storage, and single experts are views of all, which
    safetensors refuses.
    """
    return {hf_name: each.clone() for hf_name, each in source.adapter.to_hf({name: value}).items()}


def write_hf(
    tensors: dict[str, torch.Tensor],
    source: ModelSource,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write a folder that transformers and vLLM load: safetensors, config and tokenizer.

    Args:
        tensors: What `gather_hf` returned. Nothing is written without.
    """
    if not tensors:
        return
    hf_config = {key: value for key, value in source.hf_config.items() if key != "torch_dtype"}
    hf_config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    write_hf_config(dataclasses.replace(source, hf_config=hf_config), tokenizer, folder)
    save_torch_state_dict(tensors, folder)
    share(folder)


def share(folder: str | Path) -> None:
    """Let others read the safetensors files in a folder if they may read a new file: safetensors shuts them out."""
    beside = next(path for path in Path(folder).glob("*config.json"))
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(beside.stat().st_mode & 0o777)


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gathered(model: nn.Module, source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    state = get_model_state_dict(model)
    for name, value in state.items():
        if is_adapter(name) or (source.tied and name == source.family.output_name):
            continue
        layer, full = name.removesuffix(".weight"), whole(value)
        if source.lora is not None and layer + A in state:
            full = merged(full, whole(state[layer + A]), whole(state[layer + B]), source.lora.scaling)
        yield name, full
