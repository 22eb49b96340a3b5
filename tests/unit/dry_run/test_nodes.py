"""Which GPU each process has, what does not fit on a node, and a node's host memory."""

import dataclasses

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.target import GPUS
from torchtitan.grpo.dry_run.describe import describe, memory_lines
from torchtitan.grpo.dry_run.memory import memory_bytes
from torchtitan.grpo.dry_run.nodes import gpu_lines

SHORT = ["--training.seq_len", "256", "--data.max_prompt_tokens", "64", "--rollout.max_answer_tokens", "64"]
BASE = ["--model.hf_assets_path", str(TINY_QWEN3), "--model.weights", "random", *SHORT]
VLLM = ["--rollout.engine", "vllm", "--rollout.replicas"]
H100 = GPUS["h100"]


def planned(world_size: int, ranks_here: int, *flags: str, gpus: int = 8, job="grpo") -> list[str]:
    config = load_config([*BASE, *flags], dry_run="h100", world_size=world_size, job=job)
    return gpu_lines(config, world_size, ranks_here, H100, gpus)


@pytest.mark.parametrize(
    ("world_size", "ranks_here", "flags", "expected"),
    [
        (1, 1, [], ["2 in all, 1 of them for servers", "node 0, GPU 0: rank 0"]),
        (8, 8, [], ["8 in all, which servers share", "node 0, GPU 0 to 7: rank 0 to 7"]),
        (
            6,
            6,
            [*VLLM, "1", "--rollout.gpus_per_server", "2"],
            ["8 in all, 2 of them for servers", "node 0, GPU 0 to 5: rank 0 to 5"],
        ),
        (
            16,
            8,
            [*VLLM[:2], "--rollout.urls", "http://a:1"],
            ["16 in all, besides those of [rollout] urls", "node 0 to 1, GPU 0 to 7 of each: rank 0 to 15"],
        ),
        (
            2,
            2,
            [*VLLM[:2], "--rollout.colocate"],
            ["2 in all, which servers share", "GPU 0 to 1: rank 0 to 1"],
        ),
        (2, 2, ["--ray.enable", "--ray.ranks", "2", *VLLM, "3"], ["5 in all, 3 of them", "nodes that Ray chooses"]),
    ],
)
def test_each_process_has_its_gpu(world_size, ranks_here, flags, expected, monkeypatch):
    monkeypatch.setattr("torchtitan.grpo.config.machine.find_spec", lambda name: True)
    lines = planned(world_size, ranks_here, *flags)
    assert len(lines) == len(expected) and all(part in line for part, line in zip(expected, lines, strict=True))


def test_a_plan_that_does_not_fit_on_the_node_says_so():
    lines = planned(8, 8, *VLLM, "2", "--rollout.gpus_per_server", "2")
    assert "does NOT fit: node 0 would need 12 GPUs, and is taken to have 8" in lines[2]
    assert "[rollout] urls" in lines[3] and "LOCAL_WORLD_SIZE" in lines[3]
    lines = planned(16, 16, "--optimizer.lr", "1e-5", job="sft")
    assert "would need 16 GPUs" in lines[-2]
    assert not any("NOT" in line for line in planned(8, 8, "--optimizer.lr", "1e-5", job="sft"))
    assert not any("NOT" in line for line in planned(4, 4, *VLLM, "4"))


def test_processes_on_cpus_have_no_gpu():
    flags = ["--training.mixed_precision_param", "float32"]
    text = describe(load_config([*BASE, *flags], dry_run="cpu"), 2, "cpu")
    assert "# GPUs: none\n" in text and "# servers: 1," in text


def test_offloaded_states_are_in_the_host_memory_of_a_node(monkeypatch):
    flags = ["--grpo.kl_coef", "0.1", "--rollout.urls", "http://a:1,http://b:2"]
    config = load_config([*BASE, *flags], dry_run="h100")
    memory = memory_bytes(config, 8, H100)
    assert not any(memory.on_host.values())
    config.offload.optimizer_states = config.offload.reference_weights = "host"
    on_device, here = memory.moments["optimizer step"], memory_bytes(config, 8, H100).on_host
    assert here["AdamW state"] == on_device["AdamW state"] == 2 * on_device["weights"]
    assert here["reference model"] == on_device["weights"]
    lines = memory_lines(config, 8, H100, ranks_here=4)
    table = lines[lines.index("host memory of a node with 4 ranks, besides that of its processes") :]
    copy = 2 * memory.parameters  # to the servers, in bfloat16
    assert table[3].endswith("of rank 0") and f"{copy / 2**20:,.1f} MiB" in table[3]
    total = 4 * (here["AdamW state"] + here["reference model"]) + copy
    assert table[4].split() == ["the", "node", f"{total / 2**20:,.1f}", "MiB"]
    config.offload.optimizer_states = "device"
    config.offload.offload_optimizer_states_for_logprob = True
    assert memory_bytes(config, 8, H100).on_host["AdamW state"] == here["AdamW state"]
    monkeypatch.setattr("torchtitan.grpo.dry_run.nodes.host_bytes", lambda: 2 * total)
    here = dataclasses.replace(H100, here=True)
    assert any(line.endswith("50% of this machine's") for line in memory_lines(config, 8, here, ranks_here=4))
