"""Signs of life between nodes. What else nodes owe one another needs processes: tests/integration/test_nodes.py."""

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.run.nodes import Nodes, watch

SHORT = ("--data.max_prompt_tokens", "64", "--rollout.max_answer_tokens", "64")


class Head:
    """The watch of a node's first rank, in a thread with a connection of its own."""

    def __init__(self, port: int, rank: int, silence_s: float = 2.0) -> None:
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
    assert not within(2.5, lambda: any(head.said != "still watches" for head in heads)), "all of them live"
    heads[1].closed.set()
    assert within(10, lambda: all(head.said != "still watches" for head in heads))
    assert heads[1].said == "", "it was closed"
    assert {heads[0].said, heads[2].said} == {"the node of rank 4 has not been heard of for 2 s"}


def test_without_the_store_every_node_ends_after_a_while_unless_it_was_closed():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heads = [Head(store.port, rank, silence_s=60.0) for rank in (0, 4)]
    heads[1].closed.set()
    heads[1].thread.join(5)
    del store
    assert within(5, lambda: heads[0].said != "still watches")
    assert heads[0].said == "torchrun's store is gone, and with it the node that held it" and heads[1].said == ""


def test_nodes_with_other_commits_of_the_model_are_refused():
    config = load_config(["--model.hf_assets_path", str(TINY_QWEN3), "--training.seq_len", "512", *SHORT])
    nodes = Nodes(config, "grpo")
    each = {"ranks_here": 1, "local_rank": 0, "problem": ""}

    def problems(*models: str) -> list[str]:
        return nodes._verdict([each | {"of_hub": model} for model in models])["problems"]

    assert problems("", "") == problems("a/b@1", "a/b@1") == []
    assert problems("a/b@1", "a/b@1", "a/b@2") == [
        "[model] hf_assets_path is a/b@1 on rank 0 and a/b@2 on rank 2: name a commit, as in owner/name@commit"
    ]
    assert "is a local folder on rank 0 and a/b@1 on rank 1" in problems("", "a/b@1")[0]
