"""Routing replay: the trainer's routers use the experts that the sampler chose (R3, arXiv 2510.11370).

A router chooses the top_k of its scores. Where two scores nearly tie, a rounding that differs between sampler and
trainer changes the choice, and with it the log-probability of every later token. Replayed, the choice is the sampler's.
The experts' weights are still the trainer's own scores, so the router learns as before.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.errors import UserError


def route_shape(model_args: Any) -> RouteShape:
    """What a sampler's routes of this model look like.

    Raises:
        UserError: The model is dense.
    """
    if not getattr(model_args, "moe_enabled", False):
        raise UserError("[grpo] routing_replay = true is for mixtures of experts, and this model has none: set false")
    experts = model_args.moe_args
    return RouteShape(model_args.n_layers, experts.top_k, experts.num_experts)


def set_routes(model: nn.Module, routes: Tensor | None) -> None:
    """Have the routers use `routes` [T, layers, top_k] in the next forward pass and its backward; None: their own."""
    routers = _routers(model)
    # Contiguous, and all of one layout: a compiled block is compiled once.
    by_layer = [None] * len(routers) if routes is None else routes.transpose(0, 1).contiguous().unbind(0)
    for router, own in zip(routers, by_layer, strict=True):
        router.routes = own


def agreement(model: nn.Module) -> Tensor:
    """bool [T, layers], after a forward pass with routes: whether each router would have chosen the same experts."""
    return torch.stack([router.agrees for router in _routers(model)], dim=1)


def replayed(routes: Tensor, own: Tensor, num_experts: int) -> Tensor:
    """int64 [T, top_k]: `routes`, or the router's own choice where they are free (see `data.routes.free`)."""
    chosen = routes.long()
    return chosen.where(chosen < num_experts, own)


def same_experts(selected: Tensor, own: Tensor) -> Tensor:
    """bool [T]: whether both name the same experts, in any order. Each has an expert once."""
    return selected.sort(-1).values.eq(own.sort(-1).values).all(-1)


def route_keys(tokens: Tensor, routes: Tensor) -> Tensor:
    """int64 [T], equal where token and routes are. On the host: what `documents.shared_prefixes` may share."""
    cells = np.concatenate(
        [tokens.numpy()[:, None].view(np.uint8), routes.numpy().reshape(len(tokens), -1).view(np.uint8)], 1
    )
    _, keys = np.unique(np.ascontiguousarray(cells).view(f"V{cells.shape[1]}").ravel(), return_inverse=True)
    return torch.from_numpy(keys.ravel())


def _routers(model: nn.Module) -> list[Any]:
    return [block.moe.router for block in model.layers.children() if getattr(block, "moe", None) is not None]
