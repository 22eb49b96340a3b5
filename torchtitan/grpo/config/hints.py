"""What an unknown key, section or flag may mean, for the message that refuses it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.grpo.config.keys import keys, label, sections, shortened
from torchtitan.grpo.config.other_trainers import entry_of, part_of
from torchtitan.grpo.config.unsupported import UNSUPPORTED, honoured_keys, unsupported_by
from torchtitan.grpo.errors import nearest

REFUSED = {
    **dict.fromkeys(
        ("top_p", "top_k", "min_p"),
        "would sample from the likeliest tokens alone, and the loss takes probabilities among all tokens: its ratios "
        "would be wrong, so lower [rollout] temperature instead (held-out answers have [validation] top_p)",
    ),
    **dict.fromkeys(
        ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        "would sample from probabilities that the loss does not know: its ratios would be wrong, so change the reward "
        "instead",
    ),
}
"""Sampling parameters of servers that training cannot have, and why. Their sections do not matter."""
_MIN_P = "use [validation] top_p, or one of the set's own"
GONE = {
    "data.arithmetic_max": "write [data] source_args = { max = 39 }",
    "data.arithmetic_operators": 'write [data] source_args = { operators = ["+"] }',
    "data.arithmetic_question": 'write [data] source_args = { question = "{left}{operator}{right}=" }',
    "data.overlong_prompts": "longer prompts are left out, and the log names the first; leave it out",
    "data.size": "write [data] source_args = { size = 500 }",
    "data.tasks": 'write [data] source_args = { tasks = ["chain_sum"] }',
    "distill.timeout_seconds": "[rollout] request_timeout_seconds is the limit",
    "grpo.clip_old_tokens": "asynchronous runs always clip them, since all learned better so; leave it out",
    "grpo.replace_limit": "a step asks for four times [grpo] prompts_per_step groups at most; leave it out",
    "lora.dropout": "it had to be 0; leave it out",
    "metrics.validation_samples": "every held-out answer is written; leave it out",
    "metrics.wandb_group": "set the environment variable WANDB_RUN_GROUP",
    "metrics.wandb_name": "set the environment variable WANDB_NAME",
    "ray.start_timeout_seconds": "[rollout] start_timeout_seconds is the limit",
    "ray.step_timeout_seconds": "[debug] hang_seconds is the limit",
    "ray.warmup_tokens": "ranks are warmed up by their longest row; leave it out",
    "rollout.embedded_device": "the server is on a GPU if the trainer is: for another device start one by hand (python "
    "-m torchtitan.grpo.engines.embedded --device cpu), and name its address in [rollout] urls",
    "rollout.embedded_dtype": 'it is a flag of the server, as in [rollout] server_flags = ["--dtype", "float32"]',
    "rollout.embedded_max_sequences": "it is a flag of the server, as in [rollout] server_flags = "
    '["--max-sequences", "1024"]',
    "rollout.episode_lease_seconds": "a quarter of [rollout] group_timeout_seconds is the limit",
    "validation.min_p": _MIN_P,
    "validation.sets.min_p": _MIN_P,
    "weight_sync.bucket_mib_max": "set [weight_sync] buffer_memory_ratio: two buckets share it, of a GiB each at most",
    "weight_sync.cadence": "leave it out: each version is sent, or the newest that is waiting",
    "weight_sync.num_buffers": "leave it out: two buckets are in flight",
}
"""Keys of earlier versions, and what to do instead."""

_SHOWN = 20
"""Keys of another trainer's section in one message."""
_TELLING = 6
"""Letters of a key that is looked for in other sections than its own: `mode` and `freq` are names of anything."""


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
            part = part_of(path)
            hint = _keys_in(table, path) or (f"no key is like it: {part[1]}" if part else hint)
        return f"unknown section [{shortened(path)}]: {hint}"
    if path in GONE:
        return f"{label(path)} is a key of an earlier version: {GONE[path]}"
    if name in REFUSED:
        return f"{label(path) if section else name} {REFUSED[name]}"
    what = f"[{section}] {shortened(name)}" if section else f"{shortened(name)} outside any section"
    return f"unknown key {what}: {_meant(path, label)}"


def unknown_flag(flag: str) -> str:
    """Message for an unknown flag."""
    path = flag.removeprefix("--").replace("-", "_")
    section, _, name = path.rpartition(".")
    if gone := GONE.get(path) or GONE.get(f"{section}.{name.removeprefix('no_')}"):
        return f"{flag} is a flag of an earlier version: {gone}"
    if name in REFUSED and _exact(path) is None:
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
    section = path.rpartition(".")[0]
    meant, note = _exact(path) or _similar(path)
    if meant:
        return f"did you mean {' or '.join(map(shown, meant))}{note and f' ({note})'}?"
    page = f"see {f'[{section}] in ' if section in sections() else ''}docs/configuration.md"
    return f"no key is like it: {note or page}"


def _exact(path: str) -> tuple[list[str], str] | None:
    """The keys, two at most, that another trainer's name is, and a note; None if nothing is known of the name.

    In sections that neither this project nor NAMES knows, only a name of several words says enough.
    """
    section, _, name = path.rpartition(".")
    honoured = {key.path for key in honoured_keys()}
    if (key := f"{_own_section(section)}.{name}") in honoured:
        return [key], ""
    if entry := entry_of(path):
        return [entry[0]] if entry[0] else [], entry[1]
    if not section or section in sections() or part_of(path):
        return None
    parts = section.split(".")
    if inner := [key for start in range(len(parts)) if (key := ".".join([*parts[start:], name])) in honoured]:
        return inner, ""
    same = _keys_by_name().get(name, [])
    return (same, "") if "_" in name and 0 < len(same) <= 2 and name not in REFUSED else None


def _similar(path: str) -> tuple[list[str], str]:
    """The keys, two at most, that a misspelt or misplaced one may be, and what to say if there are none."""
    section, _, name = path.rpartition(".")
    own, of_name = _own_section(section), _keys_by_name()
    if near := nearest(name, [each for each, paths in of_name.items() if f"{own}.{each}" in paths], 0.82):
        return [f"{own}.{near}"], ""
    if section and section not in sections():
        return [], (part_of(path) or ("", ""))[1]
    telling = [each for each in of_name if len(each) >= _TELLING or (each == name and not section)]
    near = nearest(name, telling, 0.92 if section else 0.85)
    if near and len(of_name[near]) <= 2:
        return of_name[near], ""
    if section:
        return [], ""
    if part := part_of(path):
        return [], part[1]
    found = nearest(path, [*itertools.chain(*of_name.values()), "dry_run", "help", "version"], 0.85)
    return [found] if found else [], ""


def _own_section(section: str) -> str:
    """The section here that one of another trainer, or a misspelt one, is; else itself."""
    if section in sections():
        return section
    part = part_of(section)
    return part[0] if part else nearest(section, sections(), 0.8) or section


def _keys_by_name() -> dict[str, list[str]]:
    """Paths of the keys that have an effect."""
    of_name: dict[str, list[str]] = {}
    for key in honoured_keys():
        of_name.setdefault(key.name, []).append(key.path)
    return of_name


def _keys_in(tables: dict[str, Any], section: str) -> str:
    """What the keys of another trainer's section are here, "" if none is known."""
    paths = list(_leaves(tables))
    found = []
    for path in paths:
        meant, note = _exact(f"{section}.{path}") or ([], "")
        if len(meant) == 1:
            found.append(f"{path} is {label(meant[0])}" + (f" ({note})" if note else ""))
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
