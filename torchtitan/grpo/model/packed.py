"""Language models on packed rows: attention within each document, log-probabilities out.

torchtitan 0.2.2 has no attention that trains on packed rows on a CPU. Its Qwen3 takes no positions under tensor
parallelism, and its models return the full logits. `make_packed` changes these three things on a model of
torchtitan's, and nothing else. A model of transformers computes its own hidden states (see `transformers.py`).
"""

import functools
import types
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan.grpo.model.context_parallel import ContextParallel
from torchtitan.grpo.model.document_attention import PackedAttention
from torchtitan.grpo.model.documents import Documents, documents_for_compiled_blocks, documents_of, shared_prefixes
from torchtitan.grpo.model.experts import expert_tokens
from torchtitan.grpo.model.logprobs import token_logprobs
from torchtitan.grpo.model.replay import agreement, route_keys, set_routes
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.rows import PADDING_DOCUMENT_TOKENS

States = Callable[[nn.Module, torch.Tensor, torch.Tensor, Documents, torch.Tensor | None], torch.Tensor]
"""states(model, tokens [T], positions [T], documents, routes) -> final hidden states [1, T, dim]."""


def make_packed(
    model: nn.Module,
    tp_mesh: DeviceMesh | None = None,
    *,
    context: ContextParallel | None = None,
    compile: bool = False,
    kept_logits_bytes: int = 0,
    round_logits: bool = False,
    flash: int = 2,
) -> None:
    """Make `model(microbatch, temperature)` return log-probabilities of the answer tokens of a packed row.

    Args:
        model: One of `families.Family.model_cls`; torchtitan's are built with `attn_type="varlen"`.
        tp_mesh: Its tensor-parallel mesh, if it has one: the output weight is then sharded over the vocabulary.
        context: With context parallelism, which does not go with `tp_mesh`.
        compile: Blocks are compiled; compile the log-probabilities too.
        kept_logits_bytes, round_logits: See `logprobs.token_logprobs`.
        flash: Version of FlashAttention in bfloat16 or float16 on CUDA, from `choose_attention`; elsewhere torch's SDPA
            is used.
    """
    states: States = _states_of_parts
    if hasattr(model, "final_states"):
        states = functools.partial(type(model).final_states, flash=flash, context=context)
    else:
        for block in model.layers.children():
            block.attention.inner_attention = PackedAttention(flash, context)
    model.forward = types.MethodType(
        functools.partial(
            _packed_forward,
            states=states,
            tp_mesh=tp_mesh,
            context=context,
            compile=compile,
            kept_bytes=kept_logits_bytes,
            round_logits=round_logits,
        ),
        model,
    )


def _packed_forward(
    model: nn.Module,
    row: Microbatch,
    temperature: float,
    *,
    states: States,
    tp_mesh: DeviceMesh | None,
    context: ContextParallel | None,
    compile: bool,
    kept_bytes: int,
    round_logits: bool,
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
    targets, top_ids, kept_tokens = row.targets, row.top_ids, row.kept
    if compile:
        documents = documents_for_compiled_blocks(row, max(model.model_args.max_seq_len, PADDING_DOCUMENT_TOKENS))
    else:
        documents = documents_of(row)
    # Prefixes: not on CUDA, where the host would wait for the tokens, nor where rows must have fixed lengths.
    if context is not None:
        starts = context.answers(row.answers_at, len(tokens))
        own = slice(starts[context.rank], starts[context.rank + 1])
        tokens, positions = context.part(tokens), context.part(positions)
        answer_positions, targets = answer_positions[own] - context.rank * len(tokens), targets[own]
        top_ids = None if top_ids is None else top_ids[own]
        kept_tokens = kept_tokens and kept_tokens.part(own)
        if tokens.device.type == "cpu":
            documents = documents.with_padded()
    elif tokens.device.type == "cpu" and tp_mesh is None and not compile:
        keys = tokens if routes is None else route_keys(tokens, routes)
        shared = shared_prefixes(keys, documents)
        if shared is None:
            documents = documents.with_padded()
        else:
            documents, kept, index = shared
            tokens, positions, answer_positions = tokens[kept], positions[kept], index[answer_positions]
            routes = None if routes is None else routes[kept]
    hidden = states(model, tokens, positions, documents, routes)
    if routes is not None:
        model.agrees = agreement(model)[answer_positions]
    counts = torch.is_grad_enabled() and not predictions
    model.expert_tokens = expert_tokens(model, answer_positions) if counts else None
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    weight = model.output.weight
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    hidden = hidden[0].index_select(0, answer_positions)
    found = token_logprobs(
        hidden,
        weight,
        targets,
        temperature / getattr(model, "logit_scale", 1.0),
        softcap=getattr(model, "logit_softcap", 0.0),
        mesh=tp_mesh,
        compile=compile,
        kept_bytes=kept_bytes,
        round_logits=round_logits,
        others=top_ids if torch.is_grad_enabled() and not predictions else None,
        predictions=predictions,
        kept=kept_tokens,
    )
    return found if context is None else tuple(context.gather(values, starts) for values in found)


def _states_of_parts(
    model: nn.Module,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    documents: Documents,
    routes: torch.Tensor | None,
) -> torch.Tensor:
    """The `States` of torchtitan's parts (see `families.Family`)."""
    # RoPE rows are looked up here, not by the layers: torchtitan's Qwen3 cannot take positions under TP.
    rope = model.rope_cache[positions]
    hidden = model.tok_embeddings(tokens.unsqueeze(0))
    if not rope.is_complex():  # cast once, or every block keeps a copy of its own for the backward
        rope = rope.to(hidden.dtype)
    set_routes(model, routes)
    for block in model.layers.children():
        hidden = block(hidden, rope, documents, None)
    return model.norm(hidden)
