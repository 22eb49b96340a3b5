"""`torchtitan-grpo plot`: its PNG, and what it makes of several seeds."""

import json

from torchtitan.grpo.commands import console
from torchtitan.grpo.commands.plot import mean_and_range, smoothed


def test_plot_metrics(tmp_path, capsys):
    for seed in (0, 1):
        folder = tmp_path / f"lr=1e-5[{seed}]"
        folder.mkdir()
        lines = [{"sft/step": 1, "sft/loss": 2.0}]
        lines += [{"step": step, "reward/mean": step / 10 + seed / 20, "policy/kl": 0.01} for step in range(1, 30)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "plots" / "curve"
    command = ["plot", f"lr=low={tmp_path}/lr=*", str(tmp_path / "lr=1e-5[0]"), "--out", str(out), "--metrics"]
    assert console.run([*command, "reward/mean", "policy/kl", "sft/loss"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "reward/mean  lr=low: last 2.925 +- 0.0354 over 2 seeds" in said
    assert "reward/mean  lr=1e-5[0]: last 2.9, mean" in said
    for name, begins in (("a.svg", b"<?xml"), ("lr=0.5", b"\x89PNG")):
        assert console.run([*command, "reward/mean", "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)

    capsys.readouterr()
    assert console.run([*command, "reward/meen"]) == 2
    assert capsys.readouterr().err == (
        'error: no run has reward/meen (did you mean "reward/mean"?); metrics.jsonl and docs/metrics.md '
        "have all names\n"
    )
    assert console.run([*command, "reward/mean", "--smooth", "0"]) == 2
    assert console.run(["plot", "label=outputs/lr=none"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "error: no metrics.jsonl under none"
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n')
    assert console.run(["plot", str(tmp_path / "rows.jsonl")]) == 2
    assert "rows.jsonl holds no metrics of a run: name its folder" in capsys.readouterr().err


def test_plot_takes_mean_and_range_over_seeds_at_each_step():
    assert mean_and_range([{1: 0.0, 2: 1.0}, {1: 1.0, 3: 5.0}]) == (
        [1, 2, 3],
        [0.5, 1.0, 5.0],
        [0.0, 1.0, 5.0],
        [1.0, 1.0, 5.0],
    )
    assert smoothed({3: 4.0, 1: 0.0, 2: 2.0}, 2) == {1: 0.0, 2: 1.0, 3: 3.0}
    every_third = {0: 0.0, 3: 6.0, 6: 3.0}
    assert smoothed(every_third, 2) == every_third
