"""Ranks that torchrun has started again."""

import pytest
import torch.distributed as dist

from torchtitan.grpo.restarts import store_of_this_attempt


@pytest.mark.parametrize("same", [False, True])
def test_an_attempt_does_not_see_the_keys_of_the_one_before(same, monkeypatch):
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agents.port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    seen = []
    for attempt in (0, 0) if same else (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with store_of_this_attempt():
            dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        seen.append(store.check(["address"]))
        store.set("address", "of a rank")
        dist.destroy_process_group()
    assert seen == [False, same]
