"""Has a trainer fork its first rollout process. One that takes the place of another is started as users' are.

With STARTED_ROLLOUTS in the environment, only the one of this number is, and 0 is none. The others are forked from the
process that all ranks are forked from: a trainer that trains has threads, and a fork of it has their locks.
"""

import os

from tests.helpers.forked_rollouts import ForkedBesides, fork
from torchtitan.grpo.run import rollout_process

_start = rollout_process.start


def start(descriptor, *how):
    start.count += 1
    if start.count == 1:
        return fork(descriptor, *how)
    if os.environ.get("STARTED_ROLLOUTS", str(start.count)) == str(start.count):
        return _start(descriptor, *how)
    return ForkedBesides(descriptor)


start.count = 0
rollout_process.start = start
