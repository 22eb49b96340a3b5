"""torchtitan's language models on packed rows: attention within each document, log-probabilities out.

torchtitan 0.2.2 has no attention that trains on packed rows on a CPU. Its Qwen3 takes no positions under tensor
parallelism, and its models return the full logits. `make_packed` changes these three things on a model of
torchtitan's, and nothing else.
"""

import functools
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan.grpo.model.documents import Documents, documents_for_compiled_blocks, documents_of, shared_prefixes
from torchtitan.grpo.model.experts import expert_tokens
from torchtitan.grpo.model.flash_attention import Attention, flash_attention_2
from torchtitan.grpo.model.flops import used
from torchtitan.grpo.model.logprobs import token_logprobs
from torchtitan.grpo.model.replay import agreement, route_keys, set_routes
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.rows import PADDING_DOCUMENT_TOKENS


class PackedAttention(nn.Module):
    """Causal attention within each document of one packed row. Replaces torchtitan's inner attention."""

    def __init__(self, flash: Attention = flash_attention_2):
        super().__init__()
        self.flash = flash

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float | None = None
    ) -> torch.Tensor:
        """q: [1, heads, T, head_dim], k and v: [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim]."""
        mesh = None
        if isinstance(q, DTensor):  # sharded by heads: no rank needs another's
            mesh = q.device_mesh
            q, k, v = q.to_local(), k.to_local(), v.to_local()
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, heads, head_dim]
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            out = self.flash(q, k, v, documents, scale)
        else:
            out = _by_length_class(q, k, v, documents, scale)
        out = out.unsqueeze(0)
        return out if mesh is None else DTensor.from_local(out, mesh, [Shard(2)], run_check=False)


def _by_length_class(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    # index_select in place of x[slots]: on a CPU, the backward pass of x[slots] takes 50 times as long.
    padded = documents.padded
    sizes = [docs * length for docs, length in padded.shapes]
    q_slots, k_slots, v_slots = (x.index_select(0, padded.slots).split(sizes) for x in (q, k, v))
    outputs = []
    for i, shape in enumerate(padded.shapes):
        attended = F.scaled_dot_product_attention(  # of [docs, heads, L, head_dim]
            q_slots[i].unflatten(0, shape).transpose(1, 2),
            k_slots[i].unflatten(0, shape).transpose(1, 2),
            v_slots[i].unflatten(0, shape).transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, padded.taken)


def make_packed(
    model: nn.Module,
    tp_mesh: DeviceMesh | None = None,
    *,
    compile: bool = False,
    kept_logits_bytes: int = 0,
    flash: Attention = flash_attention_2,
) -> None:
    """Make `model(microbatch, temperature)` return log-probabilities of the answer tokens of a packed row.

    Args:
        model: A model of torchtitan's parts (see `families.Family.model_cls`), built with `attn_type="varlen"`.
        tp_mesh: Its tensor-parallel mesh, if it has one: the output weight is then sharded over the vocabulary.
        compile: Blocks are compiled; compile the log-probabilities too.
        kept_logits_bytes: See `logprobs.token_logprobs`.
        flash: Attention in bfloat16 or float16 on CUDA, from `choose_attention`; elsewhere torch's SDPA is used.
    """
    for block in model.layers.values():
        block.attention.inner_attention = PackedAttention(flash)
    model.forward = types.MethodType(
        functools.partial(_packed_forward, tp_mesh=tp_mesh, compile=compile, kept_bytes=kept_logits_bytes), model
    )


def attention_tokens(model: nn.Module) -> float:
    """The position from which a token's attention costs more FLOPs than its linear layers, for `packing.pack`.

    Forward and backward take 6 FLOPs for each parameter that a token is multiplied by, 4 if it is frozen. For each
    position that it attends to they take 12 per layer, head and head dimension. Kernel speed is not considered.
    """
    args = model.model_args
    # Of all ranks' shards; a tied weight counts once.
    flops = sum(used(p, args) * (6 if p.requires_grad else 4) for p in model.parameters())
    if (looked_up := model.tok_embeddings.weight) is not model.output.weight:
        flops -= looked_up.numel() * (6 if looked_up.requires_grad else 4)
    return flops / (12 * args.n_layers * args.n_heads * args.head_dim)


def _packed_forward(
    model: nn.Module,
    row: Microbatch,
    temperature: float,
    *,
    tp_mesh: DeviceMesh | None,
    compile: bool,
    kept_bytes: int,
    predictions: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Log-probability and entropy, float32 [answer tokens], at `row.answer_positions`.

    With `row.top_ids` an update also gets their log-probabilities and that of the rest, float32 [answer tokens, K + 1].

    With `row.routes`, `model.agrees` is bool [answer tokens, layers] afterwards: whether a router would have chosen the
    same experts by itself. (It is not in the row, of which FSDP2 passes a copy on.) In an update,
    `model.expert_tokens` counts the answer tokens by expert. With `predictions` it does not, and there is also whether
    the target is a likeliest token, bool [answer tokens].
    """
    tokens, positions, answer_positions, routes = row.tokens, row.positions, row.answer_positions, row.routes
    if compile:
        documents = documents_for_compiled_blocks(row, max(model.model_args.max_seq_len, PADDING_DOCUMENT_TOKENS))
    else:
        documents = documents_of(row)
    # Not on CUDA, where the host would wait for the tokens. Not under TP and compile, which need rows of fixed lengths.
    if tokens.device.type == "cpu" and tp_mesh is None and not compile:
        keys = tokens if routes is None else route_keys(tokens, routes)
        shared = shared_prefixes(keys, documents)
        if shared is None:
            documents = documents.with_padded()
        else:
            documents, kept, index = shared
            tokens, positions, answer_positions = tokens[kept], positions[kept], index[answer_positions]
            routes = None if routes is None else routes[kept]
    # RoPE rows are looked up here, not by the layers: torchtitan's Qwen3 cannot take positions under TP.
    rope = model.rope_cache[positions]
    hidden = model.tok_embeddings(tokens.unsqueeze(0))
    if not rope.is_complex():  # cast once, or every block keeps a copy of its own for the backward
        rope = rope.to(hidden.dtype)
    replays = set_routes(model, routes)
    for block in model.layers.values():
        hidden = block(hidden, rope, documents, None)
    if replays:
        model.agrees = agreement(model)[answer_positions]
    counts = torch.is_grad_enabled() and not predictions
    model.expert_tokens = expert_tokens(model, answer_positions) if counts else None
    hidden = model.norm(hidden)
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    weight = model.output.weight
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    hidden = hidden[0].index_select(0, answer_positions)
    return token_logprobs(
        hidden,
        weight,
        row.targets,
        temperature,
        mesh=tp_mesh,
        compile=compile,
        kept_bytes=kept_bytes,
        others=row.top_ids if torch.is_grad_enabled() and not predictions else None,
        predictions=predictions,
    )
