"""A process that can open no more files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_files_left() -> Iterator[None]:
    """Within the block this process cannot open a file or a connection.

    Only 0, 1 and 2 are allowed as descriptors, and they are in use. So nothing that is closed meanwhile, by garbage
    collection or another thread, can be used again.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
