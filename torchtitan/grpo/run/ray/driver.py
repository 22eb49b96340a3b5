"""`drive`: what precedes the first import of Ray, which reads its environment then."""

import os
from collections.abc import Callable
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.errors import UserError

_FOR_RAY = {"RAY_DEDUP_LOGS": "0"}
"""Without it a line that several ranks write is held back."""
_FOR_OWN_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
}
"""It reports to nobody, and listens on the loopback address only, as Ray's clusters on Windows and macOS do. Workers
run at niceness 0: at 15, Ray's default, Linux weighs a rank at 36 against 1,024 for other work."""


def drive(argv: list[str], config: JobConfig, make: Callable[[JobConfig], Any], job: Job) -> int:
    """Train in Ray actors, as `[ray]` says; see `train_in_attempts`.

    Raises:
        UserError: torchrun has started this process.
    """
    if launched := sorted({"RANK", "WORLD_SIZE"} & os.environ.keys()):
        raise UserError(
            f"[ray] enable = true, and {launched[0]} is set, as by torchrun: start one process by `python`, or set "
            "enable = false"
        )
    for name, value in (_FOR_RAY | ({} if config.ray.address else _FOR_OWN_CLUSTER)).items():
        os.environ.setdefault(name, value)
    from torchtitan.grpo.run.ray.attempts import train_in_attempts

    return train_in_attempts(argv, config, make, job)
