"""What a push was like, for the ledger and the metrics."""

import time
from dataclasses import dataclass, field


def stop_until_now(seconds: dict[str, float]) -> tuple[float, float]:
    """The stop of a server that was resumed just now: for `SyncReport.stops`."""
    now = time.monotonic()
    return now - seconds.get("stopped", 0.0), now


@dataclass
class SyncReport:
    """One push, as rank 0 saw it.

    Attributes:
        bytes: Payload of one version, to each server.
        seconds: `snapshot`: copying the shards (device). `gather`: waiting for the other ranks' shards. `pack`:
            assembling and checksumming buckets (device). `total`: from the start until the last server was resumed.
        servers: By address, the seconds of each server that acknowledged; see `ServerLink.update`.
        missed: Servers that took part and did not acknowledge.
        waited: The trainer's main thread waited for it. Otherwise it ran beside training.
        alone: It went to one server alone, from a copy.
        stops: By address, from when until when each of `servers` was stopped, by `time.monotonic()`.
    """

    version: int
    bytes: int
    buckets: int
    seconds: dict[str, float]
    servers: dict[str, dict[str, float]]
    missed: int = 0
    waited: bool = False
    alone: bool = False
    stops: dict[str, tuple[float, float]] = field(default_factory=dict)
