"""The names of other trainers' keys, which other_trainers.toml lists, and what they are here."""

import tomllib
from pathlib import Path

TRAINERS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""By trainer: its name -> "key: note", as the file's head says."""
NAMES = {name: entry for names in TRAINERS.values() for name, entry in names.items()}

NOT_THE_POLICY = {
    *("critic", "distill", "eval", "reward", "reward_model", "validation"),
    *("teacher", "teacher_inference", "teacher_model"),
    *("algo", "distillation", "draft", "fake", "mcore_generation_config", "qat", "ref", "sandbox_fusion", "trace"),
    *("turbo_config", "val_kwargs"),
}
"""Sections in which a name means something else: a critic's `model.path` is not the policy's. Those of the policy's own
validation are among them."""


def entry_of(path: str) -> tuple[str, str] | None:
    """(key or "", note) for a name of another trainer, with its section before it or not; None for an unknown name."""
    parts = path.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in NAMES and not NOT_THE_POLICY & set(parts[:start]):
            key, _, note = NAMES[name].partition(":")
            return key, note.strip()
    return None
