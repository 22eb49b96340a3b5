"""The Triton kernel against torch, in Triton's interpreter. tests/gpu runs it on a GPU."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytest.importorskip("triton", reason="Triton is not installed")

COMPARE = """
import torch
from torchtitan.grpo.weight_wire import buckets
from torchtitan.grpo.weight_wire.checksum_kernel import sum_words

torch.manual_seed(0)
chunk = 20_000
buckets._CHUNK_WORDS = chunk
for count in (1, 5, chunk, chunk + 1, 3 * chunk - 7):
    words = torch.randint(-(1 << 62), 1 << 62, (count,))
    plain = buckets.Checksum(torch.device("cpu"), 3 * chunk * 8)
    fused = buckets.Checksum(torch.device("cpu"), 3 * chunk * 8)
    powers = [buckets._signed(pow(buckets._CHUNK_MIX, n, 1 << 64)) for n in (2, 1, 0)]
    fused._kernel, fused._powers = sum_words, torch.tensor(powers)
    payload = words.view(torch.uint8)
    assert plain(payload) == fused(payload), count
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    values = torch.randn(1024).to(dtype)
    for spoilt in (None, 0, 1, 2, 3, 1023):
        for bad in (float("inf"), float("-inf"), float("nan")):
            tensor = values.clone()
            if spoilt is not None:
                tensor[spoilt] = bad
            assert sum_words(tensor.view(torch.int64), 4096, 3, dtype)[1] == (spoilt is None), (dtype, spoilt, bad)
print("equal")
"""


def test_the_kernel_computes_what_torch_computes():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "equal\n", done.stderr[-3000:]
