"""vLLM's `/v1/models` tells the shape of the served model, by which a trainer of another model is refused at its start.

vLLM itself tells the folder's name only, and that folder may be on another machine than the trainer.
"""

import functools
import logging
from typing import Any

from torchtitan.grpo.weight_wire.model_identity import KEY, identity

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log


def install(hf_config: Any) -> None:
    """In vLLM's API server. If its parts are not where they are expected, it stays as it is and the log says so.

    Args:
        hf_config: The served model's configuration, an object of transformers.
    """
    try:
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels

        show = OpenAIServingModels.show_available_models
    except (ImportError, AttributeError) as error:
        logger.warning("This vLLM's list of models is unknown (%s): it does not tell the model's shape.", error)
        return
    if getattr(show, "tells", False):
        return
    config = identity("", hf_config).config

    @functools.wraps(show)
    async def show_with_config(self: OpenAIServingModels) -> Any:
        models = await show(self)
        for card in models.data:
            setattr(card, KEY, config)  # its class takes any field
        return models

    show_with_config.tells = True  # type: ignore[attr-defined]
    OpenAIServingModels.show_available_models = show_with_config
