"""The copy of a state in host memory; on CUDA in tests/gpu."""

import torch

from torchtitan.grpo.host_memory.host_copy import HostCopy


def test_each_tensor_of_the_copy_has_a_storage_of_its_own_size() -> None:
    """torch's writer copies every other tensor again, and keeps the copies until a file is written."""
    weight = torch.arange(6.0).view(2, 3)
    states = {
        "model": {
            "weight": weight,
            "tied": weight,
            "half": torch.ones(5, dtype=torch.bfloat16),
            "none": torch.ones(0, 3),
        },
        "step": [torch.tensor(7), 7],
    }
    copy = HostCopy(torch.device("cpu"), pinned=False)
    first = copy.take(states)
    copy.wait()
    tensors = [*first["model"].values(), first["step"][0]]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [tensor.nbytes for tensor in tensors]
    assert first["model"]["tied"] is first["model"]["weight"] and first["step"][1] == 7
    weight.zero_()
    assert torch.equal(first["model"]["weight"], torch.arange(6.0).view(2, 3))
    again = copy.take(states)
    assert again["model"]["weight"].data_ptr() == first["model"]["weight"].data_ptr(), "the same memory"
    assert not again["model"]["weight"].any() and torch.equal(
        again["model"]["half"], torch.ones(5, dtype=torch.bfloat16)
    )
    assert again["model"]["none"].shape == (0, 3)
