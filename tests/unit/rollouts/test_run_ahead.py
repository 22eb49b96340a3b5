"""What `[async_grpo] run_ahead = "auto"` must reach without tuning, beside a simulated server and trainer."""

import statistics
from dataclasses import replace

import pytest

from tests.helpers.simulated_rollouts import Schedule, row_of, simulate

LONG_TAIL = Schedule(32, 16, 8, 512, 512, 12600.0, 5.0, 256.0, 1.0, 2048, turns=True)
"""Answers of up to 2,048 tokens, 256 on average: the longest takes as long as eight steps, which is the age."""


def test_half_the_answers_at_once_are_nearly_as_fast():
    assert LONG_TAIL.rate(512) == pytest.approx(12600)
    assert LONG_TAIL.rate(256) == pytest.approx(0.87 * 12600)
    assert 0 < LONG_TAIL.rate(1) < 12600 / 50


def test_a_trainer_that_is_the_bottleneck_never_waits():
    steps, groups = simulate(replace(LONG_TAIL, train_s=30.0, age=2), 20)
    assert [seconds for seconds, _ in steps[1:]] == pytest.approx([30.0] * 19)
    assert 32 <= groups <= 40  # the next step, and a quarter of one ready


@pytest.mark.parametrize("turns", [True, False])
def test_servers_are_near_their_bound_and_no_step_is_much_longer_than_others(turns):
    """Whether `[rollout] max_concurrent_requests`, at its default, is of answers or of groups."""
    row = row_of(replace(LONG_TAIL, turns=turns, requests=512 if turns else 256), seeds=1)
    assert row["of_bound"] > 0.95 and row["longest_to_median"] < 2
    assert row["first_20_of_bound"] > 0.75


def test_an_age_that_is_too_small_costs_throughput_and_still_no_long_steps():
    row = row_of(replace(LONG_TAIL, age=2), seeds=1)
    assert 0.6 < row["of_bound"] < 0.8 and row["longest_to_median"] < 3
    (full, _) = simulate(replace(LONG_TAIL, age=2, auto=False))
    seconds = [seconds for seconds, _ in full[10:-10]]
    assert max(seconds) > 5 * statistics.median(seconds)


@pytest.mark.parametrize("order_window", [0, 32])
def test_servers_with_room_get_what_the_age_allows(order_window):
    two = replace(LONG_TAIL, sequences=1024, requests=1024, tokens_per_s=2 * 12600.0, order_window=order_window)
    auto, full = (row_of(replace(two, auto=auto), seeds=1) for auto in (True, False))
    assert auto["of_bound"] > 0.9 * full["of_bound"]  # it gets there by and by


def test_a_seed_repeats():
    assert simulate(LONG_TAIL, 12, seed=1) == simulate(LONG_TAIL, 12, seed=1) != simulate(LONG_TAIL, 12, seed=2)
