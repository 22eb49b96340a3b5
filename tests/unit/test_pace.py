from torchtitan.grpo.rollouts.pace import Pace


def run(pace: Pace, steps: list[tuple[float, int]]) -> list[int]:
    """`pace.groups` after steps of 10 s that waited so long and left so many groups."""
    result = []
    for waited_s, spare in steps:
        pace.step(waited_s, 10.0, spare)
        result.append(pace.groups)
    return result


def test_it_starts_one_step_ahead_of_the_next() -> None:
    assert Pace(8, 4, 0).groups == 16
    assert Pace(8, 4, 3).groups == 19


def test_rollouts_that_hold_the_trainer_up_run_as_far_ahead_as_may_be() -> None:
    assert run(Pace(8, 2, 0), [(5.0, 0)] * 4) == [24, 32, 32, 32]
    # A step that waits for its oldest group leaves others ready for the next one, which then does not wait.
    assert min(run(Pace(8, 4, 0), [(5.0, 20), (0.0, 12)] * 20)[-20:]) == 48


def test_rollouts_that_do_not_come_back_to_what_the_next_step_needs() -> None:
    groups = run(Pace(8, 1, 0), [(0.0, 8)] * 4 + [(0.0, 8)] * 10)
    assert groups[:4] == [16] * 4  # an answer may be under way for as long
    assert groups[4:] == [14, 12, 10, 8, 8, 8, 8, 8, 8, 8]
    assert run(Pace(8, 1, 0), [(0.0, 2)] * 20)[-1] == 16  # what lies ready is no more than a quarter of a step


def test_a_short_wait_is_none() -> None:
    assert run(Pace(8, 2, 0), [(0.4, 0)]) == [16]
    assert run(Pace(8, 2, 0), [(0.6, 0)]) == [24]


def test_one_group_a_step() -> None:
    pace = Pace(1, 1, 0)
    assert run(pace, [(1.0, 0)] * 3) == [3, 3, 3]
    assert run(pace, [(0.0, 2)] * 10)[-1] == 1
