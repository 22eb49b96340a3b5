"""The newest value of every metric for Prometheus, at `http://127.0.0.1:PORT/metrics`."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.machine import LOOPBACK
from torchtitan.grpo.reporting.meanings import Metric, meaning

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


class PrometheusEndpoint:
    """Serves gauges on loopback, from a thread of its own, until it is closed.

    `config/machine.py` has checked the port and the package.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._values: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)

    def update(self, values: dict[str, Any]) -> None:
        """Show these values, and for other metrics the last ones."""
        self._values = self._values | values  # one assignment: the server's threads read it

    def collect(self) -> Iterator["GaugeMetricFamily"]:
        """What prometheus_client asks for at each request: one family for each documented metric."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        for name, value in self._values.items():
            metric = meaning(name)
            family = family_name(metric)
            if family not in families:
                text = metric.text or f"{name} of docs/metrics.md"
                families[family] = GaugeMetricFamily(family, text, labels=list(metric.variables))
            families[family].add_metric(list(metric.variables.values()), value)
        yield from families.values()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def family_name(metric: Metric) -> str:
    """`grpo_reward_mean` of `reward/mean`, `grpo_age_ratio_by_k` of `age/<k>/ratio`."""
    words = [word for word in re.split(r"\W|_", re.sub(r"<\w+>", "", metric.name)) if word]
    by = ["by", *metric.variables] if metric.variables else []
    return "_".join(["grpo", *words, *by])
