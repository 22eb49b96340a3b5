"""A bucket as a safetensors file, for transport "disk". Torch and safetensors only, since servers read it.

The file holds the bucket's tensors under their Hugging Face names, so any loader of models can read it. The trailer
(version, index, payload bytes, checksum) is in the file's metadata.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from torchtitan.grpo.weight_wire.buckets import TRAILER_FIELDS, Bucket, Checksum


def bucket_path(folder: str | Path, bucket: Bucket) -> Path:
    return Path(folder) / f"model-{bucket.index + 1:05d}.safetensors"


def write_bucket(folder: Path, bucket: Bucket, wire: torch.Tensor) -> None:
    """Write a bucket from its wire form (uint8 [wire_bytes], on the CPU)."""
    trailer = ",".join(map(str, bucket.trailer(wire).tolist()))
    save_file(dict(bucket.views(wire)), bucket_path(folder, bucket), {"trailer": trailer})


def check_bucket(folder: str | Path, bucket: Bucket) -> None:
    """Read a bucket's file and compare its bytes with the checksum that they were sent with.

    Raises:
        ValueError: They differ, or it is no file of this bucket.
        OSError: It cannot be read.
    """
    wire = read_bucket(folder, bucket)
    found, sent = int(Checksum(wire.device, bucket.payload_bytes)(wire[: bucket.payload_bytes])), bucket.trailer(wire)
    if found != sent[-1]:
        raise ValueError(f"{bucket_path(folder, bucket)} is torn: checksum {found}, expected {sent[-1]}")


def read_bucket(folder: str | Path, bucket: Bucket) -> torch.Tensor:
    """The bucket's wire form, uint8 [wire_bytes] on the CPU, padding zero.

    Raises:
        ValueError: The file does not hold what the plan says.
        OSError: It cannot be read.
    """
    path = bucket_path(folder, bucket)
    wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
    with safe_open(path, framework="pt") as file:
        trailer = [int(field) for field in (file.metadata() or {}).get("trailer", "").split(",") if field]
        names = set(file.keys())
        if len(trailer) != TRAILER_FIELDS or names != {spec.name for spec in bucket.tensors}:
            raise ValueError(f"{path}: not bucket {bucket.index + 1} of the trainer's plan")
        for name, target in bucket.views(wire):
            source = file.get_tensor(name)
            if source.shape != target.shape or source.dtype != target.dtype:
                found, expected = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (source, target))
                raise ValueError(f"{path}: {name} is {found}, expected {expected}")
            target.copy_(source)
    bucket.trailer(wire).copy_(torch.tensor(trailer))
    return wire
