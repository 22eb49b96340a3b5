import pytest
import torch

from torchtitan.grpo.engines.embedded.__main__ import parse_arguments
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


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "127.example.com"])
def test_only_an_explicit_word_opens_the_server_to_other_machines(host, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["embedded", "--model", "m", "--host", host])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "opens the server to other machines" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["embedded", "--model", "m", "--host", host, "--expose"])
    assert parse_arguments().host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine_needs_no_word(host, monkeypatch):
    monkeypatch.setattr("sys.argv", ["embedded", "--model", "m", "--host", host])
    assert parse_arguments().host == host
