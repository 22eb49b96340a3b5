import math

from torchtitan.grpo.rollouts.pace import LOST_STEPS, Pace


def run(pace: Pace, steps: list[tuple[float, int]], held_s: float = 0.0) -> list[int]:
    """`pace.groups` after steps of 10 s that waited so long, `held_s` of it for an old group, and left so many."""
    result = []
    for waited_s, spare in steps:
        pace.step(waited_s, 10.0, spare, held_s)
        result.append(pace.groups)
    return result


def test_it_starts_with_the_groups_of_two_steps() -> None:
    assert Pace(8, 4, 0).groups == 16
    assert Pace(8, 4, 3).groups == 19


def test_rollouts_that_hold_the_trainer_up_run_as_far_ahead_as_may_be() -> None:
    assert run(Pace(8, 2, 0), [(6.0, 0)] * 8)[1::2] == [24, 32, 32, 32]
    # A step that waits leaves others ready for the next ones, which then do not wait.
    assert run(Pace(8, 4, 0), [(5.0, 20), (0.0, 12)] * 20)[-1] == 48


def test_it_grows_by_what_was_waited() -> None:
    assert run(Pace(80, 4, 0), [(2.0, 0)] * 2 + [(1.5, 0)] * 2)[1::2] == [192, 221]
    assert run(Pace(8, 2, 0), [(0.9, 0)] * 8)[-1] == 16  # a short wait is none


def test_one_step_that_waited_is_not_enough() -> None:
    assert run(Pace(8, 4, 0), ([(1.9, 0)] + [(0.0, 0)] * 3) * 10)[-1] == 16
    assert run(Pace(8, 4, 0), [(9.0, 0)]) == [16]


def test_an_old_group_that_holds_a_step_up_is_no_reason_to_grow_but_to_go_back() -> None:
    grown = Pace(80, 4, 0)
    assert run(grown, [(6.0, 0)] * 4)[-1] == 360
    assert run(grown, [(2.0, 90)] * 2, held_s=2.0) == [360, 360 - 36]  # half the share of its time
    assert run(grown, [(9.0, 90)] * 2, held_s=9.0)[-1] == 324 - 98  # three tenths at most
    assert run(grown, [(9.0, 90)] * 8, held_s=9.0)[-1] == 160  # not below the start
    assert run(grown, [(0.9, 0)] * 8, held_s=0.9)[-1] == 160  # a short wait is none


def test_what_counts_is_which_of_the_two_waits_is_longer() -> None:
    assert run(Pace(8, 2, 0), [(3.5, 0)] * 2, held_s=0.5)[-1] == 20  # 3 s and 0.5 s: a quarter of 10 s
    assert run(Pace(8, 8, 0), [(6.0, 0)] * 40, held_s=1.5)[-1] == 80  # 4.5 s and 1.5 s
    assert run(Pace(8, 8, 0), [(6.0, 20)] * 40, held_s=3.0)[-1] == 16  # 3 s and 3 s
    mixed = Pace(8, 8, 0)
    for _ in range(20):
        run(mixed, [(6.0, 0)])
        run(mixed, [(3.0, 0)], held_s=3.0)
    assert mixed.groups > 40


def test_rollouts_that_do_not_come_back_to_what_the_next_step_needs() -> None:
    groups = run(Pace(8, 2, 0), [(9.0, 0)] * 4 + [(0.0, 20)] * 6 + [(0.0, 2)] * 20)
    assert groups[3] == 32
    assert groups[4:9] == [32] * 5  # an answer may be under way for as long
    assert groups[9] == 32 - (20 - 2)
    assert groups[-1] == groups[9]  # a quarter of a step may lie ready
    assert run(Pace(8, 2, 0), [(9.0, 0)] * 4 + [(0.0, 32)] * 6)[-1] == 8


def test_one_group_a_step() -> None:
    pace = Pace(1, 1, 0)
    assert run(pace, [(9.0, 0)] * 4)[1::2] == [3, 3]
    assert run(pace, [(0.0, 3)] * 4)[-1] == 1
    for _ in range(4):
        pace.step(0.0, 0.0, 0)  # steps of no time at all held nobody up
    assert pace.groups == 1


def test_so_many_groups_under_way_that_the_longest_answer_is_in_time() -> None:
    """Of 8 groups that end in a step, G under way take G / 8 steps on average, and a longer one longer."""
    pace = Pace(8, 8, 0)
    run(pace, [(9.0, 0)] * 8)
    assert pace.groups == 80 and pace.room(30, 20) == 50
    pace.taken([100] * 7 + [1300])
    assert pace.under_way == 16  # the mean is a fifth of the longest, but it is not below the start
    pace.taken([900] * 8)
    mean = (100 * 7 + 1300 + 900 * 8) / 16
    assert pace.under_way == math.ceil((8 - LOST_STEPS) * 8 * mean / 1300)
    assert pace.room(30, 20) == pace.under_way - 10 and pace.room(79, 70) == 1
    for _ in range(2 * 9):  # what was long ago does not count
        pace.taken([1000] * 8)
    assert pace.under_way == math.ceil((8 - LOST_STEPS) * 8)


def test_one_group_in_a_hundred_may_be_late() -> None:
    pace = Pace(8, 8, 0)
    for i in range(18):
        pace.taken([1000] * 7 + [9000 if i == 4 else 1000])
        assert pace.under_way == (16 if 4 <= i < 12 else 60)  # one in 40 to 96 groups, and then in 104


def test_groups_that_others_replace_are_completed_too() -> None:
    pace = Pace(8, 8, 0)
    pace.taken([1000] * 8, replaced=8)
    assert pace.under_way == math.ceil((8 - LOST_STEPS) * 16)
    pace.taken([1000] * 8)
    assert pace.under_way == math.ceil((8 - LOST_STEPS) * 12)


def test_groups_without_tokens_bound_nothing() -> None:
    pace = Pace(2, 1, 0)
    pace.taken([0, 0])
    assert pace.room(0, 0) == 4
