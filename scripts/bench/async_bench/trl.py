"""TRL's AsyncGRPOTrainer on the work of `rollouts.py modes --preset trl`, for comparison.

Written for trl 1.16. Two parts of TRL are replaced. It would download FlashAttention 3, so it gets version 4 or 2. It
asks the server for its configuration, to which vLLM 0.25.1 answers 500, so the answer is fixed: the servers are started
as scripts/bench/README.md says.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STARTED = time.time()
PROMPT_TOKENS = 140
EXAMPLES = 4000


def coin(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A coin flip by the answer's tokens: every group has a gradient, and nothing is learned."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def flash_attention_4() -> SimpleNamespace:
    """What TRL's packing calls of FlashAttention 3: `flash_attn_varlen_func`."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(q, k, v, starts_q, starts_k, longest_q, longest_k, *, softmax_scale=None, causal, window_size=(-1, -1)):
        if tuple(window_size) != (-1, -1):
            raise ValueError(f"window_size {window_size}: this benchmark has causal attention without a window")
        lengths = {"max_seqlen_q": int(longest_q), "max_seqlen_k": int(longest_k)}
        documents = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k} | lengths
        return flash_attn_varlen_func(q.contiguous(), k, v, softmax_scale=softmax_scale, causal=causal, **documents)

    return SimpleNamespace(flash_attn_varlen_func=attend)


def flash_attention_2() -> SimpleNamespace:
    """The same by torch's own kernels, which need no compilation."""
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


def make_tokenizer(model: str) -> Any:
    import trl
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"  # TRL knows a template by its text
    tokenizer.chat_template, tokenizer.padding_side = template.read_text(), "left"
    return tokenizer


def make_examples(tokenizer: Any, prompts: Path) -> list[dict[str, Any]]:
    """EXAMPLES prompts of PROMPT_TOKENS with the template. Each letter is one token of this tokenizer."""
    one = [{"role": "user", "content": "a"}]
    template_tokens = len(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) - 1
    questions = [json.loads(line)["question"] for line in prompts.read_text().splitlines()]
    contents = [question[: PROMPT_TOKENS - template_tokens] for question in questions]
    turns = [[{"role": "user", "content": content}] for content in contents]
    return [{"prompt": turns[i % len(turns)]} for i in range(EXAMPLES)]


def mend_server_client() -> None:
    """What GRPOTrainer's client asks of `trl vllm-serve`. TRL reads no more of it."""
    from trl.generation.vllm_client import VLLMClient

    info = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
    VLLMClient.get_server_info = lambda self: info


def mend_async_trainer(attention: Callable[[], SimpleNamespace] = flash_attention_4) -> None:
    """Replace what the module's docstring names."""
    import trl.experimental.async_grpo.packing as packing
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    VLLMClient.get_dtype = lambda self: "torch.bfloat16"
    packing._flash_attn = attention


def train_with_trl(args: argparse.Namespace) -> None:
    """`rollouts.py trl`: prints each of TRL's logs as a JSON object with the seconds since the start."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    mend_async_trainer()

    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            print(json.dumps({"seconds": time.time() - STARTED, "step": state.global_step} | numbers), flush=True)

    tokenizer = make_tokenizer(args.model)
    config = AsyncGRPOConfig(
        output_dir=args.out,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=10,
        num_generations=16,
        max_completion_length=2048,
        token_budget=16384,
        max_staleness=4,
        max_inflight_tasks=2048,
        vllm_server_base_url=args.url,
        learning_rate=1e-6,
        max_steps=args.steps,
        logging_steps=1,
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = AsyncGRPOTrainer(
        model=args.model,
        reward_funcs=coin,
        args=config,
        train_dataset=Dataset.from_list(make_examples(tokenizer, args.prompts)),
        processing_class=tokenizer,
        callbacks=[Log()],
    )
    trainer.train()
