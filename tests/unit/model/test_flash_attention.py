"""Which attention kernels are chosen, and why not others; tests/gpu has what they compute."""

import pytest
import torch

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model import flash_attention as module
from torchtitan.grpo.model.flash_attention import choose_attention, flash_attention_2, flash_attention_4

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (4, 2, 64)


@pytest.fixture(autouse=True)
def fresh():
    module._unfit.cache_clear()
    yield
    module._unfit.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_without_the_package_or_a_gpu_torchs_own_kernels_are_taken(monkeypatch):
    assert choose_attention("auto", CPU, *SHAPE) is flash_attention_2
    monkeypatch.setattr(module, "_installed", lambda: False)
    assert choose_attention("auto", CUDA, *SHAPE) is flash_attention_2
    assert choose_attention("FA2", CUDA, *SHAPE) is flash_attention_2


def test_what_is_asked_for_and_cannot_be_is_refused(monkeypatch, hopper):
    with pytest.raises(UserError, match=r'flash_attention = "FA4": it needs a GPU, and this is a cpu. "auto" runs'):
        choose_attention("FA4", CPU, *SHAPE)
    monkeypatch.setattr(module, "MODULE", "a_package_that_is_not_there")
    module._kernels.cache_clear()
    with pytest.raises(UserError, match="ModuleNotFoundError: No module named 'a_package_that_is_not_there'"):
        choose_attention("FA4", CUDA, *SHAPE)


def test_other_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"compute capabilities 9.x and 10.x, not \(8, 0\)"):
        choose_attention("FA4", CUDA, *SHAPE)


@pytest.mark.parametrize("error,taken", [(0.004, flash_attention_4), (0.5, flash_attention_2)])
def test_auto_takes_what_agrees_in_the_trial(monkeypatch, hopper, error, taken):
    def results(attention, *example):
        ones = torch.ones(8)
        return [ones * (1 + error) if attention is flash_attention_4 else ones]

    monkeypatch.setattr(module, "_installed", lambda: True)
    monkeypatch.setattr(module, "_kernels", lambda: None)
    monkeypatch.setattr(module, "_example", lambda *shape: ())
    monkeypatch.setattr(module, "_results", results)
    assert choose_attention("auto", CUDA, *SHAPE) is taken
    if taken is flash_attention_2:
        with pytest.raises(UserError, match=r"differ from FlashAttention 2's by 0\.5 of their norm"):
            choose_attention("FA4", CUDA, *SHAPE)


def test_the_trial_has_documents_of_one_token_and_across_tiles():
    q, k, v, grad, starts = module._example(CPU, *SHAPE)
    assert (q.shape, k.shape, v.shape, grad.shape) == ((700, 4, 64), (700, 2, 64), (700, 2, 64), (700, 4, 64))
    assert starts.diff().tolist() == [1, 129, 256, 314]


def test_compile_knows_the_operator():
    """Shapes without a GPU: what torch.compile traces with."""
    q, k = torch.empty(10, 4, 64, device="meta"), torch.empty(10, 2, 64, device="meta")
    out = flash_attention_4(q.requires_grad_(), k, k, torch.empty(3, dtype=torch.int32, device="meta"), 10)
    assert out.shape == q.shape and out.requires_grad
