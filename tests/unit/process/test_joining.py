"""The ranks of one attempt find one another, and none that has ended."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.joining import agree, store_of_this_attempt, tell_waiting_ranks

LIMIT = timedelta(seconds=20)


@pytest.fixture
def agents():
    """torchrun's store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined(agents: dist.TCPStore, ranks: int, rank_0_comes_after_s: float = 0.0) -> list[object]:
    """What `agree` gives each rank, or raises; each has a connection of its own, as processes do."""
    results: list[object] = [None] * ranks

    def join(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", agents.port, is_master=False)
        time.sleep(rank_0_comes_after_s if rank == 0 else 0)
        try:
            results[rank] = agree(store, rank, ranks, LIMIT)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_an_attempt_does_not_see_the_keys_of_the_one_before(agents, monkeypatch):
    """Each node's torchrun counts restarts by itself, so their number says nothing."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agents.port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}).items():
        monkeypatch.setenv(name, str(value))
    for _ in range(2):
        with store_of_this_attempt():
            dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        assert not store.check(["address"])
        store.set("address", "of a rank")
        dist.destroy_process_group()


def test_ranks_agree_on_a_name_that_no_earlier_attempt_had(agents):
    """In the second attempt the others come first: what they find is the first attempt's."""
    names = [set(joined(agents, 3, late_s)) for late_s in (0.0, 0.3, 0.0)]
    assert [len(each) for each in names] == [1, 1, 1] and len(set.union(*names)) == 3
    assert all(isinstance(name, str) for each in names for name in each)


def test_a_rank_that_does_not_come_is_named(agents):
    with pytest.raises(
        TimeoutError, match=r"waited 0.2 s \(\[comm\] init_timeout_seconds\) for rank 1 to join the run"
    ):
        agree(agents, 0, 2, timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="for rank 0 to join"):
        agree(agents, 1, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize(("max_restarts", "local_world_size"), [(0, 1), (1, 1), (0, 2)])
def test_other_nodes_learn_why_rank_0_has_failed_unless_it_tries_again(
    max_restarts, local_world_size, agents, monkeypatch
):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agents.port, "RANK": 0, "WORLD_SIZE": 2}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    variables |= {"TORCHELASTIC_MAX_RESTARTS": max_restarts, "LOCAL_WORLD_SIZE": local_world_size}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    tell_waiting_ranks(UserError("[data] path \udcff is no file"))
    told = max_restarts == 0 and local_world_size == 1
    error, words = (UserError, r"failed at its start: .* \\udcff is no file") if told else (TimeoutError, "rank 0")
    with pytest.raises(error, match=words):
        agree(agents, 1, 2, timedelta(seconds=0.2))
