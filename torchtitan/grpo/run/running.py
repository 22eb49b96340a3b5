"""A trainer inside everything that a process needs around it, whoever started the process."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.checkpointer import complete_steps
from torchtitan.grpo.config.frozen import freeze
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.load import load_config, take_dry_run
from torchtitan.grpo.config.machine import check_launch, default_to_one_process, one_cpu_thread, raise_file_limit
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.errors import PlainError, refuse
from torchtitan.grpo.process.disk_full import disk_full_in_one_line
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.stopping import stop_in_time
from torchtitan.grpo.run.run import Run
from torchtitan.grpo.run.save_when_stopped import save_when_stopped

T = TypeVar("T", bound=Any)


def run_job(argv: list[str], make: Callable[[JobConfig], Run], job: Job) -> int:
    """What a script does with its command line: a dry run, a run in this process, or one in Ray's.

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
            print(describe(config, dry_run=dry_run, job=job) if os.environ.get("RANK", "0") == "0" else "", end="")
            return 0
        if config.ray.enable:
            from torchtitan.grpo.run.ray.driver import drive  # only now: it imports Ray

            return drive(argv, config, make, job)
        with running(config, make) as trainer:
            trainer.train()
    except PlainError as error:
        return refuse(error)
    return 0


@contextlib.contextmanager
def running(config: JobConfig, make: Callable[[JobConfig], T]) -> Iterator[T]:
    """What `make` makes of the configuration, for as long as it trains. Call it from the main thread.

    The configuration does not change any more.

    Signals are heard from here on, and the run that gets one saves before it stops. Leaving releases everything.

    Raises:
        UserError: The configuration does not fit the machine, the servers or the data; or the disk is full.
        Stopped: The run was asked to stop.
    """
    freeze(config)
    default_to_one_process()
    stop_in_time(config.checkpoint.stop_seconds)
    raise_file_limit()
    one_cpu_thread()
    dump = Path(config.job.dump_folder)
    saved = partial(complete_steps, dump / config.checkpoint.folder)
    with disk_full_in_one_line(dump, saved), make(config) as trainer, save_when_stopped(trainer):
        yield trainer
