"""What a step's rows and seconds say of the devices; GPU numbers are in tests/gpu."""

import time

import pytest
import torch

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample, documents
from torchtitan.grpo.reporting.usage import (
    Usage,
    highest_peaks,
    memory_peaks,
    speeds,
)


@pytest.fixture(scope="module")
def usage() -> Usage:
    """Of two ranks that train the tiny Qwen3 on CPUs."""
    config = load_config(["--model.hf_assets_path", str(TINY_QWEN3)])
    with torch.device("meta"):
        model = resolve_model(config.model, 64).build()
    return Usage(config, TrainingFlops.of(model), torch.device("cpu"), ranks=2)


def packed(*lengths: tuple[int, int], pad_multiple: int = 8) -> list:
    samples = [PackedSample([1] * prompt, [2] * answer, 1.0, 1.0, [0.0] * answer) for prompt, answer in lengths]
    return pack(samples, 16, 2, pad_multiple)


def test_padding_and_how_rows_are_cut_change_no_tokens_and_flops(usage):
    lengths = [(3, 5), (2, 7), (6, 1)]
    work = usage.work(*documents([packed(*lengths)]))
    assert work["train/tokens"] == sum(prompt + answer - 1 for prompt, answer in lengths)
    apart = usage.work(*documents([packed(*lengths[:1], pad_multiple=1), packed(*lengths[1:])]))
    assert apart == pytest.approx(work)
    assert usage.work(*documents([packed()])) == {"train/tokens": 0, "train/tflop": 0.0}


def test_speeds_are_per_rank_and_over_the_step_or_the_update():
    step = {"train/tokens": 1200, "train/answer_tokens": 800.0, "train/tflop": 1.0, "rollout/answer_tokens": 900}
    times = {"time/step_s": 4.0, "time/train_s": 1.0}
    on_cpu = {
        "throughput/answer_tokens_per_s": 225.0,
        "throughput/answer_tokens_per_s_per_gpu": 100.0,
        "throughput/tokens_per_s_per_gpu": 150.0,
        "throughput/update_tokens_per_s_per_gpu": 600.0,
    }
    assert speeds(step, times, 2, 0.0) == on_cpu
    mfu = {"throughput/mfu": 0.5, "throughput/step_mfu": 0.125}
    assert speeds(step, times, 2, 1e12) == on_cpu | mfu
    assert speeds({}, times, 2, 1e12) == {}, "step 0 trains nothing"


def test_peak_memory_is_the_fullest_devices(usage):
    gib = [{"allocated": 3, "reserved": 4}, {"allocated": 2, "reserved": 7}, {"allocated": 1, "reserved": 5}]
    stats = [{f"{kind}_bytes.all.peak": value << 30 for kind, value in of_rank.items()} for of_rank in gib]
    vectors = [memory_peaks(of_rank, rank, 3, torch.device("cpu")) for rank, of_rank in enumerate(stats)]
    sums = {name: sum(of_rank[name] for of_rank in vectors).tolist() for name in vectors[0]}
    assert highest_peaks(sums) == {"memory/allocated_peak_gib": 3.0, "memory/reserved_peak_gib": 7.0}
    assert usage.peaks(0, 2) == highest_peaks({"loss": 1.0}) == {}


@pytest.mark.parametrize(("shared", "servers"), [(False, 3), (True, 0)])
def test_a_server_costs_its_gpus_unless_it_shares_a_trainers(shared, servers, usage, monkeypatch):
    control = HttpControl("http://a:1", None, 1.0)
    control.workers = 3
    for name, value in {"shares": shared, "gpu_hours": 0.0, "counted_until": time.monotonic() - 3600}.items():
        monkeypatch.setattr(usage, f"_{name}", value)
    cost = usage._cost(Fleet(["http://a:1"], lambda url: Server(url, control)))
    assert cost["cost/gpu_hours"] == pytest.approx(2 + servers, rel=0.01)


def test_a_cpu_has_no_memory_and_no_cost(usage):
    fleet = Fleet(["http://a:1"], lambda url: Server(url, None))
    assert usage.metrics({}, {"time/step_s": 1.0}, fleet) == {}
