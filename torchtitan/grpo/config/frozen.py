"""A configuration that no longer changes: who needs other values makes a copy that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


_MARK = "_is_frozen"


def freeze(config: Any) -> None:
    """From now on, assigning to a key raises FrozenInstanceError. Lists and tables are left as they are."""
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            freeze(value)
    type(config).__setattr__ = _set  # type: ignore[assignment]  # of marked instances alone
    vars(config)[_MARK] = True


def changed(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """A copy with other values, by path (`grpo.group_size`, `grpo`). That of a frozen configuration is frozen."""
    is_frozen = _MARK in vars(config)
    for path, value in values.items():
        section, _, name = path.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value}) if name else value})
    if is_frozen:
        freeze(config)
    return config


def _set(section: Any, name: str, value: Any) -> None:
    if _MARK in vars(section):
        raise FrozenInstanceError(f"the run has started: {name} of {type(section).__name__} no longer changes")
    object.__setattr__(section, name, value)
