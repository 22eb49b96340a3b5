"""JSONL files of steps that a loss of power has damaged."""

from torchtitan.grpo.reporting.step_lines import StepLines, read_lines


def test_lines_that_are_none_are_dropped_and_end_no_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\0\0\0\n{"step": 2, "cost": 3.0}\n[]\n{"cost":\0\n')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    lines = StepLines(path)
    assert lines.last("cost") == 3.0
    lines.append({"step": 3})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "cost": 3.0}\n{"step": 3}\n'
