"""What goes wrong in an explanation costs the explanation alone."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.run import explanation
from torchtitan.grpo.run.explanation import Explanation

URL = "http://a:1"


@pytest.fixture
def trainer(monkeypatch):
    """Of rank 0. The server is there, has the newest version, and cannot be asked."""
    server = SimpleNamespace(url=URL, lost=False, in_traffic=True, version=3)
    sync = SimpleNamespace(newest=3, whole_tensors=lambda: ((name, torch.zeros(1)) for name in taken))
    taken = {"a": 0, "b": 0}
    ask = Mock(side_effect=KeyError("no such verb"))
    monkeypatch.setattr(Explanation, "_held", lambda self, url: held)
    held = SimpleNamespace(take=Mock(side_effect=torch.OutOfMemoryError("no room")))
    return SimpleNamespace(
        config=JobConfig(),
        ending=SimpleNamespace(trained=0),
        broadcast=SimpleNamespace(json=lambda value: value),
        is_rank0=True,
        weight_sync=sync,
        rollouts=SimpleNamespace(fleet=SimpleNamespace(servers=[server]), ask=ask),
        layout=SimpleNamespace(row_tokens=8),
        source=SimpleNamespace(model_args=None),
        held=held,
    )


def test_rank_0_ends_what_it_has_begun_with_the_others(trainer):
    assert Explanation(trainer)(URL) == "unknown: 'no such verb'"
    assert trainer.held.take.call_count == 1, "the others gather the rest with it"


def test_a_document_that_no_row_has_room_for_is_left_out(trainer):
    trainer.rollouts.ask = lambda url, version: [[[list(range(9)), 5, [-0.5] * 4, [], []]], ""]
    assert Explanation(trainer)(URL).startswith("unknown: ")


def test_kept_tokens_of_an_answer_belong_to_its_document():
    kept = explanation._kept([list(range(7)), 4, [], [], [[2, 0, 1], [5, 9, 7]]])
    assert kept.counts.tolist() == [0, 0, 0, 2, 0, 1] and kept.ids.tolist() == [5, 9, 7]
    assert explanation._kept([[1, 2], 1, [], [], []]) is None
