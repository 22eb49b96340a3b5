"""The short form of the fault campaign, scripts/chaos.py; docs/reliability.md has the results of the long one."""

import os
import re
import sys

import pytest

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from chaos import aimed, report
from chaos.fleet import Fleet
from chaos.foreign import GROUPS, Foreign
from chaos.garbage import KINDS, Garbage
from chaos.resume import Campaign
from chaos.rollouts import KILLED, RolloutFaults
from chaos.same_run import leave_out_lost_validation


@pytest.mark.parametrize(
    ("mode", "ranks", "points", "saves"),
    [("sync", 1, 4, "disabled"), ("sync", 2, 4, "async"), ("async", 1, 4, "disabled")],
)
def test_a_run_that_is_killed_anywhere_and_resumed_is_the_run_that_was_not_killed(mode, ranks, points, saves, tmp_path):
    campaign = Campaign(tmp_path, ranks, mode, points, seed=0, async_mode=saves)
    campaign.run()
    assert not campaign.wrong, "\n".join(campaign.wrong)
    assert len(campaign.hit) == points
    for point in campaign.hit:  # it fell where it was aimed, on a process that was there
        assert point.witness["event"] == point.aim.event and point.witness["pid"] > 0


def test_a_rollout_process_that_is_killed_costs_no_step_and_no_prompt(tmp_path):
    campaign = RolloutFaults(tmp_path, "async", faults=1, seed=0)
    campaign.run()
    assert not campaign.wrong, "\n".join(campaign.wrong)
    assert [hit.kind for hit in campaign.hits] == [KILLED]


def test_servers_that_die_hang_and_lie_delay_nothing_for_long(tmp_path):
    fleet = Fleet(tmp_path, "embedded", servers=3, seconds=240.0, seed=0, faults=6, reward_workers=1)
    fleet.run()
    assert not fleet.wrong, "\n".join(fleet.wrong)
    assert len(fleet.injections) >= 6
    assert all(injection.out_at and injection.in_at for injection in fleet.injections)


def test_nonsense_from_one_server_is_named_asked_again_and_never_trained_on(tmp_path):
    garbage = Garbage(tmp_path, seed=0, reward_workers=1)
    garbage.run()
    assert not garbage.wrong, "\n".join(garbage.wrong)
    assert sorted(injection.kind.name for injection in garbage.injections) == sorted(KINDS)
    assert all(injection.out_at and injection.in_at for injection in garbage.injections)


def test_foreign_data_ends_no_run_and_costs_no_trained_step(tmp_path):
    kinds = [kind for group in GROUPS.values() for kind in group]
    foreign = Foreign(tmp_path, "async", faults=len(kinds), seed=0, gap_limit_s=2.0, outages_s=(1, 3))
    foreign.run()
    assert not foreign.wrong, "\n".join(foreign.wrong)
    assert sum(foreign.fallen.values()) == len(kinds)
    assert foreign.fallen.keys() >= set(kinds) - {"a full disk"}  # which not everybody may mount


def test_an_aim_falls_at_its_operation_and_leaves_a_witness(tmp_path, monkeypatch):
    """The part that decides what all others prove."""
    watched, folder, sent = tmp_path / "run", tmp_path / "aim", []
    for path in (watched, folder):
        path.mkdir()
    aimed.name_process(folder / "pid-rank 0", os.getpid())
    aim = aimed.Aim("rank 0", 9, event="open w checkpoint/step-N/trainer.json", nth=2)
    (folder / "aim.json").write_text(aimed.json.dumps(vars(aim)))
    marksman = aimed.Marksman(folder, watched, rank=0)
    monkeypatch.setattr(aimed.os, "kill", lambda pid, number: sent.append((pid, number)))
    for step in (2, 4, 6):
        path = str(watched / "checkpoint" / f"step-{step}" / "trainer.json")
        marksman.on_audit("open", (path, "r", 0))
        marksman.on_audit("open", (path, "w", 0))
    assert sent == [(os.getpid(), 9)]
    assert aimed.json.loads((folder / "witness.json").read_text())["event"] == aim.event


def test_the_table_keeps_the_rows_of_other_parts(tmp_path):
    docs = tmp_path / "reliability.md"
    docs.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    report.write([report.row("fleet", "killed", 3, 3, [0.5, 0.1, 0.2], [1.0], "1 s")], docs)
    report.write([report.row("resume", "killed", 2, 2), report.row("resume", "asked to stop", 1, 1)], docs)
    report.write([report.row("resume", "killed", 5, 4)], docs)
    lines = re.findall(r"^\|.*", docs.read_text(), re.MULTILINE)[2:]
    assert lines == [
        "| fleet | killed | 3 | 3 | 0.20, 0.50 | 1.00, 1.00 | 1 s |",
        "| resume | killed | 5 | 4 | - | - | - |",
    ]
    assert docs.read_text().startswith("before\n") and docs.read_text().endswith("\nafter\n")


def test_only_a_validation_that_is_missing_altogether_counts_as_lost():
    whole = {"step": 4, "loss": 1.0, "rollout/retried": 0, "validation/greedy_reward": 0.5, "validation/pass_at_1": 0.5}
    lost, spoilt = {"step": 4, "loss": 1.0, "rollout/retried": 8}, whole | {"validation/greedy_reward": 0.4}
    for ours, same in ((lost, True), (lost | {"loss": 2.0}, False), (spoilt, False)):
        ours, theirs = dict(ours), dict(whole)
        leave_out_lost_validation(ours, theirs)
        assert (ours == theirs) is same
