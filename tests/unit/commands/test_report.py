"""`torchtitan-grpo report`: what the page holds, what it says of a run, and that it needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.commands import console
from torchtitan.grpo.commands.run_report.charts import (
    Series,
    line_chart,
    short,
    smoothed,
    stacked_chart,
    thinned,
    ticks,
)
from torchtitan.grpo.commands.run_report.findings import bound, findings
from torchtitan.grpo.commands.run_report.page import page
from torchtitan.grpo.commands.run_report.run_folder import Run, read_run
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import write_config

HOSTILE = "</pre><script>alert(1)</script> & \ud83d"


def write(folder: Path, lines: list[dict], name: str = "metrics.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def step_line(step: int, **changes: float) -> dict:
    times = {"time/rollout_s": 3.0, "time/train_s": 1.0, "time/other_s": 0.1, "time/step_s": 4.1}
    server = {"server/a_1/busy_share": 0.5, "server/a_1/total_s": 0.25, "server/b_2/busy_share": 0.75}
    return {"step": step, "reward/mean": step / 10, "train/answer_tokens": 9.0, **times, **server, **changes}


def sample(**changes: object) -> dict:
    facts = {"step": 2, "prompt_index": 7, "prompt": "1+1=", "answer": "2", "reference": "2", "reward": 1.0}
    facts |= {"rewards": {"exact_match": 1.0}, "reward_failures": {}, "finish_reason": "stop", "answer_tokens": 1}
    return facts | {"versions": [1, 1], "given": [], "advantage": 0.5} | changes


def run_of(lines: list[dict], **values: object) -> Run:
    return Run(Path("somewhere"), lines, [], [], [], [], values)


@pytest.fixture
def folder(tmp_path):
    flags = ["--training.steps", "3", "--grpo.group_size", "4", "--data.system_prompt", "Think.\u2028Answer."]
    write_config(load_config(["--model.hf_assets_path", str(TINY_QWEN3), *flags]), tmp_path)
    first = {"step": 0, "validation/greedy_reward": 0.125}
    lines = [{"sft/step": 1, "sft/loss": 2.0}, first, *map(step_line, (1, 2)), step_line(3, **{"reward/mean": 1.0})]
    write(tmp_path, [*lines, {"step": 4}])
    tool = sample(answer="6*7=42!" + "." * 5000, given=[[4, 6]])
    failed = sample(reward=None, advantage=0.0, reward_failures={"judge": "raised ValueError: <no>"})
    write(tmp_path, [failed, tool, sample(answer=HOSTILE, reward=0.0, advantage=-0.5)], "samples.jsonl")
    write(tmp_path, [sample(kind="greedy", reward=0.25)], "validation_samples.jsonl")
    for name, torn in (("metrics.jsonl", b'{"step": 5, "rew'), ("samples.jsonl", '{"answer": "\u4e09'.encode()[:-1])):
        with (tmp_path / name).open("ab") as file:  # the second ends inside a character
            file.write(torn)
    return tmp_path


class Balanced(HTMLParser):
    """Checks that tags are closed in order, and keeps what may name something outside the file."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.outside += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_alone(folder):
    text = page(read_run(folder))
    parser = Balanced()
    parser.feed(text)
    assert (parser.open, parser.outside) == ([], [])
    assert not re.search(r"url\(|@import|fetch\(|https?:", text)
    charts = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(charts) >= 4
    for chart in charts:
        shown = json.loads(ElementTree.fromstring(chart).get("data-chart"))
        assert all(points for _, _, points in shown["series"])


def test_the_page_shows_the_run(folder):
    text = page(read_run(folder))
    for said in ("rollout-bound", "answers a step", ">a_1<", ">b_2<", "75%", "held-out, greedy", "nats per token"):
        assert said in text, said
    assert "<td>grpo.group_size</td><td>4</td><td>8</td>" in text
    assert "<td>training.steps</td><td>3</td><td>100</td>" in text
    assert "Think.\u2028Answer.&#34;</td><td>&#34;&#34;</td>" in text, "the line ends after it"
    assert "<td>debug.seed</td><td>42</td></tr>" in text, "a key at its default has no third column"
    assert '6*7=<mark title="from the environment">42</mark>!...' in text and " ... (5,007 characters)" in text
    assert "no reward" in text and "judge raised ValueError: &lt;no&gt;" in text
    assert "advantage +0.500" in text and "Held-out at step 2" in text
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    write(tmp_path, [])
    Balanced().feed(page(read_run(tmp_path)))
    write(tmp_path, [{"sft/step": 20, "sft/loss": 1.0}])
    assert "Supervised warm start" in page(read_run(tmp_path))


def test_supervised_fine_tuning_has_held_out_curves_and_no_servers(folder):
    line = {"train/loss": 2.0, "train/token_accuracy": 0.5, "validation/loss": 2.5, "validation/a/token_accuracy": 0.25}
    write(folder, [{"step": step, **line} for step in (1, 2)])
    text = page(read_run(folder))
    for said in ("supervised fine-tuning", "Token accuracy", "held-out <b>2.5</b>", "a held-out <b>0.25</b>"):
        assert said in text
    assert "answers a step" not in text


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"reward/zero_variance_fraction": 1.0}, "warning", "3 steps without a signal"),
        ({"train/answer_tokens": 0.0}, "warning", "3 steps without a signal"),
        ({"reward/failures": 2}, "problem", "6 rewards failed"),
        ({"train/skipped_steps": 1}, "problem", "1 update left out"),
        ({"checkpoint/failed": 2}, "problem", "2 checkpoints could not be saved"),
        ({"rollout/truncated_fraction": 0.5}, "warning", "50% of the newest answers were cut"),
        ({"policy/mismatch_abs": 0.3}, "warning", "Log-probabilities differ by 0.3 nats"),
        ({"sync/servers_lost": 1}, "warning", "Servers were lost in 3 steps"),
        ({"sync/missed": 1}, "note", "Servers missed 3 weight updates"),
        ({"rollout/groups_timed_out": 4}, "warning", "4 groups given up"),
        ({"memory/alloc_retries": 1}, "warning", "GPU memory was short 1 time"),
    ],
)
def test_what_needs_a_look_is_found(changes, level, words):
    clean = findings(run_of([step_line(step) for step in (1, 2, 3)]))
    assert not [one for one in clean if one.level in ("warning", "problem")]
    found = findings(run_of([step_line(step, **changes) for step in (1, 2, 3)]))
    assert [one.level for one in found if words in one.title] == [level], found


@pytest.mark.parametrize(
    "settings",
    [{"grpo.kl_coef": 0.1, "grpo.kl_placement": "reward"}, {"distill.teacher_urls": ["http://teacher:1"]}],
)
def test_equal_rewards_are_a_signal_with_a_kl_in_the_reward_or_a_teacher(settings):
    equal = run_of([step_line(step, **{"reward/zero_variance_fraction": 1.0}) for step in (1, 2, 3)], **settings)
    assert not [one for one in findings(equal) if "signal" in one.title]
    silent = run_of([step_line(step, **{"train/answer_tokens": 0.0}) for step in (1, 2, 3)], **settings)
    assert [one.title for one in findings(silent) if "signal" in one.title] == ["3 steps without a signal"]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("train/skipped_steps", "3 updates left out"),
        ("checkpoint/failed", "3 checkpoints could not be saved"),
        ("memory/alloc_retries", "GPU memory was short 3 times"),
        ("rollout/retried", "3 requests sent again"),
    ],
)
def test_what_a_process_counts_is_summed_over_resumes(name, title):
    counts = [1, 2, 0, 1, 0]  # each resume begins anew
    run = run_of([step_line(step, **{name: count}) for step, count in enumerate(counts, 1)])
    assert title in [one.title for one in findings(run)]


def test_a_filter_of_long_answers_is_named_where_nothing_was_learned():
    silent = run_of(
        [step_line(step, **{"train/answer_tokens": 0.0}) for step in (1, 2)], **{"grpo.overlong_filter": True}
    )
    (found,) = [one for one in findings(silent) if "signal" in one.title]
    assert "among the answers that [grpo] overlong_filter keeps" in found.text


def test_rewards_that_are_equal_after_a_length_penalty_are_no_signal():
    penalty = {"grpo.overlong_buffer_tokens": 4, "grpo.overlong_penalty": 1.0}
    equal = run_of([step_line(step, **{"reward/zero_variance_fraction": 1.0}) for step in (1, 2, 3)], **penalty)
    assert "3 steps without a signal" in [one.title for one in findings(equal)]


@pytest.mark.parametrize(
    ("held_out", "level", "words"),
    [
        ([0.2, 0.5, 0.9], "good", "rose from 0.200 to 0.900"),
        ([0.2, 0.9, 0.5], "warning", "has fallen since its best"),
        ([0.2, 0.2], "warning", "has not risen"),
    ],
)
def test_held_out_reward_is_judged(held_out, level, words):
    run = run_of([step_line(step, **{"validation/greedy_reward": value}) for step, value in enumerate(held_out)])
    assert [one.level for one in findings(run) if words in one.title] == [level]


def test_the_bound_is_that_of_all_steps_but_the_first():
    slow_start = step_line(1, **{"time/train_s": 100.0})
    bounded = bound(run_of([slow_start, step_line(2), step_line(3)]))
    assert bounded.sentence == "rollout-bound (rollout 75%, trainer 25%)"
    assert bounded.shares["rollout"] == 0.75 and "[async_grpo]" in bounded.help
    assert bound(run_of([{"step": 1}])) is None


def test_ticks_are_round_and_inside():
    assert ticks(0, 1.06) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(2e-7, 3e-6) == [5e-7, 1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6]
    assert ticks(5, 5) == [5]
    assert [short(value) for value in (0, 0.25, 1234.5, 12345)] == ["0", "0.25", "1234", "12.3k"]
    assert [short(value) for value in (2.5e6, 3e-6, -0.5)] == ["2.5M", "3e-06", "-0.5"]


def test_long_curves_are_thinned_and_smoothed():
    points = [(float(step), float(step % 2)) for step in range(1, 1001)]
    thin = thinned(points, 100)
    assert len(thin) == 100 and thin[-1] == (1000.0, 0.5)
    assert thinned(points[:7], 100) == points[:7]
    smooth = smoothed(points)
    assert smooth[0] == points[0] and abs(smooth[500][1] - 0.5) < 0.02


def test_odd_curves_are_drawn():
    for points in ([(1, 0.5)], [(1, 0.0), (2, 0.0)], [(1, -1e-9), (2, 1e9)]):
        for chart in (line_chart, stacked_chart):
            drawn = chart([Series("a", [(x, abs(y)) for x, y in points], "#000")], 300)
            assert "nan" not in drawn and "inf" not in drawn
            ElementTree.fromstring(drawn)


def test_the_command_writes_the_file_and_names_a_folder_without_a_run(folder, capsys):
    assert console.run(["report", str(folder)]) == 0
    assert "<html" in (folder / "report.html").read_text()
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert console.run(["report", str(folder / "elsewhere")]) == 2
    assert "elsewhere/metrics.jsonl does not exist: name the folder of a run" in capsys.readouterr().err
