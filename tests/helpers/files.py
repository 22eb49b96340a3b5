"""A process with low limits: of open files, and of a file's size."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_files_left() -> Iterator[None]:
    """Within the block this process cannot open a file or a connection.

    Only 0, 1 and 2 are allowed as descriptors, and they are in use. So nothing that is closed meanwhile, by garbage
    collection or another thread, can be used again.
    """
    with limited(resource.RLIMIT_NOFILE, 3):
        yield


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Within the block `most` is the limit of this kind, as RLIMIT_FSIZE."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)
