"""What autograd saves for a block, computed from shapes.

It follows from torchtitan's blocks, the attention kernel and `[activation_checkpoint]`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from torchtitan.config import JobConfig

if TYPE_CHECKING:  # torchtitan's models take seconds to import
    from torchtitan.grpo.model.families import ModelArgs
    from torchtitan.grpo.model.lora import Lora


@dataclass(frozen=True)
class BlockActivations:
    """Bytes that one row takes in one block.

    Attributes:
        input: The block's input. Full checkpointing keeps nothing else.
        selected: What selective checkpointing keeps by torchtitan's list of operations, the input included.
        matmuls: The same with all matrix multiplications kept, not every second one.
        saved: What autograd saves for the backward pass, the input included.
        gradients: The most gradients that are alive at once in the backward pass.
    """

    input: int
    selected: int
    matmuls: int
    saved: int
    gradients: int


def block_activations(
    args: "ModelArgs",
    block: nn.Module,
    tokens: int,
    itemsize: int,
    tensor_degree: int,
    compiled: bool,
    mode: str,
    lora: "Lora | None" = None,
    copies: float = 1.0,
    mlp_share: float = 1.0,
) -> BlockActivations:
    """Activations of one of torchtitan's blocks for a row of `tokens`. Those of experts are `_experts`'.

    All widths are those of one tensor-parallel rank. Between blocks and in the norms the rank holds its part of the
    tokens. In attention and feed-forward it holds its part of the heads and of the width; their inputs are whole.

    Args:
        args: The model's arguments.
        block: One of its blocks, on any device; it shows which norms and biases exist.
        itemsize: Bytes of an element in compute dtype.
        mode: `[activation_checkpoint] mode`.
        lora: The block's adapters. A frozen layer without one does not save its input.
        copies: Tokens of whole documents over those of the row, which has shared prompts once.
        mlp_share: Of the row's tokens, those that the feed-forward layer computes at a time.
    """
    heads, kv_heads, has_experts = args.n_heads, args.n_kv_heads, hasattr(block, "moe")
    residual, width = args.dim / tensor_degree, 0 if has_experts else args.hidden_dim / tensor_degree
    query, key = heads * args.head_dim / tensor_degree, kv_heads * args.head_dim / tensor_degree
    log_sum_exp = 4 * heads / tensor_degree  # of flash attention, float32

    adapted = {path.partition(".")[2] for path in lora.layers.values()} if lora else {"wq", "w1", "w2"}
    # Inputs of the norms, and their outputs, which the projections save.
    norms = 2 * residual + args.dim * (bool(adapted & {"wq", "wk", "wv"}) + bool(adapted & {"w1", "w3"}))
    norms += args.dim * (has_experts and bool(lora))  # the router and the experts pass gradients on
    attention = 2 * query + 2 * key  # queries and keys after RoPE, values, and attention's output
    statistics = 2 * 4 / tensor_degree + log_sum_exp  # of the norms, float32
    if getattr(block.attention, "q_norm", None) is not None:
        attention += query + key  # before the norm
        statistics += 4 * (heads + kv_heads) / tensor_degree
    gate = 3 if compiled else 4  # w1, w3, silu(w1) * w3, and silu(w1), which a compiled block recomputes
    gated = (gate - ("w2" not in adapted)) * width * mlp_share
    inner = lora.rank * len(lora.layers) if lora else 0  # x A^T of each adapter
    saved = (norms + attention + gated + inner) * itemsize + statistics

    # All matrix multiplications and attention; under tensor parallelism also the reduce-scattered sums.
    of_wo = 0 if compiled and tensor_degree > 1 else args.dim  # the reduce-scattered sum is kept in its place
    of_w2 = 0 if compiled or has_experts else args.dim  # no backward reads it, so a compiled block drops it
    reduced = 2 * residual if tensor_degree > 1 else 0
    matmuls = residual + 2 * query + 2 * key + 2 * width + of_wo + of_w2 + reduced + inner
    # torchtitan drops every second matrix multiplication without a bias: wk, wo and w3, or w1 and w2.
    biased = block.attention.wq.bias is not None
    selected = matmuls - (width + of_w2 if biased else key + of_wo + width)
    if lora:  # with an adapter on each layer, every second product is x A^T
        sizes = {"wq": query, "wk": key, "wv": key, "wo": args.dim, "w1": width, "w3": width, "w2": args.dim}
        matmuls += sum(sizes[name] for name in adapted) if biased else 0  # the update is an addmm, as a biased layer is
        selected = matmuls

    # At silu(w1) * w3. A compiled block computes both gradients in place.
    gradients = residual + (1 if compiled and mode == "none" else 2) * width * mlp_share
    if mlp_share < 1:
        gradients += residual  # of the chunks' inputs, until the last one has its own
        gradients += 0 if lora else args.dim * width / tokens  # of a weight by this chunk, beside the sum by others
        gradients = max(gradients, residual + 4 * query + 4 * key)
    if copies > 1 and not has_experts:
        # At attention, where what the feed-forward saved is free: keys and values, and their gradients by query head.
        of_keys = 2 * query + 4 * key
        at_attention = min(gradients, 2 * query + of_keys - gated)
        gradients = max(gradients, at_attention + (copies - 1) * of_keys)
    if has_experts:
        saved_by_experts, products, of_rows = _experts(args, itemsize, compiled, frozen=lora is not None)
        saved += saved_by_experts
        matmuls += products
        gradients += of_rows
    return BlockActivations(
        input=int(tokens * residual * itemsize),
        selected=int(tokens * (selected * itemsize + log_sum_exp)),
        matmuls=int(tokens * (matmuls * itemsize + log_sum_exp)),
        saved=int(tokens * saved),
        gradients=int(tokens * gradients * itemsize),
    )


def _experts(args: Any, itemsize: int, compiled: bool, frozen: bool) -> tuple[int, int, int]:
    """Of one token in the router and its experts, beside their input: bytes that are saved, and elements of matrix
    products and of gradients."""
    moe, width = args.moe_args, args.moe_inter_dim
    scores = 4 * moe.num_experts + (4 + 3 * 8 + 4) * moe.top_k  # float32; weights twice, int64 choices and two orders
    # Of each expert, for gradients of its weights: its input and the gated product. For those of its input: w1 and w3;
    # an uncompiled block keeps both in float32, and two more products.
    inputs = 0 if frozen else args.dim + width
    saved = moe.top_k * (inputs * itemsize + (2 * itemsize if compiled else 4 * 4) * width) + scores
    products = moe.top_k * (2 * width + (0 if compiled else args.dim)) + moe.num_experts
    gradients = moe.top_k * (2 * args.dim + width)  # of the inputs through w1 and w3, before they are added
    return saved, products, gradients


def kept_activations(config: JobConfig, block: BlockActivations, layers: int) -> tuple[int, int]:
    """Bytes that all blocks keep on the device until the backward pass begins, and bytes that one block recomputes in
    its own."""
    checkpoint = config.activation_checkpoint
    if checkpoint.mode == "none":
        return layers * block.saved, 0
    if checkpoint.mode == "full":
        return (1 if checkpoint.offload else layers) * block.input, block.saved - block.input
    if checkpoint.selective_ac_option in ("op", "matmul"):
        each = block.selected if checkpoint.selective_ac_option == "op" else block.matmuls
        return layers * each, block.saved - each
    interval = int(checkpoint.selective_ac_option)
    whole = layers // interval if interval else layers  # every n-th block is fully checkpointed
    return whole * block.input + (layers - whole) * block.saved, block.saved - block.input if whole else 0
