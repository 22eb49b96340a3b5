"""vLLM's `/v1/models` tells the shape of the served model, by which a trainer of another model is refused at its start.

vLLM itself tells the folder's name only, and that folder may be on another machine than the trainer.
"""

import functools
from typing import Any

from torchtitan.grpo.weight_wire.model_identity import KEY, identity


def install(hf_config: Any) -> None:
    """In vLLM's API server.

    Args:
        hf_config: The served model's configuration, an object of transformers.
    """
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    show, config = OpenAIServingModels.show_available_models, identity("", hf_config).config

    @functools.wraps(show)
    async def show_with_config(self: OpenAIServingModels) -> Any:
        models = await show(self)
        for card in models.data:
            setattr(card, KEY, config)  # its class takes any field
        return models

    OpenAIServingModels.show_available_models = show_with_config
