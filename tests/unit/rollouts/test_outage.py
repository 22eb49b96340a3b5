"""Which groups without a reward are an outage, how long it is waited for, and what ends the run."""

from dataclasses import replace

import pytest

from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.outage import Outage

B = 4


def lost(number: int) -> Group:
    return [Sample(Prompt(number, [1], ""), [], [], [], "abort", reward_failures={"tool": "is away"})]


class Run:
    """Groups that are requested one after the other, each after the one before has ended."""

    def __init__(self, limit: float = 0.5, longest_s: float = 100.0) -> None:
        self.outage = Outage(B, limit, longest_s)
        self.asked, self.now = 0, 0.0

    def fails(self, under_way: int = 0) -> float:
        """`under_way`: requested so many before the newest one."""
        self.asked += not under_way
        return self.outage.failed(lost(self.asked), self.asked - under_way, self.asked + 1, self.now)

    def works(self, under_way: int = 0) -> None:
        self.asked += not under_way
        self.outage.worked(self.asked - under_way, self.asked + 1, self.now)


def test_an_outage_is_waited_for_as_long_as_it_has_lasted_and_ends_in_time() -> None:
    run = Run(longest_s=200.0)
    run.works()
    waits = [run.fails() for _ in range(B)]
    assert waits == [0.0] * B, "as many as others may replace"
    while run.now < 200:
        waits.append(run.fails())
        run.now += waits[-1]
    assert waits[B:] == [1, 1, 2, 4, 8, 16, 32, 60, 60, 16]
    with pytest.raises(UserError, match=r'for 200 s in all, over \[rollout\] .*_seconds = 200: "tool" failed on 4'):
        run.fails()


@pytest.mark.parametrize("limit", [0.0, 0.1, 0.25])
def test_an_outage_is_waited_for_whatever_share_of_failures_is_allowed(limit: float) -> None:
    run = Run(limit)
    run.works()
    assert [run.fails() for _ in range(B)][-1] > 0 and run.outage.is_on
    run.works()
    assert run.outage.take() == []


@pytest.mark.parametrize("outage", [True, False])
def test_groups_that_fail_when_a_step_ends_count_in_the_next_one_unless_an_outage_begins_with_them(outage) -> None:
    run = Run()
    run.works()
    run.fails()
    run.works()
    for _ in range(3):
        run.fails()
    assert [group[0].prompt.index for group in run.outage.take()] == [2]
    if outage:
        assert [run.fails() for _ in range(2)][-1] > 0 and run.outage.is_on
        assert run.outage.take() == []
    else:
        run.works()
        assert [group[0].prompt.index for group in run.outage.take()] == [4, 5, 6]
    assert run.outage.take() == []


def test_a_group_that_failed_earlier_in_the_step_does_not_make_an_outage_end_the_run() -> None:
    run = Run()
    run.works()
    run.fails()
    run.works()
    assert [run.fails() for _ in range(2 * B)][-1] > 0 and run.outage.is_on


def test_only_time_without_rewards_adds_up() -> None:
    run = Run(longest_s=600.0)
    run.works()
    for seconds in (370.0, 1.0):
        began = run.now
        while run.now < began + seconds:
            run.now += run.fails() or 0.1
        run.works()
        run.now += 300.0
    assert run.now > 971


def test_a_passed_outage_counts_for_nothing_nor_does_what_was_under_way_in_it() -> None:
    run = Run()
    run.works()
    for _ in range(B + 3):
        run.fails()
    run.works(under_way=20)
    assert run.outage.is_on, "it was requested before"
    run.works()
    assert not run.outage.is_on
    failed, scored = lost(0)[0], replace(lost(0)[0], reward=1.0)
    assert run.outage.counted(run.asked, [failed, scored]) == [scored], (
        "else a step of such groups is no answers at all"
    )
    assert run.outage.counted(run.asked + 1, [failed, scored]) == [failed, scored]
    assert [run.fails(under_way=1) for _ in range(3 * B)] == [0.0] * 3 * B
    assert run.outage.take() == []


def test_groups_of_a_short_outage_may_fail_after_it() -> None:
    run = Run()
    run.works()
    assert [run.fails() for _ in range(B)] == [0.0] * B, "not yet more than half of a step's"
    run.works()
    assert run.fails(under_way=2) == 0.0, "requested before one worked again: it was an outage, which is over"
    assert run.outage.take() == [] and not run.outage.is_on
    assert [run.fails(under_way=2) for _ in range(2 * B)] == [0.0] * 2 * B and run.outage.take() == []
    assert [run.fails() for _ in range(B)] == [0.0] * B, "another one may begin"
    assert run.fails() > 0 and run.outage.is_on


def test_groups_that_fail_late_end_the_run_if_no_outage_was_among_them() -> None:
    run = Run()
    run.works()
    for _ in range(2):
        run.fails()
        run.works()
    run.fails(under_way=1)
    run.fails(under_way=1)
    with pytest.raises(UserError, match="5 of 5 answers have no reward"):
        run.fails()


def test_before_anything_has_worked_a_steps_groups_end_the_run_at_once() -> None:
    run = Run()
    assert [run.fails() for _ in range(B)] == [0.0] * B
    with pytest.raises(UserError, match=r'5 of 5 answers have no reward, .* = 0.5: "tool" failed on 5'):
        run.fails()


@pytest.mark.parametrize(("limit", "pattern"), [(0.5, "10000"), (0.2, "1100"), (0.0, "10"), (0.2, "100")])
def test_too_many_among_groups_that_work_end_the_run_at_once(limit: float, pattern: str) -> None:
    run = Run(limit)
    with pytest.raises(UserError, match=r"over \[reward\] max_failed_fraction"):
        for works in pattern * 100:
            run.works() if works == "1" else run.fails()


def test_one_that_works_now_and_then_is_in_one_long_outage() -> None:
    run = Run()
    run.works()
    with pytest.raises(UserError, match="no group has got a reward for"):
        for number in range(1, 10_000):
            run.now += 0.1 + (run.works() or 0.0 if number % 50 == 0 else run.fails())
    assert run.now < 300


def test_one_that_works_for_longer_than_it_was_away_may_be_away_again() -> None:
    run = Run()
    run.works()
    for _ in range(20):
        began = run.now
        while run.now < began + 10:
            run.now += run.fails() or 0.1
        for _ in range(30):
            run.now += 1.0
            run.works()
