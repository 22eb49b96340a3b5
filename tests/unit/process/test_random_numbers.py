"""Seeds of requests; where Python's and NumPy's generators are, there and back."""

import random

import msgspec
import numpy as np

from torchtitan.grpo.process.random_numbers import (
    prompt_seed,
    python_state,
    seed_python,
    seeded_apart,
    set_python_state,
)


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(3), np.random.normal()]


def test_the_generators_go_on_where_they_were():
    before = python_state()
    try:
        seed_python(7)
        first = draws()  # of an odd number of normal ones, so that each holds one back
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(python_state()))
        after = draws()
        assert draws() != after
        set_python_state(state)
        assert draws() == after
        seed_python(7)
        assert draws() == first
    finally:
        set_python_state(before)


def test_draws_apart_follow_from_their_seed_and_leave_no_trace():
    before = python_state()
    try:
        seed_python(7)
        whole = draws()
        seed_python(7)
        with seeded_apart(3):
            first = draws()
        assert draws() == whole
        with seeded_apart(3):
            assert draws() == first
        with seeded_apart(4):
            assert draws() != first
    finally:
        set_python_state(before)


def test_seeds_of_requests() -> None:
    seeds = {prompt_seed(1, tag, index, n) for tag in ("a", "b") for index in range(50) for n in range(2)}
    assert len(seeds) == 200
    assert all(0 <= seed < 1 << 56 for seed in seeds)
    assert prompt_seed(1, "a", 2, 0) == prompt_seed(1, "a", 2, 0) != prompt_seed(2, "a", 2, 0)
    assert prompt_seed(None, "a", 2, 0) is None
