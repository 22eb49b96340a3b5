"""Where one request has failed, and whether it is worth another try."""

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.engines.protocol import EngineError, Refused
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError

ATTEMPTS = 3
"""How often a request may fail at one server that stays healthy."""


class Failures:
    """Where one request has failed so far, and why.

    A failure at a server that was lost since then does not count against the request: the server was dying, or was
    restarted. Nor does one whose cause is not known yet, which is so while the server is out of traffic.

    Attributes:
        tries: How often the request was sent.
    """

    def __init__(self, prompt: Prompt | None = None) -> None:
        self.tries = 0
        self._prompt = prompt
        self._all: list[tuple[Server, int, EngineError | UserError]] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, server: Server, losses: int, error: EngineError | UserError) -> None:
        """`losses` is `server.losses` from when the request was sent."""
        # Without its traceback, whose frames refer to this object.
        self._all.append((server, losses, type(error)(str(error))))

    def at(self, server: Server) -> int:
        """How often it failed there, whatever the cause."""
        return sum(each is server for each, _, _ in self._all)

    def final_at(self, server: Server) -> bool:
        """Whether it is not sent there again: the server refuses it, or has failed it too often."""
        counted = [error for each, losses, error in self._all if each is server and losses == server.losses]
        return len(counted) >= ATTEMPTS or any(isinstance(error, UserError) for error in counted)

    def final(self, servers: list[Server]) -> bool:
        """Whether it has failed for good at all of these."""
        return bool(self._all) and all(server.in_traffic and self.final_at(server) for server in servers)

    def refusals(self) -> list[tuple[Server, UserError]]:
        return [(server, error) for server, _, error in self._all if isinstance(error, UserError)]

    def error(self) -> EngineError | UserError:
        """Refused, or else UserError, if every server refuses the request so."""
        errors = [error for _, _, error in self._all]
        said_by_all = (kind for kind in (Refused, UserError) if all(isinstance(error, kind) for error in errors))
        kind = next(said_by_all, EngineError)
        return kind(f"prompt {self._prompt.index if self._prompt else '?'} {self}")

    def __str__(self) -> str:
        last = {server.url: error for server, _, error in self._all}
        return "; ".join(f"at {url}: {error}" for url, error in last.items())
