"""A trainer inside everything that a process needs around it, whoever started the process."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.marker import complete_steps
from torchtitan.grpo.config.frozen import freeze
from torchtitan.grpo.config.machine import default_to_one_process, one_cpu_thread, raise_file_limit
from torchtitan.grpo.process.disk_full import disk_full_in_one_line
from torchtitan.grpo.process.stopping import stop_in_time
from torchtitan.grpo.run.save_when_stopped import save_when_stopped

T = TypeVar("T", bound=Any)


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
