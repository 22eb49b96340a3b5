"""The newest value of every metric for Prometheus, at `http://127.0.0.1:PORT/metrics`."""

import re
from typing import TYPE_CHECKING

from torchtitan.grpo.config.machine import LOOPBACK

if TYPE_CHECKING:
    from prometheus_client import Gauge

_OF_ONE = re.compile(r"(?P<kind>server|age)/(?P<which>[^/]+)/(?P<what>.+)")
"""Metrics that each server, or each age of tokens, has: these are a label."""


class PrometheusEndpoint:
    """Serves gauges on loopback, from a thread of its own, until it is closed.

    `config/machine.py` has checked the port and the package.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._gauges: dict[str, Gauge] = {}
        self._registry = CollectorRegistry()
        self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=self._registry)

    def update(self, values: dict[str, float]) -> None:
        """Show these values, and for other metrics the last ones."""
        from prometheus_client import Gauge

        for name, value in values.items():
            one = _OF_ONE.fullmatch(name)
            words = f"{one['kind']}/{one['what']}_by_{one['kind']}" if one else name
            gauge_name = "grpo_" + re.sub(r"\W", "_", words, flags=re.ASCII)
            if gauge_name not in self._gauges:
                labels = [one["kind"]] if one else []
                self._gauges[gauge_name] = Gauge(gauge_name, "see docs/metrics.md", labels, registry=self._registry)
            gauge = self._gauges[gauge_name]
            (gauge.labels(one["which"]) if one else gauge).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
