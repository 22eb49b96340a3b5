"""What a training script does with its command line."""

import os
from collections.abc import Callable

from torchtitan.config import JobConfig
from torchtitan.grpo.config.hub import CONFIG, fetched
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.load import load_config, take_dry_run
from torchtitan.grpo.config.machine import check_launch
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.errors import PlainError, refuse
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.run.run import Run
from torchtitan.grpo.run.running import running


def run_job(argv: list[str], make: Callable[[JobConfig], Run], job: Job) -> int:
    """A dry run, a run in this process, or one in Ray's.

    Args:
        make: The script's trainer.

    Returns:
        The exit status.
    """
    try:
        dry_run, argv = take_dry_run(argv)
        check_launch(dry_run is not None)
        init_log_lines()
        config = load_config(argv, dry_run, job)
        if dry_run is not None:
            if os.environ.get("RANK", "0") == "0":
                print(describe(fetched(config, data=False, files=CONFIG), dry_run=dry_run, job=job), end="")
            return 0
        if config.ray.enable:
            from torchtitan.grpo.run.ray.driver import drive  # only now: it imports Ray

            return drive(argv, config, make, job)
        with running(config, make) as trainer:
            trainer.train()
    except PlainError as error:
        return refuse(error)
    return 0
