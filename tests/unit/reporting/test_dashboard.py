"""docs/grafana.json asks for metrics that docs/metrics.md has, by the names of the endpoint."""

import json
import re

import pytest

pytest.importorskip("prometheus_client", reason="the prometheus extra is not installed")

from tests.helpers.dashboard import DASHBOARD, gauges, shown
from tests.helpers.meanings import documented, meaning

VALUES = {
    "server": ["a_1"],
    "k": ["1"],
    "stage": ["rollout", "reward", "record", "pack", "logprobs", "train", "sync", "validate", "checkpoint"],
    "phase": ["snapshot", "gather", "pack", "pause", "wire", "apply", "acknowledge", "total"],
}
"""Of the names in angle brackets, as docs/metrics.md lists them."""


def spelled_out(name: str) -> list[str]:
    names = [name]
    for variable, values in VALUES.items():
        names = [each.replace(f"<{variable}>", value) for each in names for value in values]
    return [each for each in names if "<" not in each]


def test_every_metric_that_is_shown_is_one_that_a_run_exports():
    documented_names = {each for name in documented() for each in spelled_out(name)}
    assert shown() <= gauges(documented_names | {"step"})
    assert all(meaning(name).text for name in documented_names)
    assert len(shown()) > 50


def test_the_dashboard_is_one_that_grafana_reads():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Learning", "Throughput and idle shares", "Weight sync", "Servers", "Failures"]
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", []):
            assert set(re.findall(r"\$\{?(\w+)", json.dumps([target, panel["datasource"]]))) == names
