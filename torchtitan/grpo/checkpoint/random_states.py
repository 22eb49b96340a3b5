"""The random states of a rank: Python's, NumPy's, torch's and its CUDA device's."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

from torchtitan.grpo.process.random_numbers import seed_python


def random_states(device: torch.device) -> dict[str, Any]:
    """All of them, as values that `torch.load(weights_only=True)` reads."""
    of_numpy = np.random.get_state()
    assert isinstance(of_numpy, tuple)  # NumPy gives a dictionary only for generators other than its default
    name, keys, position, has_gauss, gauss = of_numpy
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_all(seed: int, step: int) -> None:
    """Seed every rank the same, as torchtitan does, because DTensor draws must agree over the mesh."""
    derived = int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big")
    seed_python(derived)
    torch.manual_seed(derived)
