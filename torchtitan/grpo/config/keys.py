"""Every TOML key as a flat table: its section, type, default and doc, and the check of one value against its type.

torchtitan's ConfigManager builds dataclasses from TOML without looking at types, so `group_size = "8"` would
fail somewhere in the first step. Here each value is checked against its annotation before that.
"""

import ast
import functools
import inspect
import json
import math
import types
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan.config import ConfigManager
from torchtitan.config import JobConfig as TorchtitanConfig
from torchtitan.grpo.config import job_config
from torchtitan.grpo.errors import nearest

MODULE = job_config.__name__
"""What `job.custom_config_module` is set to."""


@dataclass(frozen=True)
class Key:
    """One TOML key.

    Attributes:
        section: Table it stands in, dotted if nested (`training.dataloader`).
        type: Its annotation.
        default: What it is when left out.
        doc: Why it is there; "" for a key whose meaning is torchtitan's and whose default is too.
        torchtitan: True if torchtitan has this key.
        torchtitan_default: torchtitan's own default, None for a key of this project.
    """

    section: str
    name: str
    type: Any
    default: Any
    doc: str
    torchtitan: bool
    torchtitan_default: Any = None

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def label(self) -> str:
        """How messages name it."""
        return label(self.path)


def label(path: str) -> str:
    """`grpo.group_size` as messages and TOML files show it: `[grpo] group_size`."""
    section, _, name = path.rpartition(".")
    return f"[{section}] {name}"


def merged_config() -> type:
    """torchtitan's JobConfig with this project's keys, as its ConfigManager merges them."""
    return ConfigManager._merge_configs(TorchtitanConfig, job_config.JobConfig)


@functools.cache
def keys() -> dict[str, Key]:
    """All keys by path (`grpo.group_size`), sections in torchtitan's order and then in ours."""
    upstream = {path: value for path, _, value in _leaves(TorchtitanConfig())}
    docs = _docs()
    return {
        path: Key(
            section=path.rpartition(".")[0],
            name=path.rpartition(".")[2],
            type=annotation,
            default=value,
            doc=docs.get(path, ""),
            torchtitan=path in upstream,
            torchtitan_default=upstream.get(path),
        )
        for path, annotation, value in _leaves(merged_config()())
    }


@functools.cache
def sections() -> tuple[str, ...]:
    """All tables, nested ones dotted."""
    names = [key.section.split(".") for key in keys().values()]
    return tuple(dict.fromkeys(".".join(name[: depth + 1]) for name in names for depth in range(len(name))))


def _leaves(config: Any, prefix: str = "") -> Iterable[tuple[str, Any, Any]]:
    """Yield (path, annotation, value) of each field that is no section."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f.type, value


def _docs() -> dict[str, str]:
    """The string under each field of config/job_config.py, by path."""
    classes = {
        node.name: node for node in ast.parse(inspect.getsource(job_config)).body if isinstance(node, ast.ClassDef)
    }
    docs = {}
    for section in fields(job_config.JobConfig):
        name = None
        for node in classes[section.type.__name__].body:
            if isinstance(node, ast.AnnAssign):
                name = node.target.id
            elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docs[f"{section.name}.{name}"] = " ".join(node.value.value.split())
    return docs


class Mismatch(ValueError):
    """A value of the wrong type: the message says what it is, what it must be and what to write."""


def type_name(annotation: Any) -> str:
    """An annotation in the words of a TOML file: `int`, `list[str]`, `"hf" or "random"`, `int or none`."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(option) for option in get_args(annotation))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if origin is list:
        return f"list[{type_name(get_args(annotation)[0])}]"
    return "none" if annotation is type(None) else annotation.__name__


def check_value(value: Any, annotation: Any) -> Any:
    """Return `value` as the annotation has it (an int becomes a float where one is due); raise Mismatch otherwise."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _check_union(value, annotation)
    if origin is Literal:
        return _check_literal(value, annotation)
    if origin is list:
        return _check_list(value, annotation)
    if annotation is type(None):
        if value is None:
            return None
        raise Mismatch(f"{show(value)} is not none")
    if annotation is float and type(value) is int:
        value = float(value)
    if type(value) is not annotation:
        raise Mismatch(f"{show(value)} is {_kind(value)}, not {type_name(annotation)}{_advice(value, annotation)}")
    if annotation is float and not math.isfinite(value):
        raise Mismatch(f"{value} is not a finite number")
    return value


def _check_union(value: Any, annotation: Any) -> Any:
    options = get_args(annotation)
    mismatches = []
    for option in options:
        try:
            return check_value(value, option)
        except Mismatch as error:
            mismatches.append(error)
    if type(None) in options and type(value) is str and value.lower() in ("none", "null", ""):
        raise Mismatch(f"{show(value)} is text, not {type_name(annotation)}: leave the key out for none")
    raise mismatches[0]


def _check_literal(value: Any, annotation: Any) -> Any:
    allowed = get_args(annotation)
    if type(value) is str and value in allowed:
        return value
    near = nearest(str(value).lower(), allowed)
    hint = f' (did you mean "{near}"?)' if near else ""
    raise Mismatch(f"{show(value)} is not allowed: write {type_name(annotation)}{hint}")


def _check_list(value: Any, annotation: Any) -> list[Any]:
    item = get_args(annotation)[0]
    if type(value) is not list:
        raise Mismatch(
            f"{show(value)} is {_kind(value)}, not {type_name(annotation)}: write it in brackets, [{show(value)}]"
        )
    checked = []
    for index, element in enumerate(value):
        try:
            checked.append(check_value(element, item))
        except Mismatch as error:
            raise Mismatch(f"{show(value)} must be {type_name(annotation)}; entry {index}: {error}") from None
    return checked


def show(value: Any) -> str:
    """A value as a TOML file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(show(element) for element in value)}]"
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    return "none" if value is None else str(value)


def _kind(value: Any) -> str:
    words = {
        bool: "a boolean",
        int: "a whole number",
        float: "a fraction",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return words.get(type(value), "none" if value is None else f"a {type(value).__name__}")


def _advice(value: Any, annotation: Any) -> str:
    """What to write instead, where that is plain."""
    if annotation is bool:
        return ": write true or false" + (", without quotes" if type(value) is str else "")
    if annotation is str and type(value) in (int, float, bool):
        return f': write it in quotes, "{show(value)}"'
    if annotation in (int, float) and type(value) is str:
        try:
            annotation(value)
        except ValueError:
            return ""
        return f": write {value}, without quotes"
    if annotation is int and type(value) is float and value.is_integer():
        return f": write {int(value)}"
    return ""
