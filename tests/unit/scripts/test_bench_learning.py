"""scripts/bench/learning.py: what it refuses, what it reads out of metrics, and which runs it counts."""

import json
import sys

import pytest

from tests.helpers import ROOT

BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import learning as bench  # noqa: E402
from async_bench.modes import mode_flags  # noqa: E402
from bench_common.arguments import as_flags  # noqa: E402
from bench_common.output import Output  # noqa: E402
from learning_bench import reached, runs, verl_run  # noqa: E402
from learning_bench.report import report  # noqa: E402

from torchtitan.grpo.config.load import load_config  # noqa: E402
from torchtitan.grpo.data.samples import Prompt  # noqa: E402
from torchtitan.grpo.errors import UserError  # noqa: E402


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runs", "--out"),
        ("runs --out x --lrs 0", "0 is not in (0, 1]"),
        ("runs --out x --seeds -1", "-1 is negative"),
        ("runs --out x --thresholds 0.5 0.4 0.6", "must rise"),
        ("runs --out x --gpus cpu --ranks 2", "--gpus cpu has one rank"),
        ("runs --out x --variant a/b", "'a/b' is to be letters and digits"),
        ("trl --out x --trainer async", "needs --url"),
        ("verl --out x --gpus cpu", "verl runs on one GPU"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_change(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def lines(rewards: dict[int, float], steps: int, seconds: float = 2.0, **others: float) -> list[dict]:
    """A run of `steps` steps with validations that take 100 s each."""
    made = [{"step": 0, "validation/greedy_reward": rewards[0], "time/step_s": 100.0}]
    for step in range(1, steps + 1):
        line = {"step": step, "time/step_s": seconds, "rollout/answer_tokens": 10} | others
        if step in rewards:
            line |= {"validation/greedy_reward": rewards[step], "time/validate_s": 100.0}
            line["time/step_s"] += 100.0
        made.append(line)
    return made


def test_a_reward_is_reached_between_two_validations_and_validations_take_no_time():
    points = reached.curve(lines({0: 0.1, 2: 0.3, 4: 0.2, 6: 0.8}, 6))
    assert [(p.step, p.seconds, p.tokens) for p in points] == [(0, 0, 0), (2, 4, 20), (4, 8, 40), (6, 12, 60)]
    half = reached.reach(points, 0.5)
    assert (half.step, half.seconds, half.tokens) == pytest.approx((5.0, 10.0, 50.0))
    assert reached.reach(points, 0.3).seconds == pytest.approx(4.0)  # the first time counts
    assert reached.reach(points, 0.05) == points[0]
    assert reached.reach(points, 0.9) is None


def test_seeds_are_summed_up_and_a_time_is_said_only_if_all_reached_it():
    row = reached.summarise(
        [lines({0: 0.0, 2: 0.4, 4: 0.8}, 4), lines({0: 0.0, 2: 0.2, 4: 0.6}, 4)], [0.2, 0.5, 0.7], 64
    )
    assert row["final"] == pytest.approx(0.7) and row["final_std"] == pytest.approx(0.1414, rel=1e-3)
    assert row["seconds_to_1"] == pytest.approx((2.0 + 4.0) / 2) and row["tokens_to_1"] == pytest.approx(15.0)
    assert row["answers_to_1"] == pytest.approx(64 * 1.5) and row["answers_to_3"] is None
    assert row["seconds_to_3"] is None and row["reached_3"] == "1/2"
    assert row["tokens_per_s"] == pytest.approx(10 / 2.0) and row["peak_gib"] is row["pause_ms"] is None
    measured = [lines({0: 0.5, 2: 0.5}, 2, **{"memory/allocated_peak_gib": 3.0, "time/sync_s": s}) for s in (0.1, 0.3)]
    row = reached.summarise(measured, [0.1, 0.2, 0.6])
    assert (row["peak_gib"], row["pause_ms"]) == (3.0, pytest.approx(200.0))
    without = reached.summarise([lines({0: 0.5, 2: 0.5}, 2)], [0.1, 0.2, 0.6])
    assert without["final_std"] is None and without["seconds_to_2"] == 0.0


def test_the_best_rate_is_the_fastest_to_the_highest_reward_that_any_reached():
    def row(**values):
        return {f"seconds_to_{n}": None for n in (1, 2, 3)} | {"final": 0.0} | values

    early, late = row(seconds_to_1=1.0), row(seconds_to_1=9.0, seconds_to_2=20.0)
    assert reached.best([early, late]) is late
    assert reached.best([row(final=0.1), row(final=0.2)])["final"] == 0.2


def test_only_complete_runs_are_counted_and_the_tables_have_them(tmp_path, capsys):
    def write(name: str, run: dict, rows: list[dict]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / runs.RUN_FILE).write_text(json.dumps(run | {"steps": 4, "answers": 64}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    for seed in (0, 1):
        for contender, lr, pace in (("sync", 1e-5, 2.0), ("in_flight_age2", 1e-5, 1.0), ("in_flight_age2", 1e-4, 9.0)):
            run = {"contender": contender, "lr": lr, "seed": seed}
            write(f"{contender}_{lr}_{seed}", run, lines({0: 0.0, 2: 0.5, 4: 1.0}, 4, pace))
    write("killed", {"contender": "async", "lr": 1e-5, "seed": 0}, lines({0: 0.0, 2: 0.9}, 3))
    report(tmp_path, None, Output(True, tmp_path / "rows.jsonl"))
    said = capsys.readouterr().out
    assert "1: 0.500, 2: 0.750, 3: 0.900" in said and "async |" not in said
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    first = [row for row in rows if row["table"].startswith("Each at its best")]
    assert [(row["contender"], row["lr"], row["seconds_to_3"]) for row in first] == [
        ("sync", 1e-5, pytest.approx(7.2)),
        ("in_flight_age2", 1e-5, pytest.approx(3.6)),
    ]
    assert len(rows) == 2 + 3


@pytest.mark.parametrize(
    ("contender", "rewards", "message"),
    [
        ("sync", {0: 0.0}, "no complete run"),
        ("async", {0: 0.0, 2: 0.5}, "no run of sync is complete"),
        ("sync", {0: 0.5, 2: 0.5}, "sync has gained nothing"),
    ],
)
def test_without_a_gain_of_sync_there_are_no_thresholds(contender, rewards, message, tmp_path):
    (tmp_path / "run").mkdir()
    run = {"contender": contender, "lr": 1e-5, "seed": 0, "steps": 2, "answers": 64}
    (tmp_path / "run" / runs.RUN_FILE).write_text(json.dumps(run))
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines(rewards, 2)))
    with pytest.raises(UserError, match=message):
        report(tmp_path, None, Output(True))


def test_every_run_of_the_recipe_is_a_configuration_that_the_trainer_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = bench.parse_arguments(["runs", "--out", str(tmp_path), "--", "--training.steps", "7"])
    args.config = ROOT / "train_configs" / "quickstart.toml"
    flags = runs.job_flags(args)
    assert args.steps == 7 and args.lrs == [4e-4, 8e-4]
    modes = list(runs.contenders(args))
    assert len(modes) == 1 + 1 + 4 + 4
    for mode, age in modes:
        config = load_config([*as_flags(flags | mode_flags(mode, age)), "--job.dump_folder", str(tmp_path / "run")])
        assert config.async_grpo.enabled == (mode != "sync") and not config.checkpoint.enable
    args.flags = {"optimizer.lr": "1"}
    with pytest.raises(UserError, match=r"optimizer\.lr is set by this benchmark"):
        runs.job_flags(args)
    args.flags = {"training.steps": "8"}
    with pytest.raises(UserError, match="another configuration"):
        runs.job_flags(args)


def test_a_variant_differs_in_all_but_its_task(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)

    def job(*words: str) -> None:
        args = bench.parse_arguments(["runs", "--out", str(tmp_path), *words])
        args.config = ROOT / "train_configs" / "quickstart.toml"
        runs.job_flags(args)

    with pytest.raises(UserError, match="holds no runs to compare it with"):
        job("--variant", "pairs", "--", "--grpo.group_size", "2")
    job()
    job("--variant", "pairs", "--", "--grpo.group_size", "2")
    job()  # the variant has not become the job
    with pytest.raises(UserError, match=r"another configuration \(data.source_args\): name another folder$"):
        job("--variant", "small", "--", "--data.source_args", '{"max": 5}')
    with pytest.raises(UserError, match=r"\(grpo.group_size\): name another folder, or a --variant"):
        job("--", "--grpo.group_size", "2")


def test_a_line_of_verl_has_our_names_and_its_reward_is_ours():
    data = {"critic/score/mean": 0.25, "response_length/mean": 10.5, "actor/perf/max_memory_allocated_gb": 3.0}
    data |= {"timing_s/testing": 2.0, "val-core/task/acc/mean@1": 0.5, "val-aux/num_turns/mean": 2.0}
    made = verl_run.line({"step": 4, "data": data}, 7.0, answers=8)
    assert reached.curve([made]) == [reached.Point(4, 5.0, 84.0, 0.5)]
    assert (made["reward/mean"], made["memory/allocated_peak_gib"]) == (0.25, 3.0)
    assert (
        verl_run.line({"step": 0, "data": {"val-core/task/reward/mean@1": 0.1}}, 1.0, 8)["validation/greedy_reward"]
        == 0.1
    )


def test_the_reward_of_other_trainers_is_the_configurations():
    from learning_bench.verl_reward import compute_score

    (row,) = verl_run.rows([Prompt(3, [1], "What is 1 + 2?", "3", {"answer": "3"})])
    assert row["prompt"][0]["content"] == "What is 1 + 2?"
    truth = row["reward_model"]["ground_truth"]
    answers = {"It is 3.": 1.0, "4": 0.0}
    for pattern, text in (("", "{}"), ("<a>(.*?)</a>", "7 <a>{}</a> 9")):
        assert {
            answer: compute_score("task", text.format(answer), truth, row["extra_info"], "numeric_match", pattern)
            for answer in answers
        } == answers
