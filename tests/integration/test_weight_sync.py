"""Weights from real trainer ranks to real receivers in other processes, over gloo: what arrives, and what fails how."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
SYNC = {"dtype": "float32", "num_buffers": 2, "bucket_mib_max": 1, "timeout_seconds": 20.0}


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


@pytest.fixture
def start_receiver(tmp_path):
    processes = []

    def start(*fault: str) -> str:
        ready = tmp_path / f"receiver{len(processes)}"
        command = [sys.executable, str(HERE / "receiver_process.py"), str(ready), *fault]
        processes.append(subprocess.Popen(command, env=ENV))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline, "the receiver did not start"
            assert processes[-1].poll() is None, "the receiver ended"
            time.sleep(0.1)
        return ready.read_text()

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


def run_trainer(tmp_path: Path, ranks: int, timeout_s: float = 150, **job) -> list[dict]:
    """Each rank's record of `weight_sync_worker`."""
    job["out"] = str(tmp_path / "out")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "weight_sync_worker.py"), json.dumps(job)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=timeout_s, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "tp", "family", "tied", "servers", "num_buffers", "dtype"),
    [
        (1, 1, "qwen3", True, 1, 1, "float32"),
        (2, 1, "llama3", False, 2, 2, "bfloat16"),
        (2, 2, "qwen3", False, 1, 2, "float32"),
        (4, 2, "qwen3", True, 1, 3, "float32"),
    ],
    ids=["one-rank", "fsdp2-two-servers", "tp2", "fsdp2-x-tp2"],
)
def test_every_version_arrives_and_torn_buckets_are_refused(
    tmp_path, start_receiver, ranks, tp, family, tied, servers, num_buffers, dtype
):
    folder = save_model(tmp_path / "model", family, tied)
    urls = [start_receiver() for _ in range(servers)]
    acts = [["publish", 1], ["publish", 2], ["flip", 3], ["publish", 4], ["trailer", 5], ["publish", 6]]
    sync = SYNC | {"num_buffers": num_buffers, "dtype": dtype}
    seen = run_trainer(tmp_path, ranks, folder=str(folder), tp=tp, urls=urls, sync=sync, acts=acts)
    for rank, record in enumerate(seen):
        for act in record["acts"]:
            version = act["version"]
            if act["kind"] == "publish":
                assert act["report"][0] == version
                assert act["report"][2] >= 4, "the model must take several buckets for this test to mean much"
                assert act["seconds"].keys() == {
                    "snapshot", "gather", "pack", "wire", "pause", "apply", "acknowledge", "total"
                }  # fmt: skip
                assert 0 < act["seconds"]["wire"] <= act["seconds"]["total"]
                if rank == 0:
                    assert act["tensors"] >= 29
                    assert act["equal"] == [True] * servers
                    assert act["paused"] == [False] * servers
                    assert act["served"] == [str(version)] * servers
                continue
            assert act["server"] in urls
            assert act["error_version"] == version
            assert act["bytes"] > 0
            assert act["phase"] in ("transfer", "acknowledge")
            for part in (act["server"], f"version {version}", f"{act['bytes']} bytes", "bucket 3 of", "refused"):
                assert part in act["error"], (part, act["error"])
            assert ("checksum" if act["kind"] == "flip" else f"says version {version - 1}") in act["error"]
            assert act["elapsed_s"] < SYNC["timeout_seconds"], "the refusal must not wait for the timeout"
            if rank == 0:
                damaged = urls.index(act["server"])
                assert act["paused"][damaged]
                assert act["served"][damaged] == str(version - 1)
        assert record["close_s"] < 1
    assert seen[0]["most_in_flight"] == num_buffers, "bucket k + 1 is packed while bucket k is on the wire"
    texts = [[act.get("error") for act in record["acts"]] for record in seen]
    assert all(text == texts[0] for text in texts), "every rank reports the same error"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["sleep", "die"])
def test_a_server_that_sleeps_or_dies_ends_in_an_error_within_the_bound(tmp_path, start_receiver, fault, ranks):
    folder = save_model(tmp_path / "model", "qwen3", False)
    url = start_receiver(fault, "2", "60")
    sync = SYNC | {"timeout_seconds": 4.0}
    acts = [["publish", 1], ["fails", 2]]
    seen = run_trainer(tmp_path, ranks, folder=str(folder), tp=1, urls=[url], sync=sync, acts=acts)
    assert seen[0]["acts"][0]["equal"] == [True]
    for record in seen:
        act = record["acts"][1]
        assert act["server"] == url
        assert act["error_version"] == 2
        for part in (url, "version 2", f"{act['bytes']} bytes", f"phase {act['phase']}"):
            assert part in act["error"]
        if fault == "sleep":
            assert "timed out" in act["error"]
            assert 3.5 < act["elapsed_s"] < 12
        else:
            assert act["elapsed_s"] < 8
        assert record["close_s"] < 1


def test_a_server_that_is_not_there_is_named(tmp_path, start_receiver):
    folder = save_model(tmp_path / "model", "qwen3", False)
    url = start_receiver("die", "1", "0")
    acts = [["fails", 1], ["fails", 2]]
    sync = SYNC | {"timeout_seconds": 4.0}
    (record,) = run_trainer(tmp_path, 1, folder=str(folder), tp=1, urls=[url], sync=sync, acts=acts)
    again = record["acts"][1]
    assert again["phase"] == "connect"
    assert url in again["error"]
    assert again["elapsed_s"] < 8
