"""Weight sync with embedded servers in the test's own process: how a run ends, and who may feed a server."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.embedded_servers import ServerThread
from tests.helpers.weight_senders import CPU, SYNC, weights_of
from torchtitan.grpo.engines.embedded.model import ModelUpdate
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.weight_sync import worker
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.grpo.weight_wire.version_names import version_name

OTHER_TRAINER = """
import sys, threading, torch
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.weight_sync.link import Pause, GroupLink
from torchtitan.grpo.weight_wire.buckets import TensorSpec, plan_buckets, plan_to_json
from torchtitan.grpo.weight_wire.receiver import PROTOCOL
from torchtitan.grpo.weight_wire.version_names import own_run

plan = plan_to_json(plan_buckets([TensorSpec("weight", torch.float32, (8,))], 1 << 10))
for url in sys.argv[1:]:
    arguments = "gloo", torch.device("cpu"), 20.0, Pause(), lambda: None, lambda: None, lambda: 0
    link = globals()[url] = GroupLink(VllmControl(url, None, 20.0), *arguments)
    shared = {"num_buffers": 1, "timeout_seconds": 20.0, "plan": plan}
    link.connect({"protocol": PROTOCOL, "run": own_run()} | shared)
print(own_run(), flush=True)
threading.Event().wait()
"""


@pytest.fixture
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(0, takes_weights=True) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., WeightSync]]:
    """A trainer that is connected to servers."""
    source = resolve_model(SimpleNamespace(hf_assets_path=str(TINY_QWEN3), weights="random"), 64)
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
    monkeypatch.setattr("torchtitan.grpo.weight_sync.sync.NUM_BUFFERS", 1)
    sync = connect([server.url for server in servers], straggler_seconds=0.2, buffer_memory_ratio=1e-9)
    sync.publish(1)
    sync.drain()
    at_the_end = [(server.version, server.control.is_paused()) for server in sync._fleet.servers]
    assert delays == [] and any(report.missed for report in sync.finished()), "one was dropped"
    assert at_the_end == [(1, False), (1, False)]


def test_a_server_has_one_trainer(servers, connect):
    """A second one is refused while the first lives. If that is frozen or dead, the server changes hands."""
    command = [sys.executable, "-c", OTHER_TRAINER, *(server.url for server in servers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        try:
            run = other.stdout.readline().strip()
            with pytest.raises(
                UserError, match=rf"{servers[0].url}: this server .* run {run} \(process {other.pid} on"
            ):
                connect([servers[0].url])
            other.send_signal(signal.SIGSTOP)
            connect([servers[0].url])
        finally:
            other.kill()
    started = time.monotonic()
    connect([servers[1].url])
    assert time.monotonic() - started < 5


def test_the_same_number_of_another_run_is_not_our_version(servers, connect, monkeypatch):
    """The server is found out at the next look, named with the other run, and gets our weights again."""
    monkeypatch.setattr(worker, "HEALTH_S", 0.1)
    sync = connect([server.url for server in servers])
    reasons, withdraw = [], sync._fleet.withdraw

    def note(server: Server, why: str) -> None:
        reasons.append((server.url, why))
        withdraw(server, why)

    monkeypatch.setattr(sync._fleet, "withdraw", note)
    sync.publish(5)
    sync.drain()
    servers[1].generator.version = version_name(5, "there-7-a1")
    deadline = time.monotonic() + 10
    while not reasons or servers[1].generator.version != version_name(5):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ((url, why),) = reasons
    assert url == servers[1].url and "run there-7-a1 (process 7 on there) feeds the server too" in why
