"""A configuration as plain values, and back, for a process without torch: torchtitan's own classes import it."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_args

from torchtitan.grpo.config import job_config

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


def to_values(config: JobConfig) -> dict[str, Any]:
    """Every key's value, by section. It holds no secret: keys name the environment variables that do."""
    return {field.name: asdict(getattr(config, field.name)) for field in fields(config)}


def from_values(values: dict[str, Any]) -> JobConfig:
    """Inverse of `to_values`, for reading. Sections of this project are its own classes again, with their properties.
    Those of torchtitan have values alone."""
    own: dict[str, Any] = {field.name: field.type for field in fields(job_config.JobConfig)}
    return cast("JobConfig", SimpleNamespace(**{name: _section(own.get(name), of) for name, of in values.items()}))


def _section(cls: type | None, values: dict[str, Any]) -> Any:
    own = {} if cls is None else {field.name: field for field in fields(cls)}
    made = dict(values)
    for name, value in values.items():
        if isinstance(value, list) and name in own and (table := next(iter(get_args(own[name].type)), None)):
            is_table = isinstance(table, type) and is_dataclass(table)
            made[name] = [_section(table, each) if is_table else each for each in value]
        elif isinstance(value, dict) and name not in own:  # a section of torchtitan's
            made[name] = _section(None, value)
        elif isinstance(value, dict) and is_dataclass(default := getattr(cast(type, cls)(), name)):
            made[name] = _section(type(default), value)
    if cls is None or own.keys() != values.keys():  # torchtitan has keys of it too
        return SimpleNamespace(**made)
    return cls(**made)
