"""A language model of transformers on packed rows: its own class, with attention that knows the documents.

Attention goes through transformers' `AttentionInterface`, which hands over what a layer adds (window, softcap).
All else is the class's own code: nothing here knows a model. Whether that is right for packed rows, `same_packed.py`
finds out.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from torchtitan.grpo.model.by_document import split_by_document
from torchtitan.grpo.model.context_parallel import ContextParallel
from torchtitan.grpo.model.document_attention import attend
from torchtitan.grpo.model.documents import Documents
from torchtitan.grpo.model.families import BlockUses, Unsupported, logit_rule

ATTENTION = "torchtitan_grpo_documents"
PREFIX = "hf."
"""Parameters have Hugging Face's names behind it."""


class TransformersModel(nn.Module):
    """A model of transformers with the parts that the trainer reads (see `families.Family`).

    `layers` are its blocks, `tok_embeddings` and `output` its first and last layer. `final_states` takes packed rows.

    Args:
        config: Which model. Dropout is left out.
        model_args: Its `families.ModelArgs`, for those who have the model.
    """

    def __init__(self, config: PreTrainedConfig, model_args: Any = None) -> None:
        super().__init__()
        self.model_args = model_args
        self.tied = bool(config.tie_word_embeddings)
        config = with_layers(config, config.num_hidden_layers)
        # In torch's default dtype, not in that of config.json.
        how = {"attn_implementation": ATTENTION, "dtype": torch.get_default_dtype()}
        self.hf: PreTrainedModel = AutoModelForCausalLM.from_config(config, **how)
        self._blocks = _blocks(self.hf)
        self.by_document = any([split_by_document(block) for block in self.layers])
        self.logit_scale, self.logit_softcap = logit_rule(config)

    @property
    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.get_submodule(self._blocks))

    @property
    def tok_embeddings(self) -> nn.Embedding:
        return cast(nn.Embedding, self.hf.get_input_embeddings())

    @property
    def output(self) -> nn.Linear:
        return cast(nn.Linear, self.hf.get_output_embeddings())

    def final_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Documents,
        routes: Tensor | None = None,
        *,
        flash: int = 2,
        context: ContextParallel | None = None,
        uses: BlockUses | None = None,
    ) -> Tensor:
        """The states [1, T, dim] that the output layer reads. See `packed.States`.

        Args:
            uses: Is told what the blocks ask of attention.
        """
        if self.by_document:
            documents = documents.with_padded()  # once for all blocks; on CUDA the host waits for the lengths
        found = self.hf.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            # A mask of four dimensions is taken as it is, and attention does not read it. To make one of positions, the
            # host would wait for the device.
            attention_mask=positions.new_empty(1, 1, 1, 1, dtype=torch.bool),
            use_cache=False,
            documents=documents,
            flash=flash,
            context=context,
            uses=uses,
        )
        return found[0]

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """The class's own random weights, and its buffers, which no file holds. Tied weights become one again.

        Raises:
            ValueError: The class leaves a buffer as it is, so that its values would be those of free memory.
        """
        if self.tied:
            self.output.weight = self.tok_embeddings.weight
        buffers = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        for buffer in buffers.values():
            buffer.fill_(torch.nan)
        padding, self.tok_embeddings.padding_idx = self.tok_embeddings.padding_idx, None  # its row would be sharded
        with implicit_replication():  # some copy whole tensors into parameters, which may be sharded
            for module in self.hf.modules():
                self.hf._init_weights(module)
        self.tok_embeddings.padding_idx = padding
        in_files = self.state_dict().keys()
        for name, buffer in buffers.items():
            if name not in in_files and buffer.isnan().any():
                raise ValueError(f"its class does not fill the buffer {name.removeprefix(PREFIX)} again")


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The config of the first `layers` blocks, without dropout. Lists with an entry for each block are cut."""
    values = config.to_dict()
    before = values["num_hidden_layers"]
    values["num_hidden_layers"] = layers
    for key, value in values.items():
        if isinstance(value, list) and len(value) == before:
            values[key] = value[:layers]
        elif key == "per_layer_config":  # Gemma 4's, by number
            values[key] = {number: each for number, each in (value or {}).items() if int(number) < layers}
        elif key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            values[key] = 0.0
    return type(config).from_dict(values)


def _blocks(hf: PreTrainedModel) -> str:
    """The name of the list of blocks in `TransformersModel`, of the classes that the model does not split."""
    classes = set(hf._no_split_modules or ())
    for name, module in hf.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in classes:
            return PREFIX + name
    raise Unsupported("architectures", [type(hf).__name__], "transformers does not say which of its layers are blocks")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: Documents | None = None,
    flash: int = 2,
    context: ContextParallel | None = None,
    uses: BlockUses | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [1, heads, T, head_dim] -> [1, T, heads, head_dim], and no attention weights."""
    if documents is None:
        raise TypeError("its layers do not hand on to attention which documents a row has")
    if s_aux is not None:
        raise TypeError("its attention has sinks, which are not computed here")
    # A layer that says None has no window, whatever its module says.
    window = more.get("sliding_window", getattr(module, "sliding_window", None)) or 0
    softcap = softcap or 0.0
    if uses is not None:
        uses.see(getattr(module, "layer_idx", 0), query, value, window, softcap)
    how: dict[str, Any] = {"window": window, "softcap": softcap, "flash": flash, "context": context}
    return attend(query, key, value, documents, scaling, **how), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # documents are the mask
