"""Which experts a transformers model chooses, read from its routers while it computes."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from torchtitan.grpo.data.routes import RouteShape


class RoutingRecorder:
    """Holds the experts of the last forward pass.

    Args:
        model: A mixture of experts whose every layer has a router at `mlp.gate`, as Qwen3's. Of a dense model nothing
            is recorded.

    Attributes:
        shape: None for a dense model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        blocks = [block.mlp for block in model.base_model.layers]
        routers = [block.gate for block in blocks if isinstance(getattr(block, "gate", None), nn.Module)]
        experts = getattr(config, "num_experts", 0) or 0
        self.shape: RouteShape | None = None
        if experts and len(routers) == len(blocks):
            self.shape = RouteShape(len(routers), config.num_experts_per_tok, experts)
            for router in routers:
                router.register_forward_hook(self._keep)
        self.wanted = False
        self._chosen: list[torch.Tensor] = []

    def begin(self, wanted: bool) -> None:
        """Record the next forward pass, if it is wanted, and forget one that has failed."""
        self.wanted, self._chosen = wanted, []

    def take(self, *shape: int) -> np.ndarray:
        """What the pass has chosen: [*shape, layers, top_k], where it had tokens of `shape`."""
        assert self.shape is not None
        chosen = torch.stack(self._chosen, dim=-2).cpu().numpy().astype(self.shape.dtype)
        self.begin(False)
        return chosen.reshape(*shape, self.shape.layers, self.shape.top_k)

    def _keep(self, router: nn.Module, inputs: Any, output: Any) -> None:
        if self.wanted:
            self._chosen.append(output[-1])  # logits, weights, experts [tokens, top_k]
