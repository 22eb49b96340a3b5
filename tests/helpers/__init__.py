"""What several test files share: processes, servers, runs. Nothing here is collected as a test."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
sys.path.append(str(ROOT / "scripts"))  # for what scripts and tests share
COMMAND = [sys.executable, "-m", "torchtitan.grpo.commands"]
"""`torchtitan-grpo`, from this checkout."""
TINY_QWEN3 = ROOT / "train_configs" / "tiny_qwen3"
"""A folder with a small Qwen3's config and tokenizer, and no weights."""


class Unspeakable(RuntimeError):
    """As one of foreign code, which cannot say what it is."""

    def __str__(self) -> str:
        raise KeyError("words")
