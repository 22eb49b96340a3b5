"""What the trainer's ranks say of each other when one does not come."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchtitan.grpo.weight_sync.ranks import Ranks


@pytest.mark.parametrize(
    ("rank", "command", "share"),
    [
        (0, "the trainer's other ranks to take a command in weight sync", "the trainer's other ranks in connect"),
        (1, "a command from trainer rank 0 in weight sync", "trainer rank 0 in connect"),
    ],
)
def test_each_end_of_a_broadcast_names_the_other(rank, command, share, monkeypatch):
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: SimpleNamespace(is_completed=lambda: False))
    ranks = Ranks(torch.device("cpu"), 0.01, 0.01)
    ranks.rank, ranks.size, ranks._messages = rank, 2, None
    with pytest.raises(TimeoutError, match=f"timed out waiting for {command}$"):
        ranks.command(1)
    with pytest.raises(TimeoutError, match=f"timed out waiting for {share}$"):
        ranks.share({}, "connect")
