"""What an unknown key, section or flag may mean, for the message that refuses it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.grpo.config.keys import keys, label, sections, shortened
from torchtitan.grpo.config.other_trainers import entry_of
from torchtitan.grpo.config.unsupported import UNSUPPORTED, honoured_keys, unsupported_by
from torchtitan.grpo.errors import nearest

REFUSED = {
    **dict.fromkeys(
        ("top_p", "top_k", "min_p"),
        "would sample from the likeliest tokens alone, and the loss takes probabilities among all tokens: its ratios "
        "would be wrong, so lower [rollout] temperature instead (held-out answers have [validation] top_p and min_p)",
    ),
    **dict.fromkeys(
        ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        "would sample from probabilities that the loss does not know: its ratios would be wrong, so change the reward "
        "instead",
    ),
}
"""Sampling parameters of servers that training cannot have, and why. Their sections do not matter."""

_SHOWN = 20
"""Keys of another trainer's section in one message."""


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
    if name in REFUSED:
        return f"{label(path) if section else name} {REFUSED[name]}"
    what = f"[{section}] {shortened(name)}" if section else f"{shortened(name)} outside any section"
    return f"unknown key {what}: {_meant(path, label)}"


def unknown_flag(flag: str) -> str:
    """Message for an unknown flag."""
    path = flag.removeprefix("--").replace("-", "_")
    if (name := path.rpartition(".")[2]) in REFUSED:
        return f"{shortened(flag)} {REFUSED[name]}"
    return f"unknown flag {shortened(flag)}: {_meant(path, _as_flag)}"


def unknown_word(word: str) -> str:
    """Message for a word that is no flag, as a TOML file alone or verl's `section.key=value`."""
    path, equals, _ = word.lstrip("+").partition("=")
    hint = "flags are --section.key value"
    if word.endswith(".toml"):
        hint = f"did you mean --job.config_file {shortened(word)}?"
    elif equals and "." in path:
        hint = f"did you mean --{path}?" if path in keys() else _meant(path, _as_flag)
        if entry := unsupported_by(path):
            hint = UNSUPPORTED[entry]
    return f"unexpected argument {shortened(repr(word))}: {hint}"


def _as_flag(path: str) -> str:
    return f"--{path}"


def _meant(path: str, shown: Callable[[str], str]) -> str:
    """The key that an unknown one may mean: by its name in another trainer, else the most similar one.

    In a known section, its own keys may differ more from the name than those of others.

    Args:
        shown: How to write a key, in a TOML file or as a flag.
    """
    section, _, name = path.rpartition(".")
    entry = entry_of(path)
    if entry is not None:
        meant, note = [entry[0]] if entry[0] else [], entry[1]
    else:
        meant, note = _similar(section, name), ""
    if meant:
        return f"did you mean {' or '.join(map(shown, meant))}{note and f' ({note})'}?"
    page = f"see {f'[{section}] in ' if section in sections() else ''}docs/configuration.md"
    return f"no key is like it: {note or page}"


def _similar(section: str, name: str) -> list[str]:
    """The keys, two at most, that a misspelt or misplaced one may be."""
    of_name = _keys_by_name()
    if own := nearest(name, [each for each, paths in of_name.items() if f"{section}.{each}" in paths], 0.82):
        return [f"{section}.{own}"]
    near = nearest(name, of_name, 0.92 if section in sections() else 0.85)
    if near and len(of_name[near]) <= 2:
        return of_name[near]
    if section in sections():
        return []
    whole = [*itertools.chain(*of_name.values()), "dry_run", "help", "version"]
    found = nearest(f"{section}.{name}".lstrip("."), whole, 0.85)
    return [found] if found else []


def _keys_by_name() -> dict[str, list[str]]:
    """Paths of the keys that have an effect."""
    of_name: dict[str, list[str]] = {}
    for key in honoured_keys():
        of_name.setdefault(key.name, []).append(key.path)
    return of_name


def _keys_in(tables: dict[str, Any], section: str) -> str:
    """What the keys of another trainer's section are here, "" if none is known."""
    of_name = _keys_by_name()
    paths = list(_leaves(tables))
    found = []
    for path in paths:
        named = of_name.get(path.rpartition(".")[2], [])
        key, note = entry_of(f"{section}.{path}") or (named[0] if len(named) == 1 else "", "")
        if key:
            found.append(f"{path} is {label(key)}" + (f" ({note})" if note else ""))
    if not found:
        return ""
    others = len(paths) - len(found[:_SHOWN])
    more = f"; see docs/configuration.md for the other {others}" if others else ""
    return f"it is another trainer's, and here {shortened(', '.join(found[:_SHOWN]), 1500)}{more}"


def _leaves(tables: dict[str, Any]) -> Iterator[str]:
    """Dotted names of the values of nested tables; of a list of tables, those of its first."""
    for name, value in tables.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            yield from (f"{name}.{path}" for path in _leaves(inner))
        else:
            yield name
