"""A run of `[ray]` from the driver's side: attempts, each with ranks of its own."""

import inspect
import itertools
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import ray

from torchtitan.config import JobConfig
from torchtitan.grpo.config.hub import CONFIG, fetched, named
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.machine import check_ranks
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.stopping import SAVING_SHARE, Stopped, asks_first, stop_in_time
from torchtitan.grpo.run.ray.cluster import NO_PLAN, Cluster, Ranks
from torchtitan.grpo.run.ray.dispatch import MARGIN_S, Dispatch, RemoteCalls, compiled_or_remote
from torchtitan.grpo.run.ray.outcome import FAILED, RanksFailed, error_of
from torchtitan.grpo.run.ray.rank import BEGIN, FINISH, WARM_UP
from torchtitan.grpo.run.ray.servers import Servers
from torchtitan.grpo.run.ray.watch import Watch

logger = logging.getLogger(__name__)
_CLOSING_S = 10.0
"""What the driver needs after its ranks have stopped."""


def train_in_attempts(argv: list[str], config: JobConfig, make: Callable[[JobConfig], Any], job: Job) -> int:
    """Train in Ray actors. A failed attempt is followed by another, from the newest checkpoint, `max_restarts` times.

    Args:
        argv: The command line without the program's name; every rank reads it.
        make: The trainer's class. Ranks import it by its name.
        job: What it reads of the configuration.

    Returns:
        The exit status.

    Raises:
        UserError: The cluster does not suit the configuration, or a rank refused it.
        Stopped: The run was asked to stop, or the last attempt failed.
    """
    stop_in_time((config.checkpoint.stop_seconds + _CLOSING_S) / SAVING_SHARE)
    restarts = config.ray.max_restarts if config.checkpoint.enable else 0
    plan, model = NO_PLAN, fetched(config, data=False, files=CONFIG).model.hf_assets_path
    if named(model) != model:  # ranks and servers of all nodes and attempts take the same commit
        argv = with_flags(argv, {"model.hf_assets_path": named(model)})
    for attempt in itertools.count(1):
        try:
            # A cluster of the run's own is new too: its control processes may be what has failed.
            servers = Servers(config)
            with Cluster(config, plan, servers) as cluster:
                plan = cluster.plan
                if problems := list(check_ranks(config, plan[0], job)):
                    raise UserError("; ".join(problems))
                with closing(servers):  # the last to go
                    _attempt(cluster, config, argv, import_path(make), job)
            break
        except RanksFailed as error:
            if attempt > restarts:
                raise Stopped(FAILED, f"error: {error}") from error
            logger.warning(f"{error}\nRestart {attempt} of {restarts}: from the newest checkpoint, if any")
        argv = with_flags(argv, {"checkpoint.resume": "auto", "checkpoint.load_step": "-1"})
    return 0


def _attempt(cluster: Cluster, config: JobConfig, argv: list[str], make: str, job: Job) -> None:
    ranks = cluster.start_ranks(argv, make, job)
    with ExitStack() as stack:
        stack.callback(ranks.release)
        watch = stack.enter_context(Watch(ranks.agents, config))
        stack.enter_context(asks_first(watch.stop))
        try:
            outcomes = _run(ranks, config, stack)
        except SystemExit:  # a second signal: they cannot close a graph while they train
            ranks.kill()
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            found = watch.explain(error)
            if watch.stopping and isinstance(found, RanksFailed):  # no restart
                raise Stopped(FAILED, f"stopped without saving: {found}") from error
            raise found from error
        if wrong := error_of(outcomes):
            raise wrong


def _run(ranks: Ranks, config: JobConfig, stack: ExitStack) -> dict[int, dict[str, Any]]:
    """Run to the end; how each rank ended."""
    limit_s = config.debug.hang_seconds
    start_s = max(limit_s, config.rollout.start_timeout_seconds) + MARGIN_S
    if _all_go_on(ray.get(ranks.started, timeout=start_s)):
        if config.ray.dispatch == "loop":
            ray.get([actor.train.remote() for actor in ranks.actors])
        else:
            dispatch: Dispatch = RemoteCalls(ranks.actors, limit_s)
            if config.ray.dispatch == "compiled":
                dispatch = compiled_or_remote(ranks.actors, ranks.nodes, ranks.agents, limit_s)
            stack.callback(dispatch.close)
            step_by_step(dispatch, config)
            dispatch.close()
    return dict(enumerate(ray.get([actor.close.remote() for actor in ranks.actors])))


def step_by_step(dispatch: Dispatch, config: JobConfig) -> None:
    """`Trainer.train`, with every call from here, until it is done or a rank has ended."""
    answers = dispatch.call(BEGIN)
    if config.ray.dispatch == "compiled" and _all_go_on(answers):
        answers = dispatch.call(WARM_UP)
    while _all_go_on(answers) and answers[0] < config.training.steps:
        answers = dispatch.call(answers[0] + 1)
    if _all_go_on(answers):
        dispatch.call(FINISH)


def _all_go_on(answers: list[Any]) -> bool:
    return all(isinstance(answer, int) for answer in answers)


def import_path(make: Callable[[JobConfig], Any]) -> str:
    """`module:name`, also of what the script that runs defines."""
    module = make.__module__
    if module == "__main__":
        script = Path(inspect.getfile(make)).resolve()
        module = script.stem
        if str(script.parent) not in sys.path:
            sys.path.append(str(script.parent))  # the ranks get this list
    return f"{module}:{make.__qualname__}"


def with_flags(argv: list[str], flags: dict[str, str]) -> list[str]:
    """A command line with these flags in place of what it says about them."""
    kept: list[str] = []
    dropping = False
    for word in argv:
        if word.startswith("--"):
            section, _, name = word[2:].partition("=")[0].replace("-", "_").rpartition(".")
            dropping = f"{section}.{name.removeprefix('no_')}" in flags
        if not dropping:
            kept.append(word)
    return [*kept, *(word for name, value in flags.items() for word in (f"--{name}", value))]
