"""The checksum's kernel on a GPU: torch's number, infinite and NaN elements found, one pass."""

import pytest
import torch

from torchtitan.grpo.weight_wire.buckets import Checksum

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("size", [8, 16, 1 << 20, (32 << 20) + 16, (96 << 20) - 16])
def test_the_sum_is_that_of_the_cpu(size):
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8, device=CUDA)
    on_gpu, on_cpu = Checksum(CUDA, 96 << 20), Checksum(torch.device("cpu"), 96 << 20)
    assert on_gpu._kernel is not None, "Triton runs here"
    assert int(on_gpu(payload)) == int(on_cpu(payload.cpu()))
    payload[size // 2] ^= 1
    assert int(on_gpu(payload)) == int(on_cpu(payload.cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_found(dtype):
    checksum, values = Checksum(CUDA, 64 << 20), torch.randn(1 << 20, device=CUDA).to(dtype)
    assert checksum.with_finite(values.view(torch.uint8), dtype)[1]
    for place in (0, 1, 2, 3, (1 << 20) - 1):
        for bad in (float("inf"), float("-inf"), float("nan")):
            spoilt = values.clone()
            spoilt[place] = bad
            assert not checksum.with_finite(spoilt.view(torch.uint8), dtype)[1]


def test_it_takes_one_pass():
    payload = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device=CUDA)
    checksum, copy = Checksum(CUDA, 1 << 30), torch.empty_like(payload)

    def milliseconds(call) -> float:
        call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 5

    sum_ms, copy_ms = (
        milliseconds(lambda: checksum.with_finite(payload, torch.bfloat16)),
        milliseconds(lambda: copy.copy_(payload)),
    )
    print(f"1 GiB: checksum {sum_ms:.2f} ms, copy {copy_ms:.2f} ms")
    assert sum_ms < 1.5 * copy_ms, "reading takes about half as long as copying"
