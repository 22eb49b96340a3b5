"""Signs of life between nodes. What else nodes owe one another needs processes: tests/integration/test_nodes.py."""

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from torchtitan.grpo.run.nodes import watch


class Head:
    """The watch of a node's first rank, in a thread with a connection of its own."""

    def __init__(self, port: int, rank: int, silence_s: float = 1.0) -> None:
        self.closed, self.said = threading.Event(), "still watches"
        store = dist.TCPStore("127.0.0.1", port, is_master=False)

        def run() -> None:
            self.said = watch(store, rank, [0, 4, 8], self.closed, silence_s, gone_s=0.1)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


def within(limit_s: float, ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_s
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)
    return ready()


def test_a_silent_node_is_named_on_all_others():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heads = [Head(store.port, rank) for rank in (0, 4, 8)]
    assert not within(1.5, lambda: any(head.said != "still watches" for head in heads)), "all of them live"
    heads[1].closed.set()
    assert within(5, lambda: all(head.said != "still watches" for head in heads))
    assert heads[1].said == "", "it was closed"
    assert {heads[0].said, heads[2].said} == {"the node of rank 4 has not been heard of for 1 s"}


def test_without_the_store_every_node_ends_after_a_while_unless_it_was_closed():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heads = [Head(store.port, rank, silence_s=60.0) for rank in (0, 4)]
    heads[1].closed.set()
    heads[1].thread.join(5)
    del store
    assert within(5, lambda: heads[0].said != "still watches")
    assert heads[0].said == "torchrun's store is gone, and with it the node that held it" and heads[1].said == ""
