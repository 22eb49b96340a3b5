"""Has a trainer fork its first rollout process. One that takes the place of another is started as users' are."""

from tests.helpers.forked_rollouts import fork
from torchtitan.grpo.run import rollout_process

_start = rollout_process.start


def start(*arguments):
    start.count += 1
    return fork(*arguments) if start.count == 1 else _start(*arguments)


start.count = 0
rollout_process.start = start
