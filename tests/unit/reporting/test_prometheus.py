import sys
import urllib.error
import urllib.request

import pytest

from tests.helpers import TINY_QWEN3
from tests.helpers.ranks import free_port
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.prometheus import PrometheusEndpoint

parser = pytest.importorskip("prometheus_client.parser", reason="the prometheus extra is not installed")


def load(port: int) -> None:
    load_config(["--model.hf_assets_path", str(TINY_QWEN3), "--metrics.prometheus_port", str(port)])


def scrape(port: int) -> dict[str, dict[tuple, float]]:
    """Values by labels of each metric, through the protocol's own parser."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = list(parser.text_string_to_metric_families(reply.read().decode()))
    assert all(family.type == "gauge" and family.documentation for family in families)
    return {f.name: {tuple(sample.labels.items()): sample.value for sample in f.samples} for f in families}


def test_the_newest_value_of_every_metric_until_it_is_closed():
    port = free_port()
    endpoint = PrometheusEndpoint(port)
    try:
        endpoint.update({"step": 1, "reward/mean": 0.25, "validation/greedy_reward": 0.5, "reward/größe": 2.0})
        busy = {"server/busy_share": 0.5, "server/a_1/busy_share": 0.4, "server/b_2/busy_share": 0.6}
        endpoint.update({"step": 2, "reward/mean": 0.75, "train/novelty": 3, "age/0/ess": 1.0, **busy})
        assert scrape(port) == {
            "grpo_step": {(): 2.0},
            "grpo_reward_mean": {(): 0.75},
            "grpo_reward_gr__e": {(): 2.0},
            "grpo_validation_greedy_reward": {(): 0.5},
            "grpo_train_novelty": {(): 3.0},
            "grpo_age_ess_by_age": {(("age", "0"),): 1.0},
            "grpo_server_busy_share": {(): 0.5},
            "grpo_server_busy_share_by_server": {(("server", "a_1"),): 0.4, (("server", "b_2"),): 0.6},
        }
        with pytest.raises(UserError, match=rf"\[metrics\] prometheus_port = {port}: .* cannot be opened"):
            load(port)
        assert all(name.isascii() for name in endpoint._gauges), "the package before 0.22 refuses others"
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match=r"\[metrics\] prometheus_port.*pip install prometheus-client, or"):
        load(free_port())
