"""When a run is told that its device waits for the host, and what it should try."""

from torchtitan.grpo.reporting.host_bound import SKIPPED_STEPS, STEPS, HostBound


def hints(bound: HostBound, mfus: list[float], rows: int = 4, peak_gib: float = 18.0) -> list[str]:
    return [hint for mfu in mfus if (hint := bound.look(mfu, rows, peak_gib))]


def test_a_slow_update_of_several_rows_is_told_once_to_take_longer_ones():
    (hint,) = hints(HostBound(16384, False, 80.0), [0.04] * 20)
    assert "4.0% MFU" in hint and "[compile] enable" in hint
    assert "tokens_per_microbatch = 32768, since a step has 4 rows of 16384" in hint  # 0.8 * 80 is 3.6 times the peak


def test_as_long_as_memory_and_rows_allow():
    assert "= 65536," in hints(HostBound(16384, False, 80.0), [0.04] * 9, peak_gib=15.0)[0]
    assert "= 32768," in hints(HostBound(16384, False, 800.0), [0.04] * 9, rows=3)[0]
    for rows, peak_gib in ((1, 18.0), (4, 60.0), (4, 0.0)):
        (hint,) = hints(HostBound(16384, False, 80.0), [0.04] * 9, rows, peak_gib)
        assert "tokens_per_microbatch" not in hint and "[compile]" in hint


def test_nothing_is_said_where_nothing_helps_or_nothing_is_slow():
    assert hints(HostBound(16384, True, 80.0), [0.04] * 9, rows=1) == []
    assert hints(HostBound(16384, False, 80.0), [0.2] * 9) == []
    assert hints(HostBound(16384, False, 80.0), [0.04, 0.04, 0.3] * 9) == []


def test_the_first_steps_do_not_count():
    few = [0.01] * (SKIPPED_STEPS + STEPS - 1)
    assert hints(HostBound(16384, False, 80.0), [*few, 0.4]) == []
    assert len(hints(HostBound(16384, False, 80.0), [*few, 0.1])) == 1
