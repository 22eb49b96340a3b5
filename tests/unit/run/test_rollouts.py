"""Rollouts on rank 0: what it makes of several processes' numbers."""

from types import SimpleNamespace

from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.run.rollouts import Rollouts


def test_counts_of_processes_add_up_and_a_mean_wait_stays_a_mean():
    shares = [
        {"rollout/groups_asked": 8.0, "distill/teacher_s": 2.0},
        {"rollout/groups_asked": 8.0, "distill/teacher_s": 3.0},
        {"rollout/groups_asked": 4.0},  # its groups were scored in the step before
    ]
    rollouts = object.__new__(Rollouts)
    rollouts.fleet = Fleet(["http://a:1"], lambda url: Server(url, None))
    rollouts._processes = SimpleNamespace(call=lambda verb: [([share, {}], []) for share in shares], losses=0)
    metrics = rollouts.metrics([], 1.0)
    assert metrics["rollout/groups_asked"] == 20
    assert metrics["distill/teacher_s"] == 2.5
