"""`--check`: the task of a run is read as the run would read it, without GPUs, servers and weights."""

from contextlib import ExitStack
from pathlib import Path

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.machine import check_secrets
from torchtitan.grpo.data.conversations import load_conversations
from torchtitan.grpo.data.overview import overview
from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import resolve_for_run
from torchtitan.grpo.policy import losses
from torchtitan.grpo.run.rollouts import Rollouts


def read_task(config: JobConfig, job: Job) -> list[str]:
    """Data, tokenizer, rewards and environment, in lines of text.

    As in a run, a rollout process reads them. It ends before this returns, however that ends, and its waits are
    bounded as in a run. No folder of the run is made.

    Args:
        config: It names local folders (`hub.fetched`).

    Raises:
        UserError: As the run would refuse data, tokenizer, rewards, environment, or a loss or advantage of one's own.
    """
    if job == "grpo" and (problems := list(check_secrets(config))):
        raise UserError("; ".join(problems))
    source = resolve_for_run(config)
    # One process and worker are enough. What reward functions print goes where this process prints.
    saved = Path(config.job.dump_folder, config.checkpoint.folder).absolute()  # a run that goes on has no warm start
    one = {"job.dump_folder": "", "checkpoint.folder": str(saved), "reward.workers": 1, "rollout.processes": 1}
    config = changed(config, one)
    vocab_size, assets = source.model_args.vocab_size, config.model.hf_assets_path
    tokenizer = load_tokenizer(assets, config.data.chat_template_file, vocab_size)
    end_ids = end_token_ids(tokenizer, assets, vocab_size)
    if job == "sft":
        return overview(*load_conversations(config, tokenizer, vocab_size, end_ids), tokenizer)
    losses.check_functions(config.grpo, torch.device("cpu"))
    with ExitStack() as resources:
        rollouts = Rollouts(config, resources)
        lines = rollouts.read_task(source, tokenizer, end_ids)
        if name := config.rollout.environment:
            lines.append(f"environment: {name} is there, and has played no episode")
        return lines + rollouts.try_rewards()
