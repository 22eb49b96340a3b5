"""From `[rollout] environment` and its arguments to an `Environment`."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchtitan.grpo.config.job_config import Data, Rollout
from torchtitan.grpo.data.load import Make
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.grpo.import_path import import_function, load_function
from torchtitan.grpo.rollouts.environment import ENDPOINT, Environment, rows_of, single_turn
from torchtitan.grpo.rollouts.guarded_environment import place

KEY = "[rollout] environment"


@contextlib.contextmanager
def loaded_environment(rollout: Rollout, data: Data) -> Iterator[Environment]:
    """The environment of a run, closed at its end. It is `single_turn` if none is named.

    Args:
        data: Says how conversations are rendered.

    Raises:
        UserError: There is no such environment, its package is not installed, or it does not take these arguments.
    """
    environment: Environment = single_turn
    if rollout.environment:
        environment = _load(rollout.environment, rollout.environment_args, data.template_arguments)
    try:
        yield environment
    finally:
        getattr(environment, "close", lambda: None)()


def prompt_source(environment: Environment) -> Make:
    """`PromptSource`, which also knows the rows that the environment brings."""
    return partial(PromptSource, of_environment=rows_of(environment))


def _load(name: str, arguments: dict[str, Any], template_arguments: dict[str, Any]) -> Environment:
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
    except Exception as error:  # the user's code may raise anything
        raise UserError(f'{KEY}: "{name}" raised {type(error).__name__}: {error} ({place(error)})') from error
    _check_arguments(environment, name, "client", "prompt")
    return environment


def _check_arguments(function: Any, name: str, *positional: Any, **arguments: Any) -> None:
    """Refuse arguments that the environment does not take, and those that it lacks."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # no function, or one of C that does not say
        raise UserError(f'{KEY}: "{name}" must be callable with (client, prompt): {error}') from error
    known = [each.name for each in signature.parameters.values() if each.name not in positional]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
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
