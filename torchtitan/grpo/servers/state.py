"""How a server is: what its supervisor knows, Ray's actors send and `launched.py` writes."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerState:
    """What a supervisor knows of a server.

    Attributes:
        url: Base address, "" before it has one.
        healthy: It has answered its health route since its last start.
        restarts, ends: How often it was started again, and how often it has ended.
        why: How it has ended last.
        given_up: Why it stays down, with the end of its log; "" before.
        down: It has ended, and has not been started again.
    """

    url: str = ""
    healthy: bool = False
    restarts: int = 0
    ends: int = 0
    why: str = ""
    given_up: str = ""
    down: bool = False


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)
