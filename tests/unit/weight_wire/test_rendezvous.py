"""The rendezvous of a weight-transfer group, and a trainer that gives it up, is gone or is frozen."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.ranks import free_port
from torchtitan.grpo.weight_wire.rendezvous import Rendezvous, join_store
from torchtitan.grpo.weight_wire.transport import Group, wait

LOCALHOST = "127.0.0.1"
CPU = torch.device("cpu")
TRAINER = """
import time, torch
from torchtitan.grpo.weight_wire.rendezvous import Rendezvous
rendezvous = Rendezvous("gloo", 2, torch.device("cpu"), 60.0, "127.0.0.1")
print(rendezvous.port, flush=True)
group = rendezvous.group()
time.sleep(600)
"""


@contextmanager
def trainer() -> Iterator[tuple[subprocess.Popen, int]]:
    """Rank 0 in a process of its own, and its port."""
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("takes_s", [0.001, 0.035, 0.4])
def test_a_wait_takes_little_longer_than_its_work(takes_s: float):
    rests: list[float] = []
    work = SimpleNamespace(is_completed=lambda: sum(rests) >= takes_s, wait=lambda: None)
    wait(work, time.monotonic() + 60, "a bucket", rest=rests.append)
    assert sum(rests) < 1.1 * takes_s + 0.0003 and len(rests) < 60


def test_nobody_waits_for_a_store_that_is_gone():
    started = time.monotonic()
    said = r"127\.0\.0\.1:\d+, where the other end listened.*it has given the connection up"
    with pytest.raises(RuntimeError, match=said):
        join_store(LOCALHOST, free_port(), 60.0)
    assert time.monotonic() - started < 5


def test_a_rendezvous_that_is_given_up_tells_who_comes_late_and_waits_for_nobody():
    """The server has been asked to join, and is slow: it finds the store, or nobody."""
    rendezvous = Rendezvous("gloo", 2, CPU, 60.0, LOCALHOST)
    store = join_store(LOCALHOST, rendezvous.port, 60.0)
    started = time.monotonic()
    rendezvous.give_up(Future())
    assert time.monotonic() - started < 5
    assert isinstance(rendezvous.joined.exception(5), RuntimeError)
    with pytest.raises(RuntimeError):
        store.check(["anything"])
    with pytest.raises(RuntimeError, match="given the connection up"):
        join_store(LOCALHOST, rendezvous.port, 60.0)


def test_a_frozen_trainer_holds_nobody_longer_than_the_bound_and_a_dead_one_no_buffers():
    """Its connections are open, and a question to its store would wait for as long as it is frozen."""
    with trainer() as (process, port):
        group = Group("gloo", join_store(LOCALHOST, port, 60.0), 1, 2, CPU, 60.0, LOCALHOST)
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="timed out waiting for a bucket"):
            wait(group.broadcast(torch.zeros(4)), started + 1.5, "a bucket", group.raise_if_abandoned, group.rest)
        with pytest.raises(TimeoutError, match=f"{port}, where the other end listened for this connection, does not"):
            join_store(LOCALHOST, port, 1.5)
        assert time.monotonic() - started < 10

        process.kill()
        held = []

        def receive() -> None:
            buffer = torch.zeros(4)
            held.append(weakref.ref(buffer))
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:  # not `wait`, which would hear of it from gloo
                group.raise_if_abandoned()
                time.sleep(0.01)
            pytest.fail("nobody says that it is dead")

        gc.disable()
        try:
            with suppress(RuntimeError):
                receive()
            assert held[0]() is None, "the error is forgotten, and its frames with it"
        finally:
            gc.enable()
        group.abort()
