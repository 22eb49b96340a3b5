"""What the nodes of a run owe one another: the same folder, the same mesh, and a sign of life."""

import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.hub import fetched, named
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.target import this_machine
from torchtitan.grpo.dry_run.copies import choose_copies
from torchtitan.grpo.errors import UserErrorOfAllRanks
from torchtitan.grpo.process.joining import tell_waiting_ranks
from torchtitan.grpo.process.stopping import stop
from torchtitan.grpo.weight_wire.transport import in_thread
from torchtitan.tools.logging import logger

_PREFIX = "torchtitan-grpo/nodes"
_BEATS = f"{_PREFIX}/beat"
_ANSWER_S = 120.0
"""Longest wait for another rank's word in `settle`, where all ranks do the same."""
_VISIBLE_S = 30.0
"""How long a network file system may take to show a file that another node has made."""
_FOLDER_S = 2.0
"""The same for the folder itself, which rank 0 has made long before."""
_POLL_S = 0.1
_BEAT_S = 2.0
_SILENCE_S = 120.0
"""A node that is silent for so long has lost its power or its network. Its sockets do not tell."""
_GONE_S = 30.0
"""How long a rank may take to end by itself after torchrun's store is gone."""


class Nodes:
    """The run's nodes. Enter it before anything that only rank 0 may fail in; `settle` once the ranks have joined.

    After an error on rank 0 before that, the ranks that wait for it are told (`joining.tell_waiting_ranks`).

    Args:
        job: What runs. It decides how much memory a copy of the model is estimated to need.
    """

    def __init__(self, config: JobConfig, job: Job) -> None:
        self._config, self._job = config, job
        self._settled = False
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._closed.set()
        if error is not None and not self._settled and os.environ.get("RANK", "0") == "0":
            tell_waiting_ranks(error)

    def fetch(self) -> JobConfig:
        """Fetch the model, and on rank 0 the data, that the configuration names by an id of the hub.

        Returns:
            The configuration with local folders in their place.

        Raises:
            UserError: See `hub.fetched`.
        """
        self._config = fetched(self._config, data=os.environ.get("RANK", "0") == "0")
        return self._config

    def settle(self) -> JobConfig:
        """Check that all nodes see rank 0's folder of checkpoints, and have the same model of the hub. Settle how many
        copies of it there are.

        Collective over the default group's store. Where `[parallelism] data_parallel_replicate_degree` is 0, the
        configuration that each rank gets back has the number that rank 0 has chosen. From here on, each node watches
        the others.

        Raises:
            UserErrorOfAllRanks: On every rank: a node does not see the folder, or cannot write to it.
            TimeoutError: Another rank does not answer.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        answer: dict[str, Any] = {"ranks_here": int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), "problem": ""}
        folder = self._config.model.hf_assets_path
        answer["of_hub"] = named(folder) if named(folder) != folder else ""
        with self._witness() if rank == 0 and world_size > 1 else contextlib.nullcontext() as witness:
            if rank == 0:
                store.set("witness", json.dumps(witness))
            witness = _get(store, "witness", "rank 0")
            if witness and rank != 0 and local_rank == 0:
                answer["problem"] = self._look_for(witness, rank)
            store.set(f"rank-{rank}", json.dumps(answer | {"local_rank": local_rank}))
            if rank == 0:
                answers = [_get(store, f"rank-{other}", f"rank {other}") for other in range(world_size)]
                store.set("verdict", json.dumps(self._verdict(answers)))
        verdict = _get(store, "verdict", "rank 0")
        self._settled = True
        if verdict["problems"]:
            store.set(f"told-{rank}", "")
            for other in range(world_size if rank == 0 else 0):  # they may need this process for the store
                with contextlib.suppress(TimeoutError):
                    _get(store, f"told-{other}", f"rank {other}", _POLL_S * 50, parse=False)
            raise UserErrorOfAllRanks("; ".join(verdict["problems"]))
        heads = verdict["heads"]
        if len(heads) > 1 and rank in heads:
            threading.Thread(target=self._watch, args=(heads,), name="node-watch", daemon=True).start()
        return changed(self._config, {"parallelism.data_parallel_replicate_degree": verdict["copies"]})

    @contextlib.contextmanager
    def _witness(self) -> Any:
        """A file in the folder of checkpoints, with a name that no node has looked up before. Its name and path."""
        if not self._config.checkpoint.enable:
            yield None
            return
        folder = self._folder()
        path = folder / f"witness-{secrets.token_hex(8)}"
        path.touch()
        try:
            yield {"name": path.name, "of": f"{socket.gethostname()}:{folder.absolute()}"}
        finally:
            path.unlink(missing_ok=True)

    def _folder(self) -> Path:
        return Path(self._config.job.dump_folder) / self._config.checkpoint.folder

    def _look_for(self, witness: dict[str, str], rank: int) -> str:
        """What is wrong with the folder on this node; "" if nothing is."""
        folder, deadline = self._folder(), time.monotonic() + _VISIBLE_S
        who = f"rank {rank} on {socket.gethostname()}"
        change = "set [job] dump_folder to a folder that all nodes share (NFS, Lustre, ...)"
        if not folder.is_dir():
            deadline = time.monotonic() + _FOLDER_S
        while not (folder / witness["name"]).exists():
            if time.monotonic() > deadline:
                return f"{who} does not see rank 0's checkpoints {witness['of']} in {folder.absolute()}: {change}"
            time.sleep(_POLL_S)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            return f"{who} cannot write to {folder.absolute()} ({error}): {change}"
        return ""

    def _verdict(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: what all ranks do."""
        world_size, sizes = len(answers), {answer["ranks_here"] for answer in answers}
        heads = [rank for rank, answer in enumerate(answers) if answer["local_rank"] == 0]
        copies = choose_copies(self._config, world_size, len(heads), this_machine(), len(sizes) == 1, self._job)
        if len(heads) > 1:
            logger.info(f"{world_size} ranks on {len(heads)} nodes. {copies.describe(world_size)}")
        problems = [answer["problem"] for answer in answers if answer["problem"]]
        if other := [rank for rank, answer in enumerate(answers) if answer["of_hub"] != answers[0]["of_hub"]]:
            models = [answers[rank]["of_hub"] or "a local folder" for rank in (0, other[0])]
            problems.append(
                f"[model] hf_assets_path is {models[0]} on rank 0 and {models[1]} on rank {other[0]}: name a commit, "
                "as in owner/name@commit"
            )
        return {"problems": problems, "copies": copies.degree, "heads": heads}

    def _watch(self, heads: list[int]) -> None:
        """In a thread of each node's first rank (`heads`): end the run if a node gives no sign of life."""
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store().clone()
        if why := watch(dist.PrefixStore(_BEATS, store), rank, heads, self._closed, _SILENCE_S):
            print(f"error on rank {rank}: {why}: the run ends", file=sys.stderr, flush=True)
            stop(1)


def watch(
    store: dist.Store, rank: int, heads: list[int], closed: threading.Event, silence_s: float, gone_s: float = _GONE_S
) -> str:
    """Give signs of life in the store, until another node gives none.

    Args:
        heads: The first rank of each node. They all do this.

    Returns:
        What has happened; "" if it was `closed` first.
    """
    seen: dict[int, tuple[bytes, float]] = {}

    def exchange(count: int) -> None:
        store.set(str(rank), str(count))
        for head in heads:
            said = store.get(str(head)) if store.check([str(head)]) else b""
            if head not in seen or said != seen[head][0]:
                seen[head] = said, time.monotonic()

    try:
        for count in itertools.count():
            # In a thread: a store whose machine is down does not answer, and its client waits for half an hour.
            in_thread(partial(exchange, count), "node-beat").result(silence_s)
            silent = [str(head) for head in heads if time.monotonic() - seen[head][1] > silence_s]
            if silent:
                return f"the node of rank {' and '.join(silent)} has not been heard of for {silence_s:g} s"
            if closed.wait(min(_BEAT_S, silence_s / 4)):
                return ""
    except TimeoutError:
        return "" if closed.is_set() else f"the node that holds torchrun's store has not answered for {silence_s:g} s"
    except RuntimeError:  # from the store
        if not closed.wait(gone_s):
            return "torchrun's store is gone, and with it the node that held it"
    return ""


def _get(store: dist.Store, key: str, whom: str, limit_s: float = _ANSWER_S, parse: bool = True) -> Any:
    """The JSON value of a key that `whom` sets."""
    deadline = time.monotonic() + limit_s
    while not store.check([key]):  # not `wait`, which signals do not interrupt
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for {whom} while the nodes of the run settled")
        time.sleep(0.01)
    return json.loads(store.get(key)) if parse else None
