import pytest
import torch

from torchtitan.grpo.engines.embedded.spawn import choose_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "trainer", "trainers_here", "gpus", "expected"),
    [
        ("auto", CPU, 1, 0, ("cpu", False)),
        ("cpu", GPU, 1, 2, ("cpu", False)),
        ("auto", GPU, 1, 2, ("cuda:1", True)),
        ("auto", GPU, 2, 2, ("cuda:0", False)),  # NCCL joins no two processes on one GPU
        ("cuda", CPU, 1, 2, ("cuda:1", False)),
    ],
)
def test_the_server_takes_a_free_gpu_and_says_whether_nccl_reaches_it(
    wanted, trainer, trainers_here, gpus, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(wanted, trainer, trainers_here) == expected
