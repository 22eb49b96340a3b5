"""examples/quickstart.ipynb, cell by cell in plain Python, with a shorter run."""

import json

import pytest

pytest.importorskip("prometheus_client", reason="the prometheus extra is not installed")

from tests.helpers import ROOT
from tests.helpers.dashboard import ELSEWHERE, gauges, shown
from tests.helpers.trainer_runs import SMALL

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_trains_and_draws_its_curve(tmp_path, monkeypatch, capsys):
    """And the dashboard asks for metrics that this run has, or that its kind of run has not."""
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(NOTEBOOK.parent)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "clear the outputs"
    run = tmp_path / "run"
    flags = [word for flag in SMALL.items() if flag[0] != "--job.config_file" for word in flag if word]
    given: dict[str, object] = {}
    for cell in cells:
        exec("".join(cell["source"]), given)
        if "parameters" in cell["metadata"].get("tags", []):
            given |= {"RUN": str(run), "FLAGS": flags}
    said = capsys.readouterr().out
    assert "step 3/3" in said and "reward" in said.rpartition("step 3/3")[2], said[-2000:]
    curves = {line.get_label(): list(line.get_xdata()) for line in plt.gca().lines}
    plt.close()
    assert curves == {"training": [1, 2, 3], "held-out, greedy": [0, 3]}
    names = {name for line in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert shown() - gauges(names) == gauges(ELSEWHERE)
