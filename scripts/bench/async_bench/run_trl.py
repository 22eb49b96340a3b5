"""TRL's AsyncGRPOTrainer on the work of `rollouts.py modes --preset trl`, to stand beside it.

    PYTHONPATH=scripts/bench python -m async_bench.run_trl MODEL URL PROMPTS [--steps 100]

MODEL: folder of `rollouts.py model`. URL: a vLLM server of it with TRL's weight transfer (docs/benchmarks.md has the
command). PROMPTS: prompts.jsonl of an --out of `modes`. Prints what TRL logs as a JSON object a line, with the seconds
since the start; nothing ends it but --steps or a signal, so run it under `timeout`.

Written for trl 1.16, accelerate, flash-attn-4 and one GPU. Two things of TRL are replaced: its loading of
FlashAttention, which would download version 3, by version 4; and its question for the server's dtype, to which vLLM
0.25.1 answers 500.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STARTED = time.time()
PROMPT_TOKENS = 140
EXAMPLES = 4000


def coin(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward by the answer's tokens: every group has a gradient, and nothing is learned."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def flash_attention_4() -> SimpleNamespace:
    """What TRL's packing calls of FlashAttention 3: `flash_attn_varlen_func`."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(q, k, v, starts_q, starts_k, longest_q, longest_k, *, softmax_scale=None, causal, window_size=(-1, -1)):
        if tuple(window_size) != (-1, -1):
            raise ValueError(f"attention in a window of {window_size} is not what was measured")
        lengths = {"max_seqlen_q": int(longest_q), "max_seqlen_k": int(longest_k)}
        documents = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k} | lengths
        return flash_attn_varlen_func(q.contiguous(), k, v, softmax_scale=softmax_scale, causal=causal, **documents)

    return SimpleNamespace(flash_attn_varlen_func=attend)


def make_tokenizer(model: str) -> Any:
    import trl
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"  # TRL knows templates by their text
    tokenizer.chat_template, tokenizer.padding_side = template.read_text(), "left"
    return tokenizer


def make_examples(tokenizer: Any, prompts: Path) -> list[dict[str, Any]]:
    """Prompts of PROMPT_TOKENS with the template, over and over. A letter is a token to this tokenizer."""
    one = [{"role": "user", "content": "a"}]
    template_tokens = len(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) - 1
    questions = [json.loads(line)["question"] for line in prompts.read_text().splitlines()]
    contents = [question[: PROMPT_TOKENS - template_tokens] for question in questions]
    turns = [[{"role": "user", "content": content}] for content in contents]
    return [{"prompt": turns[i % len(turns)]} for i in range(EXAMPLES)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="trl_out", help="TRL's output folder")
    args = parser.parse_args()

    import trl.experimental.async_grpo.packing as packing
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    VLLMClient.get_dtype = lambda self: "torch.bfloat16"
    packing._flash_attn = flash_attention_4

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
    return 0


if __name__ == "__main__":
    sys.exit(main())
