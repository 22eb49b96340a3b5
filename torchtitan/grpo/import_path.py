"""Functions that the configuration names by import path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torchtitan.grpo.errors import UserError, did_you_mean


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
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:  # ValueError: a function of C that does not say
        wanted = f"{len(parameters)} arguments ({', '.join(parameters)})"
        raise UserError(f'{key}: "{name}" must take {wanted}: {error}') from error
    return function


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Like `load_function`, whatever arguments the function takes."""
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise UserError(f'{key}: "{name}" must be "module:function"')
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # a script that is given by its path puts only its own folder there
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f'{key}: "{name}": {module_name!r} imports {error.name!r}, which is not installed'
            ) from error
        raise UserError(
            f'{key}: "{name}": no module {error.name!r} in this folder ({here}), on PYTHONPATH or installed'
        ) from error
    except Exception as error:  # the user's code may raise anything
        what = f"{type(error).__name__}: {error}"
        raise UserError(f'{key}: "{name}": cannot import {module_name!r}: {what}') from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value)]
        suggestion = did_you_mean(function_name, known)
        raise UserError(f'{key}: {module.__file__} has no function "{function_name}"{suggestion}')
    return function
