"""grpo_train.py that loses its rollout process.

Variables of its environment:
    LOSSES      JSON list of [verb, number, when, signal]: of a call by its verb's number, "before", "amid" or "after"
                it. A fifth value is a signal that the trainer then sends itself. If the process has had a loss before,
                it is the first such call of the next one.
    PROCESSES   File that gets a line of JSON about each process, before it is asked for its first answer.
    FROZEN_S, STOP_S, LOSSES_MAX   In place of the constants of these names.
    PUBLISH_S   Seconds that each publish takes longer, as if a server were slow.
    BEGIN_S     Seconds that a process which takes the place of another takes longer to begin.
"""

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpo_train
from torchtitan.grpo.process.stopping import run_and_exit
from torchtitan.grpo.run import kept_process, rollout_process
from torchtitan.grpo.run.kept_process import KeptProcess
from torchtitan.grpo.run.rollout_process import RolloutProcess
from torchtitan.grpo.weight_sync.sync import WeightSync

AMID_S = 0.2
_call, _publish, _begin = RolloutProcess.call, WeightSync.publish, KeptProcess._begin
_counts: Counter[str] = Counter()
_losses = json.loads(os.environ.get("LOSSES", "[]"))
_hit: set[int] = set()
_lock = threading.Lock()
_moments = random.Random(0)


def call(process: RolloutProcess, verb: str, *arguments: Any, **others: Any) -> Any:
    due = due_at(process.pid, verb)
    when, later = due[2] if due else "", None
    if when == "before":
        send(process.pid, due)
    elif when == "amid":
        later = threading.Timer(_moments.uniform(0, AMID_S), send, (process.pid, due))
        later.start()
    try:
        answer = _call(process, verb, *arguments, **others)
    finally:
        if later is not None:
            later.join()  # a quick answer may come first
    if when == "after":
        send(process.pid, due)
    if verb == "connect" and (path := os.environ.get("PROCESSES")):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(about(process.pid)) + "\n")
    return answer


def due_at(pid: int, verb: str) -> list[Any] | None:
    """The loss that belongs to this call, or None."""
    with _lock:
        _counts[verb] += 1
        if pid in _hit:  # it is lost already: the loss is that of the one that takes its place, and so is this call
            return None
        due = next((loss for loss in _losses if loss[0] == verb and loss[1] <= _counts[verb]), None)
        if due:
            _losses.remove(due)
            _hit.add(pid)
        return due


def publish(sync: WeightSync, version: int, wait: bool = False) -> None:
    _publish(sync, version, wait)
    time.sleep(float(os.environ.get("PUBLISH_S", 0)))


def begin(kept: KeptProcess, began: float) -> None:
    time.sleep(float(os.environ.get("BEGIN_S", 0)))
    _begin(kept, began)


def send(pid: int, loss: list[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, loss[3])
    for number in loss[4:]:
        os.kill(os.getpid(), number)


def about(pid: int) -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    has_torch = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    program = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return {"pid": pid, "rss_kib": int(status["VmRSS"].split()[0]), "torch": has_torch, "program": program}


RolloutProcess.call, WeightSync.publish, KeptProcess._begin = call, publish, begin  # type: ignore[method-assign]
rollout_process.FROZEN_S = float(os.environ.get("FROZEN_S", rollout_process.FROZEN_S))
rollout_process.STOP_S = float(os.environ.get("STOP_S", rollout_process.STOP_S))
kept_process.LOSSES_MAX = int(os.environ.get("LOSSES_MAX", kept_process.LOSSES_MAX))

if __name__ == "__main__":
    run_and_exit(lambda: grpo_train.main(sys.argv[1:]))
