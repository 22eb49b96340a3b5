"""Rollouts on rank 0: what it makes of several processes' numbers."""

import os
from types import SimpleNamespace

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.values import from_values
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.server import Server
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


def test_an_environment_that_goes_to_another_folder_takes_no_file_of_the_run_with_it():
    told = []
    process = SimpleNamespace(introduce=lambda verb, values, *_: told.append(from_values(values)))
    rollouts = object.__new__(Rollouts)
    rollouts.config = load_config(["--model.hf_assets_path", str(TINY_QWEN3), "--job.dump_folder", "outputs/run"])
    rollouts._processes = SimpleNamespace(each=[process], map=lambda tell, shares: [tell(process, shares[0])])
    source = SimpleNamespace(positions=1 << 20, routes=None, model_args=SimpleNamespace(vocab_size=8))
    rollouts.read_task(source, None, [2])
    assert told[0].job.dump_folder == os.path.abspath("outputs/run")
