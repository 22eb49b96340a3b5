"""The rendezvous of a weight-transfer group."""

import time
from concurrent.futures import Future

import pytest
import torch

from tests.helpers.ranks import free_port
from torchtitan.grpo.weight_wire.transport import Rendezvous, join_store

LOCALHOST = "127.0.0.1"


def test_nobody_waits_for_a_store_that_is_gone():
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"127\.0\.0\.1:\d+, where the other end listened.*it has given the connection up"
    ):
        join_store(LOCALHOST, free_port(), 60.0)
    assert time.monotonic() - started < 5


def test_a_rendezvous_that_is_given_up_tells_who_comes_late_and_waits_for_nobody():
    """The server has been asked to join, and is slow: it finds the store, or nobody."""
    rendezvous = Rendezvous("gloo", 2, torch.device("cpu"), 60.0, LOCALHOST)
    store = join_store(LOCALHOST, rendezvous.port, 60.0)
    started = time.monotonic()
    rendezvous.give_up(Future())
    assert time.monotonic() - started < 5
    assert isinstance(rendezvous.joined.exception(5), RuntimeError)
    with pytest.raises(RuntimeError):
        store.check(["anything"])
    with pytest.raises(RuntimeError, match="given the connection up"):
        join_store(LOCALHOST, rendezvous.port, 60.0)
