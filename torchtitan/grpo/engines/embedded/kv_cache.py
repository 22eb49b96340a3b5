"""Keys and values of the running rows, in transformers' cache interface, and how much memory they may take."""

import inspect
import os
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer


class _RowLayer(DynamicLayer):
    """One layer's keys and values, [rows, kv_heads, tokens, head_dim] each, in buffers that are kept between steps."""

    keys: Any  # tensors; None before the first forward
    values: Any

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.cache
        if self.keys is None:
            _, heads, _, width = key_states.shape
            shape = (cache.row_capacity, heads, cache.token_capacity, width)
            # Zeros, since masked values are still multiplied by 0, and 0 times NaN is NaN.
            self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        if cache.prefill_rows is not None:
            tokens = key_states.shape[2]
            self.keys[cache.prefill_rows, :, :tokens] = key_states
            self.values[cache.prefill_rows, :, :tokens] = value_states
            return key_states, value_states
        rows, positions = cache.decode_rows, cache.decode_positions
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        view = (slice(cache.decode_row_count), slice(None), slice(cache.decode_tokens))
        return self.keys[view], self.values[view]

    def resize(self, rows: int, tokens: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((rows, old.shape[1], tokens, old.shape[3]))
            kept = old[:rows, :, :tokens]
            new[: kept.shape[0], :, : kept.shape[2]] = kept
            setattr(self, name, new)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, tokens: int) -> None:
        self.keys[targets, :, :tokens] = self.keys[sources, :, :tokens]
        self.values[targets, :, :tokens] = self.values[sources, :, :tokens]


class RowCache(Cache):
    """A cache whose rows join and leave.

    Row r holds its tokens in columns 0..length-1. So rows of any length decode together, without padding on the left,
    and nothing moves when one joins.

    Call `prefill` or `decode` before the model's forward to say where its keys and values go. The rows in use are
    always the first ones. `copy` makes rows that go on in several ways, and fills the gaps that finished rows leave.

    Args:
        tokens_max: How many tokens of keys and values memory is for, in all rows together.
    """

    def __init__(self, num_layers: int, tokens_max: int) -> None:
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])
        self.tokens_max = tokens_max
        self.row_capacity = 0
        self.token_capacity = 0
        self.prefill_rows: slice | None = None

    def reserve(self, rows: int, tokens: int, keep: bool) -> None:
        """Make room for `rows` rows of `tokens` tokens. Stored values in these stay if `keep`."""
        tokens = -(-tokens // 32) * 32
        if not keep and (self.row_capacity > 4 * rows or self.token_capacity > 4 * tokens):
            self.drop()  # much larger than needed now: free the memory
        if rows <= self.row_capacity and tokens <= self.token_capacity:
            return
        if not keep:
            self.drop()
        # Grow to at least twice the old size, so that copying costs a constant per token.
        new_rows = self.row_capacity if rows <= self.row_capacity else max(rows, 2 * self.row_capacity)
        new_tokens = self.token_capacity if tokens <= self.token_capacity else max(tokens, 2 * self.token_capacity)
        if new_rows * new_tokens > self.tokens_max:  # many short rows were here before, and now there are few long ones
            new_rows, new_tokens = rows, tokens
        self.row_capacity, self.token_capacity = new_rows, new_tokens
        for layer in self.layers:
            if layer.keys is not None:
                layer.resize(new_rows, new_tokens)

    def prefill(self, first_row: int, rows: int) -> None:
        """The next forward fills `rows` rows from `first_row` on."""
        self.prefill_rows = slice(first_row, first_row + rows)

    def decode(self, positions: torch.Tensor, tokens: int) -> None:
        """The next forward has one token for each of the first rows. It goes to column `positions` [R] of its row, and
        attention sees the first `tokens` columns."""
        self.prefill_rows = None
        self.decode_positions = positions
        self.decode_row_count = len(positions)
        self.decode_rows = torch.arange(len(positions), device=positions.device)
        self.decode_tokens = tokens

    def copy(self, sources: list[int], targets: list[int], tokens: int) -> None:
        """Copy the first `tokens` columns of rows `sources`, as they are now, to rows `targets`."""
        device = self.layers[0].keys.device
        source_rows, target_rows = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for layer in self.layers:
            layer.copy(source_rows, target_rows, tokens)

    def drop(self) -> None:
        """Free all memory. Stored values are lost."""
        self.row_capacity = self.token_capacity = 0
        for layer in self.layers:
            layer.keys = layer.values = None


def cache_argument(model: nn.Module) -> str:
    """How `model`'s forward calls its keys and values. Newer versions of transformers name them "cache"; there
    "past_key_values" is a warning, and from 5.40 on an error."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_budget_bytes(device: torch.device, memory_share: float = 0.0) -> int:
    """Memory for keys and values: a quarter of all, and at most half of what is free, now that the model is loaded. How
    many answers are computed together must not depend on what else is there, or results would round differently.

    Args:
        memory_share: The process's share of a GPU's memory, to which it is held from now on; 0 for no limit.
    """
    if device.type == "cuda" and memory_share:
        torch.cuda.set_per_process_memory_fraction(memory_share, device)
        total = torch.cuda.get_device_properties(device).total_memory
        return max(0, int(memory_share * total) - torch.cuda.memory_allocated(device)) // 2
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free // 2, total // 4)
    free, total = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
    return min(free // 2, total // 4) * os.sysconf("SC_PAGE_SIZE")
