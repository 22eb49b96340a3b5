"""The watch over servers that owe answers and say nothing."""

import asyncio
import threading
from types import SimpleNamespace

from torchtitan.grpo.engines.fleet_view import FleetView
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.rollouts import silence
from torchtitan.grpo.rollouts.silence import SilenceWatch


def test_a_server_that_is_late_delays_the_notice_of_no_other(monkeypatch) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.02)
    late, over, silent = threading.Event(), threading.Event(), []

    def waits(timeout_s: float) -> bool:
        late.set()
        return over.wait(30)

    def gone(timeout_s: float) -> bool:
        raise EngineError("gone")

    waiting, frozen = (Server(url, SimpleNamespace(is_healthy=ask)) for url, ask in (("a", waits), ("b", gone)))
    fleet = FleetView()
    fleet.heard = lambda server: None
    fleet.fall_silent = lambda server, why: silent.append((server.url, why))
    watch = SilenceWatch(fleet, lambda: [waiting, frozen] if late.is_set() else [waiting])

    async def until_silent() -> None:
        while not silent:
            await asyncio.sleep(0.01)

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await watch.during(until_silent())

    try:
        asyncio.run(bounded())
    finally:
        over.set()
        watch.close()
    assert silent[0] == ("b", "gone")
