"""A rank whose rank 0 keeps the others waiting: `broadcast_worker.py <how rank 0 waits>`."""

import os
import queue
import signal
import sys
import threading
import time

import torchtitan_overlay  # noqa: F401  before torchtitan

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.microbatches import assert_equal
from torchtitan.grpo.config.torchtitan_keys import Debug
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample, encoded
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.run import broadcast
from torchtitan.grpo.run.broadcast import Broadcaster
from torchtitan.grpo.run.watchdog import Progress, Watchdog

LIMIT_S, SILENCE_S = 4.0, 3.0
BEAT_S = 0.2


def own_rows_only(broadcaster: Broadcaster) -> None:
    """Rank 0 has rows for two data-parallel ranks, of different sizes. Each rank gets its own."""
    samples = [
        PackedSample([1], [2] * n, 1.0, 1.0, [-0.5] * n, routes=np.full((n, 2, 1), n, np.uint8)) for n in (3, 60)
    ]
    packed = pack(samples, 64, 2)
    for step in range(2):
        own = broadcaster.rows(encoded(packed) if broadcaster.is_source else None, broadcaster.rank)
        assert_equal(own, packed[broadcaster.rank])
        assert step or broadcaster.is_source or len(own[0].tokens) == len(own[0].routes) == 3


def main(how: str) -> None:
    dist.init_process_group("gloo")
    broadcast.BEAT_S = BEAT_S  # a busy machine may make a beat a second late: the limits are far longer
    silence_s = SILENCE_S if how == "frozen" else 60.0
    ledger = Ledger(torch.device("cpu"))
    progress = Progress(ledger)
    groups = 0
    progress.watch(lambda: groups)
    hang_s = LIMIT_S if how == "busy" else 0.0
    with (
        Broadcaster(progress, LIMIT_S, silence_s) as broadcaster,
        Watchdog(Debug(hang_seconds=hang_s, hang_exit_code=5), progress, [broadcaster.describe]),
    ):
        assert broadcaster.json("begin") == "begin"
        if how == "stop":
            return stop(broadcaster)
        if broadcaster.is_source:
            with ledger.stage("validate"):
                if how == "frozen":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "gone":
                    time.sleep(15 * BEAT_S)  # the other rank reads what this one wrote up to two beats ago
                    os._exit(9)
                for groups in range(1, 26):  # noqa: B007  `progress` reads it
                    time.sleep(LIMIT_S / 20)
                if how == "stuck":
                    time.sleep(60)
        waited_from = time.monotonic()
        try:
            assert broadcaster.json("done") == "done"
            own_rows_only(broadcaster)
        except (RuntimeError, TimeoutError) as error:
            print(f"after {time.monotonic() - waited_from:.1f} s: {type(error).__name__}: {error}", flush=True)
            os._exit(3)
    dist.destroy_process_group()


def stop(broadcaster: Broadcaster) -> None:
    """Rank 1 fails, and asks to stop while it waits for the next value. Each rank learns of it, and rank 0 why."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    broadcaster.on_stop = asked.put
    if broadcaster.is_source:
        assert asked.get(timeout=20) == "no memory \\ud83d"
        broadcaster.stop_all()
        broadcaster.stop_all(UserError("too few servers"))
        broadcaster.stop_all()
    else:
        threading.Timer(0.2, broadcaster.request_stop, ["no memory \ud83d"]).start()
        for why in ("", "too few servers"):
            try:
                broadcaster.json()
                os._exit(4)
            except StopRequested as stop:
                assert stop.why == why and stop.refused == bool(why)
        try:
            broadcaster.rows(None, 0)
            os._exit(5)
        except StopRequested:
            assert asked.get(timeout=20) == ""
    assert broadcaster.json("after") == "after"


if __name__ == "__main__":
    main(sys.argv[1])
