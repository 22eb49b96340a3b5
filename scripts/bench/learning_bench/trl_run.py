"""One run of TRL's GRPOTrainer or AsyncGRPOTrainer on the job of a configuration of grpo_train.py.

    python trl_run.py grpo|async URL|colocate|- --job.config_file ... [--section.key value ...]

`learning.py trl` starts it. Model, prompts, rewards, answers a step, their length, temperature, learning rate, warm-up
and seed are the configuration's; the loss and everything else are TRL's defaults. It writes metrics.jsonl with the
names of grpo_train.py. Held-out questions are answered greedily by transformers, outside the measured time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import bench_common  # noqa: F401  puts the repository first on the path
import torch
from learning_bench.task import Task
from learning_bench.trl_mends import mend_async_trainer, mend_server_client, take_prompts_as_text

from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.tokenizer import end_token_ids
from torchtitan.grpo.errors import UserError

ANSWERS_AT_ONCE = 64
"""Held-out questions that transformers answers together."""


class TrlTask(Task):
    """Rows and a reward as TRL takes them, and greedy answers of a model of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tokenizer.padding_side = "left"
        self.ends = end_token_ids(self.tokenizer, config.model.hf_assets_path)
        self.prompts = {prompt.index: prompt for prompt in self.training}
        self.rows = [{"prompt": prompt.text, "index": prompt.index} for prompt in self.training]

    def reward(self, completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        texts = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [self.score(text, self.prompts[i]) for text, i in zip(texts, index, strict=True)]

    @torch.no_grad()
    def greedy_reward(self, model: Any, max_answer_tokens: int) -> float:
        prompts, total = self.held_out.prompts, 0.0
        for first in range(0, len(prompts), ANSWERS_AT_ONCE):
            part = prompts[first : first + ANSWERS_AT_ONCE]
            texts = [prompt.text for prompt in part]
            asked = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
            settings = {"max_new_tokens": max_answer_tokens, "do_sample": False, "eos_token_id": self.ends}
            ids = model.generate(**asked, **settings, pad_token_id=self.tokenizer.pad_token_id)
            said = self.tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
            total += sum(self.score(text, prompt) for text, prompt in zip(said, part, strict=True))
        return total / len(prompts)


def settings_of(kind: str, config: Any, task: TrlTask, url: str) -> dict[str, Any]:
    """Arguments of TRL's configuration. A step has the same number of answers."""
    grpo, answers = config.grpo, config.grpo.prompts_per_step * config.grpo.group_size
    settings: dict[str, Any] = {
        "output_dir": str(Path(config.job.dump_folder, "trl")),
        "learning_rate": config.optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": config.lr_scheduler.warmup_steps,
        "max_steps": config.training.steps,
        "num_generations": grpo.group_size,
        "max_completion_length": config.rollout.max_answer_tokens,
        "temperature": config.rollout.temperature,
        "max_grad_norm": config.training.max_norm,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": config.debug.seed or 0,
    }
    at_once = ANSWERS_AT_ONCE
    if kind == "async":  # it packs rows
        longest = max(len(prompt.token_ids) for prompt in task.training) + config.rollout.max_answer_tokens
        at_once = max(1, config.training.tokens_per_microbatch // longest)
    at_once = max(n for n in range(1, min(answers, at_once) + 1) if answers % n == 0)
    settings |= {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": answers // at_once}
    if kind == "async":
        # Its defaults fill rows by tokens, so that answers a step vary, and ask for those of four steps at once.
        return settings | {"vllm_server_base_url": url, "token_budget": 0, "max_inflight_tasks": answers}
    if url == "colocate":
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": config.training.seq_len}
    elif url:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    return settings


def main(kind: str, url: str, words: list[str]) -> int:
    config = load_config(words)
    task = TrlTask(config)
    from datasets import Dataset
    from transformers import TrainerCallback

    if kind == "async":
        from trl.experimental.async_grpo import AsyncGRPOConfig as Config
        from trl.experimental.async_grpo import AsyncGRPOTrainer as Trainer

        mend_async_trainer()
        take_prompts_as_text(task.tokenizer)
        for row in task.rows:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    else:
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Trainer

        mend_server_client()

    class Metrics(TrainerCallback):
        """Writes a line at each of TRL's logs, which come once a step. Evaluations are outside the steps' time."""

        def __init__(self) -> None:
            self._path = Path(config.job.dump_folder, "metrics.jsonl")
            self._since = 0.0

        def on_train_begin(self, args, state, control, model=None, **_):
            self._write({"step": 0} | self._validation(model))

        def on_epoch_begin(self, args, state, control, **_):
            if state.global_step == 0:  # AsyncGRPOTrainer has started its worker since
                self._since = time.monotonic()

        def on_log(self, args, state, control, logs=None, model=None, **_):
            if "train_runtime" in logs:  # the summary at the end
                return
            line = {"step": state.global_step, "time/step_s": time.monotonic() - self._since}
            line["reward/mean"] = logs["reward"]
            line["memory/allocated_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30  # 0 on a CPU
            if "completions/mean_length" in logs:
                answers = config.grpo.prompts_per_step * config.grpo.group_size
                line["rollout/answer_tokens"] = logs["completions/mean_length"] * answers
            if state.global_step % config.validation.freq == 0 or state.global_step == config.training.steps:
                line |= self._validation(model)
            self._write(line)

        def _validation(self, model: Any) -> dict[str, float]:
            packed = model.config._attn_implementation
            model.set_attn_implementation("sdpa")  # AsyncGRPOTrainer's own cannot generate
            reward = task.greedy_reward(model, config.rollout.max_answer_tokens)
            model.set_attn_implementation(packed)
            return {"validation/greedy_reward": reward}

        def _write(self, line: dict[str, float]) -> None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._since = time.monotonic()

    trainer = Trainer(
        model=config.model.hf_assets_path,
        reward_funcs=task.reward,
        args=Config(**settings_of(kind, config, task, url)),
        train_dataset=Dataset.from_list(task.rows),
        processing_class=task.tokenizer,
        callbacks=[Metrics()],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], "" if sys.argv[2] == "-" else sys.argv[2], sys.argv[3:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
