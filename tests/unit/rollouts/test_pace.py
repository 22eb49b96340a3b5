from torchtitan.grpo.rollouts.pace import Pace


def run(pace: Pace, steps: list[tuple[float, int]]) -> list[int]:
    """`pace.groups` after steps of 10 s that waited so long and left so many groups."""
    result = []
    for waited_s, spare in steps:
        pace.step(waited_s, 10.0, spare)
        result.append(pace.groups)
    return result


def test_it_starts_with_the_next_steps_groups() -> None:
    assert Pace(8, 4, 0).groups == 8
    assert Pace(8, 4, 3).groups == 11


def test_rollouts_that_hold_the_trainer_up_run_as_far_ahead_as_may_be() -> None:
    assert run(Pace(8, 2, 0), [(6.0, 0)] * 16)[3::4] == [16, 32, 32, 32]
    # A step that waits for its oldest group leaves others ready for the next ones, which then do not wait.
    assert run(Pace(8, 4, 0), [(5.0, 20), (0.0, 12)] * 20)[-1] == 48


def test_it_grows_by_what_was_waited() -> None:
    assert run(Pace(80, 4, 0), [(2.0, 0)] * 4 + [(1.5, 0)] * 4)[3::4] == [112, 146]
    assert run(Pace(8, 2, 0), [(0.9, 0)] * 8)[-1] == 8  # a short wait is none


def test_one_step_that_waited_is_not_enough() -> None:
    assert run(Pace(8, 4, 0), ([(2.0, 0)] + [(0.0, 0)] * 3) * 10)[-1] == 8
    assert run(Pace(8, 4, 0), [(9.0, 0)] * 3) == [8, 8, 8]


def test_rollouts_that_do_not_come_back_to_what_the_next_step_needs() -> None:
    groups = run(Pace(8, 2, 0), [(9.0, 0)] * 8 + [(0.0, 20)] * 6 + [(0.0, 2)] * 20)
    assert groups[7] == 32
    assert groups[8:13] == [32] * 5  # an answer may be under way for as long
    assert groups[13] == 32 - (20 - 2)
    assert groups[-1] == groups[13]  # a quarter of a step may lie ready
    assert run(Pace(8, 2, 0), [(9.0, 0)] * 8 + [(0.0, 32)] * 6)[-1] == 8


def test_one_group_a_step() -> None:
    pace = Pace(1, 1, 0)
    assert run(pace, [(9.0, 0)] * 12)[3::4] == [2, 3, 3]
    assert run(pace, [(0.0, 3)] * 4)[-1] == 1
    for _ in range(4):
        pace.step(0.0, 0.0, 0)  # steps of no time at all held nobody up
    assert pace.groups == 1
