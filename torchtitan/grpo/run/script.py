"""What a training script does with its command line."""

import os
from collections.abc import Callable

from torchtitan.config import JobConfig
from torchtitan.grpo.config.hub import CONFIG, TEXTS, fetched
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.load import DryRun, load_config, take_dry_run
from torchtitan.grpo.config.machine import check_launch
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.errors import PlainError, refuse
from torchtitan.grpo.process.log_lines import init_log_lines, stdout_to_stderr
from torchtitan.grpo.run.run import Run
from torchtitan.grpo.run.running import running


def run_job(argv: list[str], make: Callable[[JobConfig], Run], job: Job) -> int:
    """A dry run or a check, a run in this process, or one in Ray's.

    Args:
        make: The script's trainer.

    Returns:
        The exit status.
    """
    try:
        asked, argv = take_dry_run(argv)
        check_launch(asked is not None)
        init_log_lines()
        if asked is not None:
            with stdout_to_stderr():
                text = _planned(argv, asked, job)
            print(text, end="")
            return 0
        config = load_config(argv, job=job)
        if config.ray.enable:
            from torchtitan.grpo.run.ray.driver import drive  # only now: it imports Ray

            return drive(argv, config, make, job)
        with running(config, make) as trainer:
            trainer.train()
    except PlainError as error:
        return refuse(error)
    return 0


def _planned(argv: list[str], asked: DryRun, job: Job) -> str:
    """What a dry run or a check prints on rank 0."""
    config, task = load_config(argv, asked.target, job), []
    if os.environ.get("RANK", "0") != "0":
        return ""
    config = fetched(config, data=asked.check, files=TEXTS if asked.check else CONFIG)
    if asked.check:
        from torchtitan.grpo.run.check import read_task  # only now: it imports all that reads a task

        task = read_task(config, job)
    return describe(config, dry_run=asked.target, job=job, full=asked.full, task=task)
