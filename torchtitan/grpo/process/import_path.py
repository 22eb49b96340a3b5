"""Functions that the configuration names by import path."""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.grpo.errors import UserError, did_you_mean, in_words
from torchtitan.grpo.process.stopping import Stopped


def load_function(key: str, name: str, *parameters: str) -> Callable[..., Any]:
    """Import the function that `name`, "module:function", names.

    Args:
        key: The configuration key, as messages show it: "[rollout] environment".
        parameters: Names of the positional arguments that it will be called with.

    Raises:
        UserError: There is no such function, or it does not take these arguments.
    """
    function = import_function(key, name)
    try:
        signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:  # ValueError: a function of C that does not say
        wanted = f"{len(parameters)} arguments ({', '.join(parameters)})"
        raise UserError(f'{key}: "{name}" must take {wanted}: {error}') from error
    return function


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """How it is called. What `functools.wraps` copies says less than a wrapper's own parameters, unless it passes on
    all that it gets.

    Raises:
        ValueError: A function of C that does not say.
    """
    with contextlib.suppress(ValueError):  # a cache of C has no parameters of its own
        own = inspect.signature(function, follow_wrapped=False)
        if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in own.parameters.values()):
            return own
    return inspect.signature(function)


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Like `load_function`, whatever arguments the function takes."""
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise UserError(f'{key}: "{name}" must be "module:function"')
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # a script that is given by its path puts only its own folder there
    try:
        module = importlib.import_module(module_name)
    except Stopped:  # a signal that came meanwhile
        raise
    except SystemExit as error:
        raise UserError(
            f'{key}: "{name}": importing {module_name!r} ended the process by sys.exit({error.code!r}), as where it '
            'reads the command line: move that under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # the user's code may raise anything
        what = f"cannot import {module_name!r}: {in_words(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name:  # Python's own: it names the module
            what = f"{module_name!r} imports {error.name!r}, which is not installed"
            if f"{module_name}.".startswith(f"{error.name}."):
                what = f"no module {error.name!r} in this folder ({here}), on PYTHONPATH or installed"
        raise UserError(f'{key}: "{name}": {what}') from error
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", None) or f"module {module_name!r}"  # a folder has no file
        known = [n for n, value in vars(module).items() if callable(value)]
        suggestion = did_you_mean(function_name, known)
        raise UserError(f'{key}: {where} has no function "{function_name}"{suggestion}')
    return function


@contextlib.contextmanager
def trial(key: str, name: str) -> Iterator[None]:
    """Around a call of such a function before the run: what it raises becomes a UserError that names the key."""
    try:
        yield
    except (UserError, Stopped):  # Stopped: a signal that came meanwhile
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{in_words(error)} ({last.filename}:{last.lineno})"
        raise UserError(f'{key}: "{name}" failed on a trial: {what}') from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine, which is awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def source(function: Callable[..., Any]) -> str:
    """`file:line` where it is defined; "" if it is not written in Python."""
    function = function.func if isinstance(function, functools.partial) else function
    for each in (function, type(function).__call__):
        if code := getattr(inspect.unwrap(each), "__code__", None):
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""
