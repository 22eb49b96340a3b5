"""Functions that the configuration names by import path."""

import importlib
import inspect
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
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise UserError(f'{key}: "{name}" must be "module:function"')
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError) as error:  # ValueError: not a module name, such as "."
        raise UserError(f'{key}: "{name}": cannot import {module_name!r}: {error}') from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value)]
        suggestion = did_you_mean(function_name, known)
        raise UserError(f'{key}: {module.__file__} has no function "{function_name}"{suggestion}')
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        wanted = f"{len(parameters)} arguments ({', '.join(parameters)})"
        raise UserError(f'{key}: "{name}" must take {wanted}: {error}') from error
    return function
