"""Weights that live on the host, for one forward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.grpo.host_memory.offloading import HostedWeights


@contextmanager
def on_device(hosted: HostedWeights) -> Iterator[None]:
    hosted.finish()
    try:
        yield
    finally:
        hosted.release()
