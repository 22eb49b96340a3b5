"""Seeds of requests, and Python's and NumPy's own generators, which a curriculum or an environment may use."""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


def prompt_seed(seed: int | None, tag: str, index: int, occurrence: int) -> int | None:
    """The seed of one request, 0 to 2**56 - 1, so that servers may add the sample's number. None stays None."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{tag}/{index}/{occurrence}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def seed_python(seed: int) -> None:
    """Seed both. 32 bits."""
    random.seed(seed)
    np.random.seed(seed)


@contextlib.contextmanager
def seeded_apart(seed: int) -> Iterator[None]:
    """Draws inside follow from `seed`. Those behind go on as if there had been none."""
    before = python_state()
    seed_python(seed)
    try:
        yield
    finally:
        set_python_state(before)


def python_state() -> list[Any]:
    """Where both are, as MessagePack values."""
    of_numpy = np.random.get_state()
    assert isinstance(of_numpy, tuple)  # NumPy gives a dictionary only for generators other than its default
    name, keys, *rest = of_numpy
    return [random.getstate(), [name, keys.tolist(), *rest]]


def set_python_state(state: list[Any]) -> None:
    """Inverse of `python_state`."""
    (version, words, gauss), (name, keys, *rest) = state
    random.setstate((version, tuple(words), gauss))
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
