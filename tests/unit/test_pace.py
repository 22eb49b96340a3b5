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
    assert run(Pace(8, 2, 0), [(5.0, 0)] * 5) == [16, 24, 32, 32, 32]
    # A step that waits for its oldest group leaves others ready for the next one, which then does not wait.
    assert min(run(Pace(8, 4, 0), [(5.0, 20), (0.0, 12)] * 20)[-20:]) == 48


def test_it_grows_by_what_was_waited() -> None:
    assert run(Pace(80, 4, 0), [(1.0, 0), (2.0, 0), (10.0, 0)]) == [96, 128, 208]
    assert run(Pace(8, 2, 0), [(0.4, 0)]) == [8]  # a short wait is none
    assert run(Pace(8, 2, 0), [(0.6, 0)]) == [9]


def test_rollouts_that_do_not_come_back_to_what_the_next_step_needs() -> None:
    groups = run(Pace(8, 1, 0), [(5.0, 0)] + [(0.0, 8)] * 4 + [(0.0, 8)] * 10)
    assert groups[:5] == [16] * 5  # an answer may be under way for as long
    assert groups[5:] == [14, 12, 10, 8, 8, 8, 8, 8, 8, 8]
    assert run(Pace(8, 1, 0), [(5.0, 0)] + [(0.0, 2)] * 20)[-1] == 16  # no more than a quarter of a step lies ready


def test_one_group_a_step() -> None:
    pace = Pace(1, 1, 0)
    assert run(pace, [(1.0, 0)] * 3) == [2, 3, 3]
    assert run(pace, [(0.0, 2)] * 10)[-1] == 1
    pace.step(0.0, 0.0, 0)  # a step of no time at all held nobody up
    assert pace.groups == 1
