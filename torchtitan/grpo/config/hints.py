"""What an unknown key, section or flag may mean, for the message that refuses it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.grpo.config.earlier import GONE
from torchtitan.grpo.config.keys import keys, label, sections, shortened
from torchtitan.grpo.config.other_trainers import NOT_THE_POLICY, entry_of
from torchtitan.grpo.config.unsupported import honoured_keys, unsupported_by
from torchtitan.grpo.errors import nearest

_REFUSED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Sampling parameters of servers that training cannot have. Their sections do not matter."""
_WHY = (
    "would sample from probabilities that the loss does not know: its ratios would be wrong, so change the reward "
    "instead"
)


def unknown_name(section: str, name: str, value: Any) -> str:
    """Message for an unknown key or section of a TOML file.

    Args:
        section: Where it stands, "" at the top.
        value: A table, or a list of tables, makes it a section.
    """
    path = f"{section}.{name}" if section else name
    table = value[0] if isinstance(value, list) and value else value
    if isinstance(table, dict):
        near = nearest(path, {key.section for key in honoured_keys()})
        hint = f"did you mean [{near}]?" if near else "docs/configuration.md lists all sections"
        if not near or not any(f"{near}.{name}" in keys() for name in table):
            hint = _keys_in(table, path) or hint
        return f"unknown section [{shortened(path)}]: {hint}"
    if path in GONE:
        return f"{label(path)} is a key of an earlier version: {GONE[path]}"
    if name in _REFUSED and not _is_elsewhere(path):
        return f"{label(path) if section else name} {_WHY}"
    what = f"[{section}] {shortened(name)}" if section else f"{shortened(name)} outside any section"
    return f"unknown key {what}: {_meant(path, label)}"


def unknown_flag(flag: str) -> str:
    """Message for an unknown flag."""
    path = flag.removeprefix("--").replace("-", "_")
    section, _, name = path.rpartition(".")
    if gone := GONE.get(path) or GONE.get(f"{section}.{name.removeprefix('no_')}"):
        return f"{flag} is a flag of an earlier version: {gone}"
    if name in _REFUSED and not _is_elsewhere(path):
        return f"{shortened(flag)} {_WHY}"
    return f"unknown flag {shortened(flag)}: {_meant(path, _as_flag)}"


def unknown_word(word: str) -> str:
    """Message for a word that is no flag, as a TOML file alone or verl's `section.key=value`."""
    path, equals, _ = word.lstrip("+").partition("=")
    hint = "flags are --section.key value"
    if word.endswith(".toml"):
        hint = f"did you mean --job.config_file {shortened(word)}?"
    elif equals and "." in path:
        hint = f"did you mean --{path}?" if path in keys() else _meant(path, _as_flag)
        hint = unsupported_by(path) or hint
    return f"unexpected argument {shortened(repr(word))}: {hint}"


def _as_flag(path: str) -> str:
    return f"--{path}"


def _meant(path: str, shown: Callable[[str], str]) -> str:
    """The key that an unknown one may mean: by its name in another trainer, else the most similar one.

    Args:
        shown: How to write a key, in a TOML file or as a flag.
    """
    section, _, name = path.rpartition(".")
    own = nearest(section, sections(), 0.8)
    meant, note = f"{own}.{name}", ""
    if meant not in keys():
        meant, note = _there(path) or (_similar(path, own), "")
    if meant and not unsupported_by(meant):
        return f"did you mean {shown(meant)}{note and f' ({note})'}?"
    if not section and (same := [key.path for key in honoured_keys() if key.name == name]):
        return f"did you mean {' or '.join(map(shown, same))}?"
    page = f"see {f'[{section}] in ' if section in sections() else ''}docs/configuration.md"
    return f"no key is like it: {note or page}"


def _is_elsewhere(path: str) -> bool:
    """Whether it stands in one of NOT_THE_POLICY, where a name means something else."""
    return bool(NOT_THE_POLICY & set(path.split(".")[:-1]))


def _there(path: str) -> tuple[str, str] | None:
    """(key or "", note) for a key of another trainer: by `entry_of`, or since its section and name are some here."""
    same = ".".join(path.split(".")[-2:])
    honoured = same in keys() and not unsupported_by(same) and not _is_elsewhere(path)
    return entry_of(path) or ((same, "") if honoured else None)


def _similar(path: str, own: str | None) -> str:
    """The key that a misspelt or misplaced one may be, "" if none.

    In a known section, its own keys may differ more from the name than those of others. In a section of another
    trainer, only a name of several words says enough.

    Args:
        own: The section here that the path's is, or is a misspelling of.
    """
    section, _, name = path.rpartition(".")
    paths = [key.path for key in honoured_keys()]
    if near := nearest(name, [key.name for key in honoured_keys() if key.section == own], 0.82):
        return f"{own}.{near}"
    if NOT_THE_POLICY & set(section.split(".")):
        return ""
    names = Counter(key.name for key in honoured_keys())
    telling = [each for each, times in names.items() if times == 1 and ("_" in each or own or not section)]
    if near := nearest(name, telling, 0.93 if section else 0.85):
        return next(path for path in paths if path.endswith(f".{near}"))
    return "" if section else nearest(path, [*paths, "dry_run", "check", "help", "version"], 0.85) or ""


def _keys_in(tables: dict[str, Any], section: str) -> str:
    """What the keys of another trainer's section are here, "" if none is known."""
    found = []
    for path in _leaves(tables):
        meant, note = _there(f"{section}.{path}") or ("", "")
        if meant:
            found.append(f"{path} is {label(meant)}{note and f' ({note})'}")
    return f"it is another trainer's, and here {shortened(', '.join(found), 1500)}" if found else ""


def _leaves(tables: dict[str, Any]) -> Iterator[str]:
    """Dotted names of the values of nested tables; of a list of tables, those of its first."""
    for name, value in tables.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            yield from (f"{name}.{path}" for path in _leaves(inner))
        else:
            yield name
