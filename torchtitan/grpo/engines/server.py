"""One inference server, as the trainer knows it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan.grpo.engines.engine import Engine
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.protocol import EngineClient

_serials = itertools.count()


@dataclass(eq=False)
class Server:
    """One server as the trainer knows it. Its `Fleet` changes it; others only read.

    Attributes:
        url: Base address, without a trailing slash.
        control: Its control routes, for weight sync.
        client: Its generation route, for the collector, which closes it.
        engine: Its row of the registry. Weight sync needs it.
        check: Checks that the server is set up as the trainer needs it. Raises UserError if not.
        version: The newest weight version that it has acknowledged, -1 for none.
        in_traffic: Requests may go there.
        lost: It failed. It counts against `[rollout] min_servers` until it is admitted again.
        losses: How often it was lost.
        lost_at: When it was, on `time.monotonic`'s clock.
        held: It gets no new requests until it is admitted again. It finishes the running ones.
        suspected: A request failed there. Weight sync's worker finds the cause, then admits or withdraws it.
        suspicions: How often that happened since it last answered a request or was lost.
        back_at: `admit` leaves it suspected until then, on `time.monotonic`'s clock.
        distrusted: Its answers are not the policy's. It is not admitted before it was connected and fed again.
        distrusts: How often that has happened.
        silent: It owes answers and did not reply in time, see `fall_silent`.
        updating: Weights are being loaded there. Only weight sync's worker writes it.
        at_rest: Weight sync leaves it alone until `Fleet.rise`. Only its worker writes it.
        call: Has its worker look at it before the time comes. It must not block.
        starts: How often its keeper found it healthy after a start.
        reason: Why it is out of traffic, "" while it is in traffic.
        in_flight: Our running requests there. Only the collector's event loop writes it.
        serial: Tells it from an earlier server at its address, also in other processes.
    """

    url: str
    control: HttpControl
    client: EngineClient | None = None
    engine: Engine | None = None
    check: Callable[[], None] = lambda: None
    version: int = -1
    in_traffic: bool = False
    lost: bool = False
    losses: int = 0
    lost_at: float = 0.0
    held: bool = False
    suspected: bool = False
    suspicions: int = 0
    back_at: float = 0.0
    distrusted: bool = False
    distrusts: int = 0
    silent: bool = False
    updating: bool = False
    at_rest: bool = False
    call: Callable[[], None] = lambda: None
    starts: int = 0
    reason: str = "has not been given any weights yet"
    in_flight: int = 0
    serial: int = field(default_factory=_serials.__next__)

    def serves(self, min_version: int) -> bool:
        """Whether a request that needs weights of this version or newer may go there."""
        return self.in_traffic and not self.held and self.version >= min_version

    def versions_in_use(self) -> set[int]:
        """Versions that requests there name, or may name from now on."""
        named = {self.version} if self.in_traffic else set()  # first: a request that begins now names this or a newer
        return named | (self.client.running_versions() if self.client is not None else set())

    def describe(self) -> str:
        state = "in traffic" if self.in_traffic else "lost" if self.lost else "out of traffic"
        return f"{self.url}: {state}, version {self.version}" + (f", {self.reason}" if self.reason else "")


def one_line(text: str) -> str:
    """A server's words in one line, without what UTF-8 cannot carry to another process."""
    return " ".join(text.split()).encode(errors="replace").decode()
