"""docs/grafana.json, and the names that a run's Prometheus endpoint has."""

import json
import re
import urllib.request
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers import ROOT
from tests.helpers.ranks import free_port
from torchtitan.grpo.reporting.prometheus import PrometheusEndpoint

DASHBOARD = ROOT / "docs" / "grafana.json"
ELSEWHERE = {
    "policy/kl",
    "throughput/mfu",
    "throughput/step_mfu",
    "memory/allocated_peak_gib",
    "memory/reserved_peak_gib",
    "time/checkpoint_s",
}
"""Metrics of the dashboard that a short quickstart lacks: a KL, a GPU, and a step after a checkpoint make them."""


def shown() -> set[str]:
    """Names of all metrics in the dashboard's queries."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return set(re.findall(r"\bgrpo_\w+", " ".join(t["expr"] for panel in panels for t in panel.get("targets", []))))


def gauges(names: Iterable[str]) -> set[str]:
    """What the endpoint makes of metrics' names."""
    port = free_port()
    endpoint = PrometheusEndpoint(port)
    try:
        endpoint.update(dict.fromkeys(names, 0.0))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            return {family.name for family in text_string_to_metric_families(reply.read().decode())}
    finally:
        endpoint.close()
