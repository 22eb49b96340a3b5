"""Ranks that wait for rank 0: as long as it gets on, and no longer."""

import re

import pytest

from tests.helpers import ROOT
from tests.helpers.broadcast_worker import LIMIT_S, SILENCE_S
from tests.helpers.ranks import Ranks

WORKER = ROOT / "tests" / "helpers" / "broadcast_worker.py"


def test_ranks_wait_for_a_rank_0_that_gets_on(tmp_path):
    Ranks(2, WORKER, "busy", log=tmp_path / "log").check(60)


def test_any_rank_may_ask_to_stop_and_all_learn_of_it_in_place_of_a_value(tmp_path):
    Ranks(2, WORKER, "stop", log=tmp_path / "log").check(60)


ENDS = {  # what it was doing, and after how many seconds at most
    "stuck": (r"TimeoutError: rank 0 has not got on for \d+ s; .* in stage 'validate' for \d+ s", 2 * LIMIT_S + 5),
    "frozen": (rf"TimeoutError: rank 0 has not been heard of for {SILENCE_S:g} s; .*", SILENCE_S + 6),
    "gone": (r"RuntimeError: lost the connection to rank 0 \(.* in stage 'validate' for \d+ s\)", 10),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_0_that_is_stuck_or_gone_is_named_with_its_stage(how, tmp_path):
    run = Ranks(2, WORKER, how, log=tmp_path / "log")
    try:
        run.processes[1].join(60)
        words, limit_s = ENDS[how]
        said = re.search(r"after ([\d.]+) s: (.*)", run.log)
        assert said and re.match(words, said[2]), run.log[-3000:]
        assert float(said[1]) < limit_s
        assert run.processes[1].exitcode == 3
    finally:
        run.kill()
