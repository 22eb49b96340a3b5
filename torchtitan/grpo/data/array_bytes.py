"""Arrays as bytes, for another process or a file: MessagePack of each one's type, shape and content."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np


def to_bytes(tables: Sequence[Mapping[str, np.ndarray]]) -> bytes:
    """Tables of named arrays as bytes."""
    return msgspec.msgpack.encode([{k: (x.dtype.str, x.shape, x.tobytes()) for k, x in t.items()} for t in tables])


def from_bytes(data: bytes | memoryview) -> list[dict[str, np.ndarray]]:
    """Inverse of `to_bytes`. The arrays cannot be written."""
    tables = msgspec.msgpack.decode(data, type=list[dict[str, tuple[str, list[int], bytes]]])
    return [{k: np.frombuffer(x, dtype).reshape(shape) for k, (dtype, shape, x) in t.items()} for t in tables]
