"""What is replaced in TRL 1.16 so that it trains on the job of a configuration of ours.

It would download FlashAttention 3, so it gets torch's version 2. It asks the server for its configuration, to which
vLLM 0.25.1 answers 500, so the answer is fixed: the servers are started as scripts/bench/README.md says.
"""

import inspect
from types import SimpleNamespace
from typing import Any


def flash_attention_2() -> SimpleNamespace:
    """What TRL's packing calls of FlashAttention 3, `flash_attn_varlen_func`, by torch's own kernels."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(q, k, v, starts_q, starts_k, longest_q, longest_k, *, softmax_scale=None, causal, window_size=(-1, -1)):
        if tuple(window_size) != (-1, -1) or not causal:
            raise ValueError(f"window_size {window_size}: this benchmark has causal attention without a window")
        documents = starts_q, starts_k, int(longest_q), int(longest_k)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return varlen_attn(q, k, v, *documents, scale=softmax_scale, window_size=(-1, 0), **grouped)

    return SimpleNamespace(flash_attn_varlen_func=attend)


def take_prompts_as_text(tokenizer: Any) -> None:
    """AsyncGRPOTrainer renders messages and parses answers. A lone message is to be the prompt, an answer all text."""
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\Z",  # the whole prompt is before the answer
        "fields": {"content": {"content": "text"}},
    }


def mend_server_client() -> None:
    """What GRPOTrainer's client asks of `trl vllm-serve`. TRL reads no more of it."""
    from trl.generation.vllm_client import VLLMClient

    info = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
    VLLMClient.get_server_info = lambda self: info


def mend_async_trainer() -> None:
    """Replace what the module's docstring names."""
    import trl.experimental.async_grpo.packing as packing
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    VLLMClient.get_dtype = lambda self: "torch.bfloat16"
    packing._flash_attn = flash_attention_2
