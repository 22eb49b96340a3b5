"""One run of verl's GRPO, with vLLM on the trainer's GPU, on the job of a configuration of grpo_train.py.

    python verl_run.py --job.config_file ... [--section.key value ...]

`learning.py verl` starts it. Model, prompts, rewards, answers a step, their length, temperature, learning rate, warm-up
and seed are the configuration's; the loss and everything else are verl's defaults, but for what `overrides` says. It
writes metrics.jsonl with the names of grpo_train.py. A step's time is that between two lines of verl's log, so its
checks of data between steps count. Held-out questions are answered greedily by verl's vLLM, outside the measured time.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_common import BENCH
from learning_bench.task import Task

from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError

SOURCE = "task"
"""verl names its validation's metrics by it."""
POLL_S = 0.05


def rows(prompts: Any) -> list[dict[str, Any]]:
    """verl's columns. The prompt is rendered already."""
    return [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": prompt.text}],
            "reward_model": {"style": "rule", "ground_truth": prompt.answer},
            "extra_info": {"index": prompt.index, "columns": json.dumps(prompt.columns)},
        }
        for prompt in prompts
    ]


def overrides(config: Any, task: Task, folder: Path) -> dict[str, Any]:
    """verl's keys. Without flash-attn's CUDA kernels attention is torch's, and rows are padded."""
    packed = importlib.util.find_spec("flash_attn_2_cuda") is not None
    actor, rollout, correct = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "reward.custom_reward_function."
    return {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "held_out.parquet",
        "data.shuffle": False,
        "data.train_batch_size": config.grpo.prompts_per_step,
        "data.max_prompt_length": max(len(p.token_ids) for p in [*task.training, *task.held_out.prompts]),
        "data.max_response_length": config.rollout.max_answer_tokens,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": Path(config.model.hf_assets_path).resolve(),
        "actor_rollout_ref.model.custom_chat_template": "\"{{ messages[0]['content'] }}\"",
        "+actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2" if packed else "sdpa",
        "actor_rollout_ref.model.use_remove_padding": packed,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}optim.lr": config.optimizer.lr,
        f"{actor}optim.lr_warmup_steps": config.lr_scheduler.warmup_steps,
        f"{actor}grad_clip": config.training.max_norm,
        f"{actor}ppo_mini_batch_size": config.grpo.prompts_per_step,  # one update a step
        f"{actor}use_dynamic_bsz": True,
        f"{actor}ppo_max_token_len_per_gpu": config.training.tokens_per_microbatch,
        f"{rollout}name": "vllm",
        f"{rollout}n": config.grpo.group_size,
        f"{rollout}temperature": config.rollout.temperature,
        f"{rollout}tensor_model_parallel_size": 1,
        f"{rollout}seed": config.debug.seed or 0,
        f"{correct}path": BENCH / "learning_bench" / "verl_reward.py",
        f"+{correct}reward_kwargs.function": task.function,
        f"+{correct}reward_kwargs.pattern": f"'{task.pattern}'",
        "trainer.logger": "[file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": config.training.steps,
        "trainer.test_freq": config.validation.freq,
        "trainer.default_local_dir": folder / "checkpoints",
    }


def line(found: dict[str, Any], seconds: float, answers: int) -> dict[str, float]:
    """A line of verl's log with our names.

    Args:
        found: {"step": ..., "data": verl's metrics}.
        seconds: Since the line before.
        answers: Of a step.
    """
    step, data = found["step"], found["data"]
    made = {"step": step}
    if step > 0:
        made |= {"time/step_s": seconds, "reward/mean": data["critic/score/mean"]}
        made |= {"time/validate_s": data.get("timing_s/testing", 0.0)}
        made |= {"rollout/answer_tokens": data["response_length/mean"] * answers}
        made |= {"memory/allocated_peak_gib": data["actor/perf/max_memory_allocated_gb"]}
    rewards = [value for name, value in data.items() if name.startswith(f"val-core/{SOURCE}/")]
    return made | ({"validation/greedy_reward": rewards[0]} if rewards else {})


def main(words: list[str]) -> int:
    import pandas

    config = load_config(words)
    task, folder = Task(config), Path(config.job.dump_folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows(task.training)).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows(task.held_out.prompts)).to_parquet(folder / "held_out.parquet")
    log, answers = folder / "verl.jsonl", config.grpo.prompts_per_step * config.grpo.group_size
    flags = [f"{name}={value}" for name, value in overrides(config, task, folder).items()]
    path = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))  # of verl_reward.py's imports
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(log), "VLLM_PLUGINS": "none", "PYTHONPATH": path}
    trainer = subprocess.Popen([sys.executable, "-m", "verl.trainer.main_ppo", *flags], env=environment, cwd=folder)
    done, since = 0, time.monotonic()
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as out:
        while True:
            status = trainer.poll()  # before the last look
            found = log.read_bytes().splitlines(keepends=True)[done:] if log.exists() else []
            for text in found:
                if text.endswith(b"\n"):
                    now = time.monotonic()
                    out.write(json.dumps(line(json.loads(text), now - since, answers)) + "\n")
                    out.flush()
                    done, since = done + 1, now
            if status is not None:
                return status
            time.sleep(POLL_S)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
