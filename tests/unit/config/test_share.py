"""How rollouts are divided among processes."""

import pytest

from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.share import ALL, Share, of_each, rollout_processes
from torchtitan.grpo.errors import UserError

QUICKSTART = ["--job.config_file", "train_configs/quickstart.toml", "--rollout.engine", "vllm"]


def loaded(*flags: str, servers: int = 1):
    urls = ",".join(f"http://127.0.0.1:{9000 + i}" for i in range(servers))
    return load_config([*QUICKSTART, "--rollout.replicas", "0", "--rollout.urls", urls, *flags])


@pytest.mark.parametrize(
    ("servers", "prompts", "processes"),
    [(1, 128, 1), (32, 128, 1), (33, 128, 2), (96, 128, 2), (96, 129, 3), (64, 7, 1)],
)
def test_servers_decide_how_many(servers, prompts, processes):
    config = loaded("--grpo.prompts_per_step", str(prompts), "--sft.batch_size", "8", servers=servers)
    assert rollout_processes(config) == processes


def test_each_process_has_a_part_of_each_minibatch():
    """Else some optimizer steps would have no answers."""
    for minibatches, processes in (("6", 2), ("12", 1)):
        flags = "--grpo.prompts_per_step", "12", "--grpo.minibatches", minibatches
        assert rollout_processes(loaded(*flags, servers=64)) == processes


def test_each_process_has_a_part_of_the_window():
    ahead = "--async_grpo.enabled", "--async_grpo.order_window"
    assert rollout_processes(loaded(*ahead, "129", servers=64)) == 1
    assert rollout_processes(loaded(*ahead, "130", servers=64)) == 2


def test_the_key_decides_if_it_is_set():
    assert rollout_processes(loaded("--rollout.processes", "4", servers=33)) == 4


ONE = {
    "serve_port": ["--rollout.serve_port", "8111"],
    "record_gib": ["--rollout.record_gib", "1"],
    "curriculum": ["--data.curriculum", "torchtitan.grpo.data.curricula:not_mastered"],
    "kl_placement": ["--grpo.kl_coef", "0.1", "--grpo.kl_placement", "reward"],
}


@pytest.mark.parametrize("key", ONE)
def test_what_needs_all_groups_in_one_place_has_one_process(key):
    assert rollout_processes(loaded(*ONE[key], servers=64)) == 1
    with pytest.raises(UserError, match=rf"processes = 2, and .*{key}.*leave one of them out"):
        loaded(*ONE[key], "--rollout.processes", "2")


def test_shares_are_equal():
    with pytest.raises(UserError, match=r"processes = 3 does not divide \[grpo\] prompts_per_step = 128"):
        loaded("--rollout.processes", "3")
    with pytest.raises(
        UserError, match=r"processes = 4 times \[grpo\] minibatches = 64 does not divide prompts_per_step"
    ):
        loaded("--rollout.processes", "4", "--grpo.minibatches", "64")
    ahead = ["--async_grpo.enabled", "--async_grpo.order_window", "129"]
    with pytest.raises(UserError, match=r"processes = 2 does not divide \[async_grpo\] order_window = 129"):
        loaded("--rollout.processes", "2", *ahead)


def test_shares_have_all_prompts_once_and_in_order():
    class Prompts:
        taken = 0

        def next(self, n: int) -> list[int]:
            self.taken += n
            return list(range(self.taken - n, self.taken))

    of_each = [Prompts() for _ in range(3)]
    drawn = [[Share(k, 3).next(prompts, n) for n in (2, 0, 3)] for k, prompts in enumerate(of_each)]
    assert drawn == [[[k, k + 3], [], [k + 6, k + 9, k + 12]] for k in range(3)]
    assert ALL.next(Prompts(), 4) == [0, 1, 2, 3]


def test_sizes_are_divided_and_nothing_else_changes():
    flags = "--rollout.max_concurrent_requests", "10", "--reward.workers", "3", "--metrics.samples_per_step", "5"
    config = loaded(*flags)
    own = of_each(config, 4)
    assert of_each(config, 1) is config
    assert (own.rollout.max_concurrent_requests, own.reward.workers, own.metrics.samples_per_step) == (3, 1, 2)
    assert (config.grpo.prompts_per_step, own.grpo.prompts_per_step) == (128, 32)
    assert config.rollout.max_concurrent_requests == 10, "the configuration itself is as before"
    assert own.async_grpo.max_age == config.async_grpo.max_age and own.data is config.data
