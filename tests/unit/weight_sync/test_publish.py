"""What `WeightSync.publish` waits for when there is one snapshot buffer; the threads around it are stand-ins."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.weight_sync.snapshot import Snapshots, primary_holdings
from torchtitan.grpo.weight_sync.sync import WeightSync


def one_snapshot(timeout_s: float) -> tuple[WeightSync, Snapshots]:
    snapshots = Snapshots({"weight": torch.ones(4)}, torch.float32, 1)
    (owned,) = primary_holdings([snapshots.held], snapshots.shapes)
    snapshots.allocate(owned)
    sync = WeightSync.__new__(WeightSync)
    sync._packer, sync._fleet, sync._board, sync._waits = SimpleNamespace(snapshots=snapshots), None, None, True
    sync._config = SimpleNamespace(timeout_seconds=timeout_s, async_weight_update=True)
    sync._pause = SimpleNamespace(in_flight=True)
    sync.check = lambda: None
    sync.publish(1)
    return sync, snapshots


@contextmanager
def sending(snapshots: Snapshots, seconds: float = 60.0) -> Iterator[None]:
    """Hold the newest version, as a push does, for so long or until the block ends."""
    held, over = threading.Event(), threading.Event()

    def push() -> None:
        with snapshots.hold(lambda newest: newest, 1.0, lambda: None):
            held.set()
            over.wait(seconds)

    thread = threading.Thread(target=push)
    thread.start()
    assert held.wait(10.0)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_push_may_take_longer_than_one_of_its_phases():
    sync, snapshots = one_snapshot(timeout_s=0.2)
    began = time.monotonic()
    with sending(snapshots, seconds=0.4):
        sync.publish(2)
        assert time.monotonic() - began > 0.3 and snapshots.newest == 2


def test_the_wait_is_bounded_and_named():
    sync, snapshots = one_snapshot(timeout_s=0.02)
    said = "waiting for this rank's buffer for version 2: all of 1 are being sent; its newest is 1"
    with sending(snapshots), pytest.raises(TimeoutError, match=said):
        sync.publish(2)


def test_what_fails_meanwhile_ends_the_wait():
    sync, snapshots = one_snapshot(timeout_s=30.0)
    looks = iter([None, None, FleetError("0 of 1 servers left")])

    def check() -> None:
        if (error := next(looks)) is not None:
            raise error

    sync.check = check
    with sending(snapshots), pytest.raises(FleetError, match="0 of 1 servers left"):
        sync.publish(2)
    assert snapshots.newest == 1
