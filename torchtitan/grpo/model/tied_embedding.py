"""Tied models between torchtitan's names and Hugging Face's, whose files hold the embedding only."""

import dataclasses
from typing import Any

from torchtitan.protocols.state_dict_adapter import StateDictAdapter


class TiedEmbedding(StateDictAdapter):
    """State-dict adapter, to be put before torchtitan's: drops the output of tied models, and gives it back.

    Takes partial state dicts, which torchtitan's own tying does not: it demands the embedding in every call.
    """

    def __init__(self, model_args: Any, hf_assets_path: str | None) -> None:
        self.tied = model_args.enable_weight_tying
        super().__init__(dataclasses.replace(model_args, enable_weight_tying=False), hf_assets_path)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in state_dict.items() if not (self.tied and name == "output.weight")}
        return super().to_hf(kept)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in hf_state_dict.items() if not (self.tied and name == "lm_head.weight")}
        state_dict = super().from_hf(kept)
        if self.tied and "tok_embeddings.weight" in state_dict:
            state_dict["output.weight"] = state_dict["tok_embeddings.weight"]
        return state_dict

    def expert(self, hf_name: str) -> int | None:
        """Of a tensor that is stacked with others along a new first dimension: its place there. None for others."""
        return None
