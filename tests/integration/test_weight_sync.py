"""Weights from real trainer ranks to receivers in other processes, by gloo and "ipc": what arrives, how it fails."""

import json
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from process_group import free_port
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks

HERE = ROOT / "tests" / "helpers"
SYNC = {"dtype": "float32", "buffer_memory_ratio": 1e-9, "timeout_seconds": 20.0}
"""In buckets of 1 MiB."""


def save_model(folder: Path, family: str, tied: bool) -> Path:
    """A random model that takes several buckets of 1 MiB; FSDP2 splits some of its sizes unevenly."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=510, hidden_size=128, intermediate_size=510, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if family == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    return folder


class Receivers:
    """Receiver processes, by address. One that was killed may be started again at its address."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._processes: dict[str, Ranks] = {}
        self._flags: dict[str, tuple[str, ...]] = {}
        self._ready: dict[str, Path] = {}

    def start(self, *flags: str) -> str:
        return self._start(self._folder / f"receiver{len(self._processes)}", flags, free_port())

    def _start(self, ready: Path, flags: tuple[str, ...], port: int) -> str:
        process = Ranks(1, HERE / "receiver_process.py", ready, port, *flags, log=ready.with_suffix(".log"))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline, "the receiver did not start"
            assert process.poll() is None, "the receiver ended"
            time.sleep(0.05)
        url = ready.read_text()
        self._processes[url], self._flags[url], self._ready[url] = process, flags, ready
        return url

    def kill(self, url: str) -> None:
        self._processes[url].kill()

    def restart(self, url: str) -> None:
        self._ready[url].unlink()
        assert self._start(self._ready[url], self._flags[url], urlsplit(url).port) == url

    def taken(self, url: str) -> list[tuple[int, str]]:
        """(version, digest) of each version that the server took into service, over all its lives."""
        path = Path(f"{self._ready[url]}.taken")
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(version), digest) for version, digest in map(str.split, lines)]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()


@pytest.fixture
def receivers(tmp_path):
    receivers = Receivers(tmp_path)
    yield receivers
    receivers.close()


class Trainer:
    """Trainer ranks; see `weight_sync_worker`."""

    def __init__(self, work: Path, ranks: int, **job):
        self._out = work / "out"
        job = {"tp": 1, "out": str(self._out)} | job
        self.ranks = Ranks(ranks, HERE / "weight_sync_worker.py", json.dumps(job), log=work / "log", cwd=work)

    def records(self, timeout_s: float = 100) -> list[dict]:
        """Each rank's, when all have ended."""
        self.ranks.check(timeout_s)
        return [json.loads(Path(f"{self._out}.{rank}").read_text()) for rank in range(len(self.ranks.processes))]


def assert_only_whole_versions(receivers: Receivers, urls: list[str], loop: dict) -> None:
    """Every version that a server took into service equals what the trainer published, byte for byte (I3)."""
    for url in urls:
        for version, digest in receivers.taken(url):
            assert digest == loop["expected"][str(version)], f"{url} served something else as version {version}"


@pytest.mark.parametrize(
    ("ranks", "tp", "family", "tied", "servers", "num_buffers", "dtype", "background", "transport"),
    [
        (1, 1, "qwen3", True, 1, 1, "float32", True, "gloo"),
        (2, 1, "llama3", False, 2, 2, "bfloat16", False, "gloo"),
        (4, 2, "qwen3", False, 1, 3, "float32", True, "gloo"),
        (1, 1, "qwen3", True, 2, 2, "bfloat16", False, "ipc"),
    ],
    ids=["one-rank-async", "fsdp2-two-servers", "fsdp2-x-tp2-async", "ipc-two-servers"],
)
def test_every_version_arrives_and_torn_buckets_are_refused_and_repaired(
    tmp_path, receivers, ranks, tp, family, tied, servers, num_buffers, dtype, background, transport
):
    folder = save_model(tmp_path / "model", family, tied)
    urls = [receivers.start() for _ in range(servers)]
    acts = [["publish", 1], ["publish", 2], ["flip", 3], ["publish", 4], ["trailer", 5], ["publish", 6]]
    sync = SYNC | {
        "dtype": dtype,
        "async_weight_update": background,
        "transport": transport,
    }
    # With one server min_servers = 0, so that its loss is not the end of the run.
    seen = Trainer(
        tmp_path,
        ranks,
        folder=str(folder),
        tp=tp,
        urls=urls,
        sync=sync,
        acts=acts,
        min_servers=servers - 1,
        num_buffers=num_buffers,
    ).records()
    for act in seen[0]["acts"]:
        version = act["version"]
        assert act["tensors"] >= 29
        assert act["equal"] == [True] * servers
        assert act["paused"] == [False] * servers
        assert act["served"] == [version] * servers
        damaged = act["kind"] != "publish"
        if not background:
            assert act["had_it"].count(False) == damaged, "publish waits for all that are well"
        got = [
            len(seconds)
            for (_, seconds), report in zip(act["seconds"], act["reports"], strict=True)
            if report[0] == version
        ]
        assert sum(got) == servers
        for (seconds, by_server), (_, _, buckets, missed, waited, alone) in zip(
            act["seconds"], act["reports"], strict=True
        ):
            assert buckets >= 4, "the model must take several buckets for this test to mean much"
            assert missed <= damaged
            assert alone or waited is (not background) or damaged
            assert alone or seconds.keys() == {"snapshot", "gather", "pack", "total"}
            for phases in by_server.values():
                assert phases.keys() == {"pause", "wire", "apply", "acknowledge", "stopped", "total"}
                assert phases["wire"] + phases["apply"] <= phases["stopped"] <= phases["total"]
                assert 0 < phases["wire"] <= phases["total"]
    for act in (act for record in seen[1:] for act in record["acts"] if not background):
        assert act["gave"] == act["version"], "no rank goes on to collectives of its own while rank 0 waits for it"
    losses = [event for event in seen[0]["events"] if event[1] != "admit"]
    assert [event[1] for event in losses] == ["lost", "lost"]
    for (_, _, url, reason), version in zip(losses, (3, 5), strict=True):
        assert url in urls
        for part in (url, "phase ", f"version {version}", " bytes", "bucket 3 of", "refused"):
            assert part in reason, (part, reason)
        assert ("checksum" if version == 3 else f"says version {version - 1}") in reason
    assert seen[0]["most_in_flight"] == num_buffers, "bucket k + 1 is packed while bucket k is on the wire"
    for record in seen:
        assert record["close_s"] < 5, "no time limit is waited for"
        assert record["threads"] == []


@pytest.mark.parametrize(("fault", "ranks", "transport"), [("sleep", 2, "gloo"), ("die", 1, "gloo"), ("die", 1, "ipc")])
def test_too_few_servers_left_is_an_error_within_the_bound(tmp_path, receivers, fault, ranks, transport):
    folder = save_model(tmp_path / "model", "qwen3", False)
    url = receivers.start("--fault", fault, "2", "60")
    sync = SYNC | {"timeout_seconds": 4.0, "transport": transport}
    acts = [["publish", 1], ["fails", 2], ["fails", 3]]
    seen = Trainer(tmp_path, ranks, folder=str(folder), urls=[url], sync=sync, acts=acts).records()
    assert seen[0]["acts"][0]["equal"] == [True]
    first, *others = [record["acts"][1] for record in seen]
    for part in (url, "version 2", " bytes", "phase ", "0 of 1 servers left", "min_servers = 1"):
        assert part in first["error"], (part, first["error"])
    if fault == "sleep":
        assert "timed out" in first["error"]
        assert 3.5 < first["publish_s"] < 12
    else:
        assert first["publish_s"] < 8
    for act in others:
        assert act["error"] == ""
        assert act["publish_s"] < 12, "they wait for rank 0 to fetch their shards, or to give up"
    again = seen[0]["acts"][2]
    assert url in again["error"]
    assert again["publish_s"] < 2, "what is known already is said at once"
    for record in seen:
        assert record["close_s"] < 8, "another rank may wait for rank 0, which waits for the server"


def test_no_version_is_torn_while_a_slow_transfer_and_the_training_go_on(tmp_path, receivers):
    """A push takes seconds, and the weights change many times meanwhile."""
    folder = save_model(tmp_path / "model", "qwen3", False)
    url = receivers.start("--bucket-s", "0.5")
    sync = SYNC | {"async_weight_update": True}
    acts = [["loop", 1, 7.0, 0.05]]
    (record,) = Trainer(tmp_path, 1, folder=str(folder), urls=[url], sync=sync, acts=acts).records()
    (loop,) = record["acts"]
    taken = [version for version, _ in receivers.taken(url)]
    assert_only_whole_versions(receivers, [url], loop)
    assert taken == sorted(set(taken))
    assert taken[-1] == loop["newest"]
    push_s = sorted(seconds for _, seconds, _ in loop["reports"])[0]
    assert push_s > 2
    assert 3 <= len(taken) < len(loop["expected"]) / 5, "versions in between are skipped"
    publish_s = sorted(loop["publish_s"])
    assert publish_s[len(publish_s) // 2] < push_s / 100
    assert publish_s[-1] < push_s / 5, "nor is it ever long on two busy cores"


def test_a_straggler_is_dropped_fed_alone_and_comes_back(tmp_path, receivers):
    folder = save_model(tmp_path / "model", "qwen3", False)
    slow, quick = receivers.start("--fault", "sleep", "4", "5"), receivers.start()
    sync = SYNC | {"async_weight_update": True, "straggler_seconds": 0.5}
    # The slow one must be in the push of version 4: it is the first of the loop.
    acts = [["publish", 3], ["loop", 4, 7.0, 0.25]]
    seen = Trainer(tmp_path, 2, folder=str(folder), urls=[slow, quick], sync=sync, acts=acts).records()
    events, loop = seen[0]["events"], seen[0]["acts"][1]
    assert_only_whole_versions(
        receivers, [slow, quick], {"expected": loop["expected"] | {"3": receivers.taken(slow)[0][1]}}
    )
    withdrawn = [event for event in events if event[1] != "admit"]
    assert {(event[1], event[2]) for event in withdrawn} == {("slow", slow)}
    assert "kept the other servers waiting for over 0.5 s" in withdrawn[0][3]
    assert "of version 4" in withdrawn[0][3]
    admitted = {
        url: [(at, version) for at, kind, where, version in events if kind == "admit" and where == url]
        for url in (slow, quick)
    }
    back_at = next(at for at, version in admitted[slow] if version > 3)
    assert back_at - withdrawn[0][0] < 7
    # While the slow one is away the quick one gets versions as they come.
    away = [(at, version) for at, version in admitted[quick] if withdrawn[0][0] < at < back_at]
    assert len(away) >= 3
    for at, version in away:
        assert at - loop["published"][str(version)] < 2.0
    # Then both do, to the end.
    assert 4 not in [version for version, _ in receivers.taken(slow)]
    assert receivers.taken(slow)[-1][0] == receivers.taken(quick)[-1][0] == loop["newest"]
    assert max(loop["publish_s"]) < 0.5


def test_a_server_may_be_late_for_longer_than_the_others_may_wait_for_the_trainer(tmp_path, receivers):
    """Each of the late one's phases is within `timeout_seconds`. Neither is lost."""
    folder = save_model(tmp_path / "model", "qwen3", False)
    urls = [receivers.start("--control-s", "1.3"), receivers.start()]
    sync = SYNC | {"straggler_seconds": 30.0, "timeout_seconds": 2.0}
    (seen,) = Trainer(tmp_path, 1, folder=str(folder), urls=urls, sync=sync, acts=[["publish", 1]]).records()
    assert {event[1] for event in seen["events"]} == {"admit"}


def test_random_delays_kills_restarts_and_flips(tmp_path, receivers):
    """Three servers, two FSDP2 ranks: whatever happens, only whole versions are served, and nothing hangs."""
    rng = random.Random(0)
    folder = save_model(tmp_path / "model", "llama3", False)
    urls = [receivers.start("--jitter-s", jitter) for jitter in ("0", "0.02", "0.15")]
    sync = SYNC | {"async_weight_update": True, "straggler_seconds": 0.5, "timeout_seconds": 6.0}
    stop = tmp_path / "stop"
    acts = [["soak", 1, str(stop), 0.1, 0.03]]
    trainer = Trainer(tmp_path, 2, folder=str(folder), urls=urls, sync=sync, acts=acts, min_servers=0)

    def wait_until_taken(versions: int) -> None:
        deadline = time.monotonic() + 60
        while not all(len(receivers.taken(url)) >= versions for url in urls):
            assert time.monotonic() < deadline, trainer.ranks.log[-6000:]
            assert trainer.ranks.poll() is None, trainer.ranks.log[-6000:]
            time.sleep(0.1)

    wait_until_taken(1)
    for _ in range(3):
        time.sleep(rng.uniform(0.5, 2.5))
        url = rng.choice(urls)
        receivers.kill(url)
        time.sleep(rng.choice([0, 0.3, 2.0]))
        receivers.restart(url)
    wait_until_taken(3)
    stop.touch()
    seen = trainer.records(90)
    (loop,) = seen[0]["acts"]
    assert_only_whole_versions(receivers, urls, loop)
    lost = [event[3] for event in seen[0]["events"] if event[1] == "lost"]
    assert sum("checksum" in reason for reason in lost) >= 2, "bits were flipped, and found"
    for url in urls:
        assert receivers.taken(url)[-1][0] == loop["newest"]
    for record in seen:
        assert record["close_s"] < 4
        # That of a connection which was given up, to a server that died meanwhile, ends with its own time limit.
        assert set(record["threads"]) <= {"weight-sync-join"}


def test_the_end_in_the_middle_of_a_push(tmp_path, receivers):
    """The server is frozen and `timeout_seconds` is a minute, but the end takes seconds."""
    folder = save_model(tmp_path / "model", "qwen3", False)
    url = receivers.start("--fault", "stop", "2", "0")
    sync = SYNC | {"async_weight_update": True, "timeout_seconds": 60.0}
    acts = [["publish", 1], ["cut", 2, 1.0]]
    trainer = Trainer(tmp_path, 2, folder=str(folder), urls=[url], sync=sync, acts=acts)
    seen = trainer.records(60)
    over = time.time()
    for record in seen:
        assert record["acts"][1]["publish_s"] < 0.5
        assert record["close_s"] < 5
        assert record["threads"] in ([], ["weight-sync-update"], ["weight-sync-update", "weight-sync-abort"])
        assert record["destroy_s"] < 5
        assert over - record["ended"] < 6, "the process ends, too"
