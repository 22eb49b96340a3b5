"""GRPO in one file, without this project: transformers generates, then loss, backward, AdamW. To read, and to compare.

    python scripts/plain_grpo.py --steps 20

Model folder, task, prompts, reward, warm start and loss are those of train_configs/quickstart.toml. `grpo_train.py`
does the same with servers, packed rows, weight sync, checkpoints and many ranks. Each line of output is one step: its
seconds, its mean reward, and at times the held-out reward of greedy answers.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

FOLDER = Path(__file__).resolve().parents[1] / "train_configs" / "tiny_qwen3"
OPERANDS, HELD_OUT, ANSWER_TOKENS, EVERY = 40, 128, 8, 50
PAD, END = 0, 2


def problems(seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """All sums `a+b=` with their answers, in random order: those to train on, and the held-out ones."""
    rows = [(f"{a}+{b}=", str(a + b)) for a in range(OPERANDS) for b in range(OPERANDS)]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def left_padded(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, [B, L] each. Prompts end in the same column, where answers begin."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[PAD] * (longest - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
    return ids, mask


def answer(model: PreTrainedModel, prompts: list[list[int]], n: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Sample n answers to each prompt; temperature 0 is greedy.

    Returns:
        ids and attention mask of prompt and answer, [B * n, L]; bool [B * n, L], True for answer tokens.
    """
    ids, mask = left_padded(prompts)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    full = model.generate(
        input_ids=ids,
        attention_mask=mask,
        num_return_sequences=n,
        max_new_tokens=ANSWER_TOKENS,
        eos_token_id=END,
        pad_token_id=PAD,
        **sampling,
    )
    answers = full[:, ids.shape[1] :]
    before_end = (answers == END).cumsum(1) - (answers == END).long() == 0  # the end token belongs to the answer
    is_answer = torch.cat([torch.zeros(len(full), ids.shape[1], dtype=torch.bool), before_end], dim=1)
    return full, torch.cat([mask.repeat_interleave(n, 0), before_end.long()], dim=1), is_answer


def logprobs_of(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    """log p(token | tokens before it) at the sampling temperature, [B, L - 1]: of every token but the first."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=128, help="per step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt: its group")
    parser.add_argument("--sft-steps", type=int, default=600, help="supervised steps before, on right answers")
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--temperature", type=float, default=1.2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    train, held_out = problems(args.seed)
    draw = random.Random(args.seed)

    def optimizer_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def rewards_of(rows: list[tuple[str, str]], ids: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
        """1 for each answer that is the reference, else 0: [rows, answers to each]."""
        n = len(ids) // len(rows)
        texts = [tokenizer.decode(ids[i][is_answer[i]], skip_special_tokens=True) for i in range(len(ids))]
        return torch.tensor([float(text == rows[i // n][1]) for i, text in enumerate(texts)]).view(len(rows), n)

    # Warm start: cross-entropy of right answers. A random model would never see a reward.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(args.sft_steps):
        rows = draw.sample(train, 64)
        ids, mask = left_padded([[*tokenizer.encode(p), *tokenizer.encode(a)[1:], END] for p, a in rows])
        is_answer = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor([[len(a) + 1] for _, a in rows])
        optimizer_step(optimizer, -logprobs_of(model, ids, mask, 1.0)[is_answer[:, 1:]].mean())

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        # Warm up over 5 steps, then fall to a tenth over the last 70 %.
        left = (args.steps - step + 1) / (0.7 * args.steps)
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / 5, max(0.1, left))

        # 1. Rollout: a group of answers to each prompt, from the policy as it is now.
        rows = draw.sample(train, args.prompts)
        prompts = [tokenizer.encode(prompt) for prompt, _ in rows]
        ids, mask, is_answer = answer(model, prompts, args.answers, args.temperature)
        # 2. Reward, and advantage: how much better than its group's mean. Equal rewards teach nothing: drop the group.
        rewards = rewards_of(rows, ids, is_answer)
        advantages = rewards - rewards.mean(1, keepdim=True)
        kept = (rewards.std(1) > 0).repeat_interleave(args.answers)
        if kept.any():
            # 3. Loss: PPO's ratio times advantage, the mean over answer tokens. With one update per rollout the old
            # policy is the policy itself: the ratio is 1 and its clipping never acts, but its gradient is the policy's.
            logprobs = logprobs_of(model, ids[kept], mask[kept], args.temperature)
            ratio = (logprobs - logprobs.detach()).exp()
            per_token = -ratio * advantages.flatten()[kept][:, None]
            # 4. One optimizer step.
            optimizer_step(optimizer, per_token[is_answer[kept][:, 1:]].mean())
        line = f"step {step}/{args.steps}  reward {rewards.mean():.3f}  s/step {time.perf_counter() - began:.2f}"
        if step % EVERY == 0 or step == args.steps:
            ids, _, is_answer = answer(model, [tokenizer.encode(prompt) for prompt, _ in held_out], 1, 0.0)
            line += f"  held-out {rewards_of(held_out, ids, is_answer).mean():.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
