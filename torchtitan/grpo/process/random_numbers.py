"""Python's and NumPy's own generators, which a curriculum or an environment may use."""

import random
from typing import Any

import numpy as np


def seed_python(seed: int) -> None:
    """Seed both. 32 bits."""
    random.seed(seed)
    np.random.seed(seed)


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
