"""Weight sync with embedded servers in the test's own process: how a run ends, and who may feed a server."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.helpers import TINY_QWEN3
from tests.helpers.embedded_servers import ServerThread
from tests.helpers.weight_senders import CPU, SYNC, weights_of
from torchtitan.grpo.engines.embedded.model import ModelUpdate
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.weight_sync.sync import WeightSync


@pytest.fixture
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(0), ServerThread(0)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., WeightSync]]:
    """A trainer that is connected to servers."""
    source = resolve_model(SimpleNamespace(flavor="", hf_assets_path=str(TINY_QWEN3), weights="random"), 64)
    model = source.build()
    with torch.no_grad():
        model.init_weights(buffer_device=CPU)
    made: list[WeightSync] = []

    def connect(urls: list[str], **settings) -> WeightSync:
        fleet = Fleet(urls, lambda url: make_server("embedded", url, None, 30.0, 30.0))
        config = dataclasses.replace(SYNC, async_weight_update=True, **settings)
        made.append(WeightSync(weights_of(source, model), config, fleet, CPU))
        made[-1].connect()
        return made[-1]

    yield connect
    for sync in made:
        sync.close()


def test_the_end_waits_for_a_server_that_is_fed_alone(servers, connect, monkeypatch):
    """It was too late for the last push, and is torn and paused until it has got a copy."""
    load, delays = ModelUpdate.load, [1.0]

    def load_late(self: ModelUpdate, tensors: list) -> None:
        time.sleep(delays.pop() if delays else 0.0)  # one server, once
        load(self, tensors)

    monkeypatch.setattr(ModelUpdate, "load", load_late)
    sync = connect([server.url for server in servers], straggler_seconds=0.2, bucket_mib_max=1, num_buffers=1)
    sync.publish(1)
    sync.drain()
    at_the_end = [(server.version, server.control.is_paused()) for server in sync._fleet.servers]
    assert delays == [] and any(report.missed for report in sync.finished()), "one was dropped"
    assert at_the_end == [(1, False), (1, False)]
