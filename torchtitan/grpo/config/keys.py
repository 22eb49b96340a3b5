"""Every TOML key as a flat table, and the checks of one value: its type and its range.

torchtitan's ConfigManager builds dataclasses from TOML without looking at types, so `group_size = "8"` would
fail somewhere in the first step. Here each value is checked against its annotation first.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from torchtitan.grpo.config import job_config
from torchtitan.grpo.config.ranges import ImportPath, Needs, Range
from torchtitan.grpo.config.torchtitan_keys import TORCHTITAN_TEXTS
from torchtitan.grpo.errors import did_you_mean, shortened

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

MODULE = job_config.__name__
"""Value of `job.custom_config_module`."""
LARGEST = 10**9
"""The end of ranges that state none. What is larger is a mistake, and overflows where it is used."""
TABLES = {
    "data.mixture": ("mixture", "curriculum", "chat_template_file"),
    "validation.sets": (
        "mixture",
        "curriculum",
        "chat_template_file",
        "shuffle",
        "validation_path",
        "validation_split",
    ),
}
"""Keys whose value is a list of tables, `[[data.mixture]]`. A table may also hold keys of [data], except for these."""
_CLASSES = {"data.mixture": job_config.MixtureSource, "validation.sets": job_config.HeldOutSet}
_RESOLVED = ("data", "given")
"""Fields of a table that are no keys."""


@dataclass(frozen=True)
class Key:
    """One TOML key.

    Attributes:
        section: Its table, dotted if nested (`training.dataloader`).
        type: Its annotation, without range and needs.
        range: The interval of a number, None if it has none.
        needs: The keys without which it is not read.
        default: Its value when left out.
        doc: Its meaning and the reason for its default; "" for a key without effect.
        torchtitan: True if torchtitan has this key.
        torchtitan_default: torchtitan's own default, None for a key of this project.
    """

    section: str
    name: str
    type: Any
    range: Range | None
    needs: tuple[Needs, ...]
    default: Any
    doc: str
    torchtitan: bool
    torchtitan_default: Any = None

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def meaning(self) -> str:
        """Its text in docs/configuration.md and `--help`."""
        needs = " and ".join(f"`{needed(each)}`" for each in self.needs)
        return f"{self.doc} Only with {needs}." if needs else self.doc


def label(path: str) -> str:
    """`grpo.group_size` as messages and TOML files show it: `[grpo] group_size`."""
    section, _, name = path.rpartition(".")
    return f"[{section}] {name}"


@functools.cache
def merged_config() -> type[JobConfig]:
    """torchtitan's JobConfig with this project's sections. Making its dataclasses takes longer than checking a file."""
    from torchtitan.config import ConfigManager, JobConfig  # only now: they import torch

    return ConfigManager._merge_configs(JobConfig, job_config.JobConfig)


@functools.cache
def keys() -> dict[str, Key]:
    """All keys by path (`grpo.group_size`): torchtitan's sections in its order, then ours."""
    from torchtitan.config import JobConfig

    upstream = {path: value for path, _, value in _leaves(JobConfig())}
    docs = _docs() | TORCHTITAN_TEXTS
    table = {}
    for path, annotation, value in _leaves(merged_config()()):
        section, _, name = path.rpartition(".")
        doc = docs.get(path, "")
        table[path] = Key(section, name, *_split(annotation), value, doc, path in upstream, upstream.get(path))
    return table


@functools.cache
def sections() -> tuple[str, ...]:
    """All tables, nested ones dotted."""
    names = [key.section.split(".") for key in keys().values()]
    return tuple(dict.fromkeys(".".join(name[: depth + 1]) for name in names for depth in range(len(name))))


@functools.cache
def table_keys(path: str, own_only: bool = False) -> dict[str, Key]:
    """Keys of one table of TABLES by name: its own, then those of [data] that it may replace. The former need no
    torch, which the latter import."""
    table, docs = _CLASSES[path], _docs()
    own = {
        f.name: Key(path, f.name, *_split(f.type), getattr(table(), f.name), docs[f"{path}.{f.name}"], False)
        for f in fields(table)
        if f.name not in _RESOLVED
    }
    if own_only:
        return own
    of_data = {key.name: key for key in keys().values() if key.section == "data" and key.name not in TABLES[path]}
    return of_data | own


def _leaves(config: Any, prefix: str = "") -> Iterable[tuple[str, Any, Any]]:
    """Yield (path, annotation, value) of each field that is not a section."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f.type, value


def _split(annotation: Any) -> tuple[Any, Range | None, tuple[Needs, ...]]:
    """`Annotated[int, Range(at_least=2), Needs("lora.enable")]` as its type, its range and its needs. A tuple of names
    among the marks makes the type a Literal of these."""
    if get_origin(annotation) is not Annotated:
        return annotation, None, ()
    bare, *marks = get_args(annotation)
    names = next((mark for mark in marks if isinstance(mark, tuple)), None)
    allowed = next((mark for mark in marks if isinstance(mark, Range)), None)
    return Literal[names] if names else bare, allowed, tuple(mark for mark in marks if isinstance(mark, Needs))


@functools.cache
def _docs() -> dict[str, str]:
    """The string below each field of the sections in config/job_config.py, by path."""
    of_path: dict[str, Any] = {section.name: section.type for section in fields(job_config.JobConfig)}
    of_path |= _CLASSES
    # Each file once: `inspect.getsource` of a class parses the whole file.
    bodies = {
        (module, node.name): node.body
        for module in {section.__module__ for section in of_path.values()}
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }
    docs = {}
    for path, section in of_path.items():
        name = None
        for node in bodies[section.__module__, section.__name__]:
            if isinstance(node, ast.AnnAssign):
                name = node.target.id
            elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docs[f"{path}.{name}"] = " ".join(str(node.value.value).split())
    return docs


class Mismatch(ValueError):
    """A value of the wrong type. The message says what it is, what it must be and what to write."""


def type_name(annotation: Any) -> str:
    """An annotation in the words of a TOML file: `int`, `list[str]`, `"hf" or "random"`, `int or none`."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(option) for option in get_args(annotation))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if annotation is ImportPath:
        return '"module:function"'
    if origin is list:
        return f"list[{type_name(get_args(annotation)[0])}]"
    if is_dataclass(annotation) or annotation is dict:
        return "table"
    return "none" if annotation is type(None) else annotation.__name__


def check_value(value: Any, annotation: Any) -> Any:
    """Return `value` if it is of the annotated type; an int becomes a float where one is due.

    Raises:
        Mismatch: It is of another type, or not finite.
    """
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _check_union(value, annotation)
    if origin is Literal:
        return _check_literal(value, annotation)
    if origin is list:
        return _check_list(value, annotation)
    if annotation is ImportPath:
        if isinstance(value, str) and ImportPath.is_one(value):
            return value
        raise Mismatch(f"{show(value)} is not {type_name(annotation)}")
    if annotation is type(None):
        if value is None:
            return None
        raise Mismatch(f"{show(value)} is not none")
    if annotation is float and type(value) is int and abs(value) <= LARGEST:
        value = float(value)
    if type(value) is not annotation:
        raise Mismatch(f"{show(value)} is {_kind(value)}, not {type_name(annotation)}{_advice(value, annotation)}")
    if annotation is float and not math.isfinite(value):
        raise Mismatch(f"{value} is not a finite number")
    if annotation is str and "\0" in value:
        raise Mismatch(f"{show(value)} holds a NUL character")
    if annotation is dict:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Mismatch(f"{show(value)} holds what JSON has no value for ({error}): write it as text") from None
        if _holds_null(value):
            raise Mismatch(f"{show(value)} holds null, for which TOML has no value: leave it out")
    return value


def _holds_null(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_holds_null, inner))


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
    if literals := [option for option in options if get_origin(option) is Literal]:
        written = ["true, false" if option is bool else type_name(option) for option in options]
        hint = did_you_mean(str(value).lower(), get_args(literals[0]))
        raise Mismatch(f"{show(value)} is not allowed: write {' or '.join(written)}{hint}")
    raise mismatches[0]


def _check_literal(value: Any, annotation: Any) -> Any:
    allowed = get_args(annotation)
    if type(value) is str and value in allowed:
        return value
    hint = did_you_mean(str(value).lower(), allowed)
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


def check_ranges(config: JobConfig) -> list[str]:
    """Name each number that is outside its range, and say what the range is."""
    problems = ((key, range_problem(key, attrgetter(key.path)(config))) for key in keys().values())
    return [f"{label(key.path)} = {problem}" for key, problem in problems if problem]


def range_problem(key: Key, value: Any) -> str:
    """What is wrong with a number that is outside the key's range, "" if nothing is. No number is over LARGEST."""
    if key.range is None or value is None:
        return ""
    if value not in key.range:
        return f"{show(value)} must be {key.range}" + (f" ({key.range.why})" if key.range.why else "")
    if key.range.at_most is None and key.range.below is None and value > LARGEST:
        return f"{show(value)} must be at most {LARGEST}, as every number"
    return ""


def unread(value_of: Callable[[str], Any], of: Iterable[Key]) -> Iterator[str]:
    """Name each key that is set without one that it needs, and say what to set.

    Args:
        value_of: Gives a key's value by its path.
        of: The keys to check.
    """
    for key in of:
        value = value_of(key.path)
        lacking = [each for each in key.needs if not each.met_by(value_of(each.key))]
        if not lacking or value == key.default:
            continue
        shown = "..." if key.name.endswith("_key_env") else show(value)  # it may be the key itself
        now = f", not {show(value_of(lacking[0].key))}" * bool(lacking[0].values)
        why = f" ({lacking[0].why})" * bool(lacking[0].why)
        yield (
            f"{label(key.path)} = {shown} is read with {needed(lacking[0])} only{now}{why}: set that, or leave it out"
        )


def needed(needs: Needs) -> str:
    """What a key needs, as messages and the documentation name it: `[lora] enable = true`."""
    annotation = keys()[needs.key].type
    if needs.values:
        return f"{label(needs.key)} = {' or '.join(toml(value) for value in needs.values)}"
    return label(needs.key) + (" = true" if annotation is bool else " over 0" if annotation in (int, float) else "")


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        unicode = value.encode(errors="backslashreplace").decode()  # a flag's bytes may be of another encoding
        return json.dumps(unicode, ensure_ascii=False).replace("\x7f", r"\u007f")  # which JSON may hold as it is
    if isinstance(value, list):
        return f"[{', '.join(toml(element) for element in value)}]"
    if isinstance(value, dict):
        entries = [f"{toml(name)} = {toml(element)}" for name, element in value.items()]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    return "none" if value is None else str(value)


def show(value: Any) -> str:
    """A value as TOML writes it, in a message: the end of a long one is left out."""
    return shortened(toml(value))


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
    """What to write instead, if that is clear."""
    if annotation is bool:
        return ": write true or false" + (", without quotes" if type(value) is str else "")
    if annotation is dict and type(value) in (list, str):
        return ': write { name = value } in a file, {"name": value} as a flag'
    if annotation is str and type(value) in (int, float, bool):
        return f': write it in quotes, "{show(value)}"'
    if annotation in (int, float) and type(value) is str:
        try:
            annotation(value)
        except ValueError:
            return ""
        return f": write {shortened(value)}, without quotes"
    if annotation is int and type(value) is float and value.is_integer():
        return f": write {int(value)}"
    return ""
