"""From `[rollout] environment`, and those of held-out sets, to `Environments`."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.job_config import NO_ENVIRONMENT, Data
from torchtitan.grpo.config.tables import table_title
from torchtitan.grpo.errors import UserError, did_you_mean, in_words, renamed
from torchtitan.grpo.process.import_path import import_function, load_function
from torchtitan.grpo.process.stopping import Stopped
from torchtitan.grpo.rollouts.environment import ENDPOINT, KEY, Environment, single_turn
from torchtitan.grpo.rollouts.guarded_environment import Environments, GuardedEnvironment, place

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def loaded_environments(config: JobConfig) -> Iterator[Environments]:
    """The environments of a run, closed at its end: its own, and those of held-out sets if it validates.

    Raises:
        UserError: There is no such environment, its package is not installed, or it does not take these arguments. The
            message names the table.
    """
    rollout = config.rollout
    with contextlib.ExitStack() as stack:

        def guarded(name: str, arguments: dict[str, Any], data: Data, key: str = KEY) -> GuardedEnvironment:
            with renamed(KEY, key):
                environment = load_environment(name, arguments, data.chat_template_kwargs)
            stack.callback(_close, environment, f"{key} = {name!r}")
            return GuardedEnvironment(environment, name, rollout.environment_concurrency, key)

        own = guarded(rollout.environment, rollout.environment_args, config.data)
        of_sets = {}
        for each in config.validation.sets if config.validation.enable else []:
            if each.environment:
                key = f"{table_title('validation.sets', each.name)} environment"
                of_sets[each.name] = guarded(each.environment, each.environment_args, each.data, key)
        yield Environments(own, of_sets)


def _close(environment: Environment, what: str) -> None:
    """What its own code raises must not hide how the run has ended."""
    try:
        getattr(environment, "close", lambda: None)()
    except Exception as error:
        logger.warning("%s cannot be closed: %s", what, in_words(error))


def load_environment(name: str, arguments: dict[str, Any], template_arguments: dict[str, Any]) -> Environment:
    """The environment of this name, `single_turn` if none is named.

    Args:
        template_arguments: `[data] chat_template_kwargs`, which conversations are rendered with.

    Raises:
        UserError: As `loaded_environments`.
    """
    if name in ("", NO_ENVIRONMENT):
        return single_turn
    name = "torchtitan.grpo.endpoint.episodes:rollout" if name == ENDPOINT else name
    kind, _, what = name.partition(":")
    if kind == "verifiers":
        from torchtitan.grpo.environments.verifiers_v1 import VerifiersEnvironment  # only now: it imports verifiers

        return _made(VerifiersEnvironment, name, what, template_arguments, **arguments)
    if kind == "openenv":
        from torchtitan.grpo.environments.openenv import OpenEnvEnvironment

        return _made(OpenEnvEnvironment, name, what, template_arguments, **arguments)
    found = import_function(KEY, name)
    if inspect.isclass(found):
        return _made(found, name, **arguments)
    if not arguments:
        return load_function(KEY, name, "client", "prompt")
    _check_arguments(found, name, "client", "prompt", **arguments)
    return partial(found, **arguments)


def _made(make: Callable[..., Any], name: str, *positional: Any, **arguments: Any) -> Environment:
    """An instance of an environment's class."""
    _check_arguments(make, name, *positional, **arguments)
    try:
        environment = make(*positional, **arguments)
    except UserError:
        raise
    except Stopped:  # a signal that came meanwhile
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(f'{KEY}: "{name}" raised {in_words(error)} ({place(error)})') from error
    _check_arguments(environment, name, "client", "prompt")
    return environment


def _check_arguments(function: Any, name: str, *positional: Any, **arguments: Any) -> None:
    """Refuse arguments that the environment does not take, and those that it lacks."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # no function, or one of C that does not say
        raise UserError(f'{KEY}: "{name}" must be callable with (client, prompt): {error}') from error
    by_name = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.POSITIONAL_ONLY]
    known = [each.name for each in by_name if each.name not in positional]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in by_name)
    unknown = [each for each in arguments if each not in known]
    if unknown and not takes_any:
        raise UserError(
            f'[rollout] environment_args has "{unknown[0]}", which {name} does not take'
            f"{did_you_mean(unknown[0], known)}: it takes {', '.join(known) or 'none'}"
        )
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise UserError(f'{KEY}: "{name}" with [rollout] environment_args = {list(arguments)}: {error}') from error
