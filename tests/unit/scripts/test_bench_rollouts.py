"""scripts/bench/rollouts.py: what it refuses and computes, its model, and one small run of the real thing."""

import asyncio
import json
import math
import statistics
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import embedded_server

BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import rollouts as bench  # noqa: E402
from async_bench import generation, long_tail, measured, modes, processes  # noqa: E402
from async_bench.model import make_model  # noqa: E402
from bench_common.arguments import as_flags  # noqa: E402
from bench_common.output import Output  # noqa: E402
from process_group import ProcessGroup  # noqa: E402

from torchtitan.grpo.config.load import load_config  # noqa: E402
from torchtitan.grpo.data.samples import Prompt  # noqa: E402
from torchtitan.grpo.data.tokenizer import load_tokenizer  # noqa: E402
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams  # noqa: E402
from torchtitan.grpo.errors import UserError  # noqa: E402
from torchtitan.grpo.process.import_path import import_function  # noqa: E402
from torchtitan.grpo.rollouts.environment import RolloutClient  # noqa: E402

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "SUBCOMMAND"),
        ("modes", "--out"),
        ("modes --out x", "--bound-s measures the servers of --urls"),
        ("modes --out x --urls http://a --ranks 2", "--ranks 2 needs a GPU each, and --trainers names 1"),
        ("modes --out x --urls http://a --modes asynch", "invalid choice: 'asynch'"),
        ("modes --out x --urls http://a --steps 0", "0 is under 1"),
        ("modes --out x --urls http://a --trainers cpu cpu", "--trainers cpu is one rank"),
        ("modes --out x --trainers cuda:1", "neither cpu nor the index of a GPU"),
        ("modes --out x --urls 127.0.0.1:8000", "write http://host:port"),
        ("modes --out x --urls http://a --bound-s -1", "--bound-s -1 is negative"),
        ("modes --out x --urls http://a --mean 0", "0 is not a positive number"),
        ("modes --out x --urls http://a --pre cpu", "unrecognized arguments: --pre"),
        ("modes --out x --urls http://a -- training.steps 3", "'training.steps' is not --section.key"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_change(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_flags_win_over_presets_and_the_trainer_s_over_both():
    words = "modes --out x --urls http://a --preset cpu --mean=40 --age 3 -- --training.max_norm 0.5 "
    words += "--compile.enable --job.no-x"
    args = bench.parse_arguments(words.split())
    assert (args.mean, args.age, args.prompts, args.trainers) == (40.0, 3, 8, ["cpu"])
    assert args.flags == {"training.max_norm": "0.5", "compile.enable": "true", "job.x": "false"}


@pytest.mark.parametrize("preset", list(bench.PRESETS))
@pytest.mark.parametrize("mode", bench.MODES)
def test_every_mode_of_every_preset_is_a_configuration_that_the_trainer_takes(preset, mode, tmp_path):
    args = bench.parse_arguments(["modes", "--out", str(tmp_path), "--urls", URL, "--preset", preset])
    flags = modes.job_flags(args, tmp_path) | modes.mode_flags(mode, args.age)
    config = load_config(as_flags(flags))
    assert config.async_grpo.enabled == config.weight_sync.async_weight_update == (mode != "sync")
    assert config.async_grpo.in_flight_weight_updates == (mode != "async")
    assert config.async_grpo.recompute_kv_cache_after_weight_updates == (mode == "in_flight")
    assert config.rollout.max_concurrent_requests == args.sequences  # each is of one answer


def test_each_mode_is_warmed_up_for_as_long_as_its_answers_may_age():
    args = bench.parse_arguments(["modes", "--out", "x", "--urls", URL])
    ages = [modes.max_age(mode, 8) for mode in ("sync", "async", "in_flight")]
    assert ages == [0, 1, 8]
    assert [modes.measured_steps(age, args) for age in ages] == [range(5, 11), range(5, 11), range(10, 16)]
    args = bench.parse_arguments(["modes", "--out", "x", "--urls", URL, "--warmup", "1", "--steps", "2"])
    assert [modes.measured_steps(age, args) for age in ages] == [range(2, 4)] * 3


def test_lengths_are_log_normal_and_belong_to_prompt_and_sample():
    drawn = [n for i in range(500) for n in long_tail.draw_lengths(i, 16, mean=512, sigma=0.8, longest=10**9)]
    logs = [math.log(n) for n in drawn]
    assert statistics.fmean(drawn) == pytest.approx(512, rel=0.05)
    assert statistics.fmean(logs) == pytest.approx(math.log(512) - 0.32, abs=0.03)
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.03)
    assert long_tail.draw_lengths(7, 4, 512, 0.8, 4096) == long_tail.draw_lengths(7, 16, 512, 0.8, 4096)[:4]
    assert max(long_tail.draw_lengths(0, 1000, 512, 2.0, 600)) == 600
    assert min(long_tail.draw_lengths(0, 1000, 1.5, 3.0, 600)) == 1


def test_rollout_asks_each_sample_with_its_own_length():
    asked = []

    async def ask(token_ids, params, suffix, session):
        asked.append((token_ids, params.n, params.max_tokens, params.seed))
        await asyncio.sleep(0.001 * params.max_tokens)  # the shortest is answered first
        return [Completion([5] * params.max_tokens, [-1.0] * params.max_tokens, "length", [3] * params.max_tokens)]

    prompt = Prompt(0, [1, 2], "?", columns={long_tail.LENGTHS: [30, 10, 20]})
    client = RolloutClient(None, SamplingParams(n=2, temperature=1.0, max_tokens=64, seed=7), prompt, ask)
    samples = asyncio.run(import_function("[rollout] environment", "async_bench.long_tail:rollout")(client, prompt))
    assert [len(sample.token_ids) for sample in samples] == [30, 10]  # as many as the group has, in its order
    assert [(token_ids, n, tokens) for token_ids, n, tokens, _ in asked] == [([1, 2], 1, 30), ([1, 2], 1, 10)]
    assert len({seed for *_, seed in asked}) == 2
    flips = [long_tail.coin(f"<{i}>", prompt) for i in range(1000)]
    assert set(flips) == {0.0, 1.0} and 400 < sum(flips) < 600


def test_the_model_never_ends_an_answer(tmp_path):
    make_model(tmp_path, "tiny", max_tokens=128)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode([model.config.vocab_size - 1]) == f"<{model.config.vocab_size - 1}>"
    contexts = torch.randint(4, 80, (16, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logprobs = model(contexts).logits.float().log_softmax(-1)
    ends = logprobs[..., tokenizer.eos_token_id]
    assert ends.max() < -30 and ends.std() < 0.1 * -ends.mean()  # whatever the context
    others = logprobs[..., torch.arange(model.config.vocab_size) != tokenizer.eos_token_id]
    assert others.exp().max() < 0.1  # no other token is favoured


def step(number: int, tokens: int, seconds: float, **more: float) -> dict:
    line = {"step": number, "rollout/answer_tokens": tokens, "time/step_s": seconds}
    line |= {"time/train_s": 1.0, "time/sync_s": 0.01 * number}
    return line | more


def test_summary_is_all_tokens_over_all_time_of_the_steps_measured():
    lines = [{"step": 0, "time/step_s": 50.0}, step(1, 1, 100.0), step(2, 400, 2.0), step(3, 100, 3.0)]
    lines.append(step(4, 9999, 1.0))
    row = measured.summarise(lines, range(2, 4), devices=2)
    assert (row["steps"], row["tokens"], row["seconds"]) == (2, 500, 5.0)
    assert (row["tokens_per_s"], row["tokens_per_s_gpu"]) == (100.0, 50.0)
    assert (row["step_s"], row["step_s_max"]) == (2.5, 3.0)
    assert row["train_tokens_per_s"] == 250.0
    assert (row["sync_ms"], row["sync_ms_max"]) == (pytest.approx(25.0), pytest.approx(30.0))
    assert row["busy"] is None
    assert measured.summarise(lines[:2], range(2, 4), devices=2) is None


def test_modes_are_compared_with_sync_and_with_the_bound():
    rows = [
        {"mode": "sync", "tokens_per_s": 100.0, "train_tokens_per_s": 400.0},
        {"mode": "in_flight_age4", "tokens_per_s": 270.0, "train_tokens_per_s": 350.0},
    ]
    (line,) = measured.compare(rows, [{"tokens_per_s": 250.0}, {"tokens_per_s": 300.0}])
    assert [row["ratio"] for row in rows] == [1.0, 2.7]
    assert [row["of_bound"] for row in rows] == [pytest.approx(1 / 3), 0.9]
    assert "Perfect overlap gives 300, 1.75 times the 171 of taking turns" in line
    assert measured.compare(rows[1:], []) == [] and rows[1]["ratio"] is None
    names = ["sync", "async", "in_flight_age2", "in_flight_age10", "in_flight_keep_kv_age4"]
    assert measured.in_order(reversed(names)) == names
    assert modes.run_name("in_flight", 2) == names[2] and modes.run_name("sync", 2) == names[0]


def test_a_folder_holds_one_job(tmp_path):
    def job(*words: str) -> None:
        modes._same_job(
            tmp_path,
            bench.parse_arguments(["modes", "--out", str(tmp_path), "--urls", URL, "--preset", "cpu", *words]),
        )

    job()
    job("--age", "4")
    with pytest.raises(UserError, match=r"holds another job \(mean differ\)"):
        job("--mean", "30")


def test_processes_that_fail_or_take_too_long_say_so(tmp_path, monkeypatch):
    code = ""

    def start(_command, log, environment):
        return ProcessGroup([sys.executable, "-S", "-c", code], log, environment)

    monkeypatch.setattr(processes, "ProcessGroup", start)
    monkeypatch.setattr(processes, "POLL_S", 0.05)
    code = "raise SystemExit('group_sizes is unknown')"
    error = processes.train("sync", {}, ["cpu"], tmp_path / "sync", 60, lambda _: False)
    assert error.startswith("sync: ended with exit status 1") and "group_sizes is unknown" in error
    code = "import time; time.sleep(60)"
    error = processes.train("slow", {}, ["cpu"], tmp_path / "slow", 0.1, lambda _: False)
    assert "slow: not within 0.1 s (--run-limit-s), 0 lines" in error


def test_answers_under_way_are_long_ones_and_half_done():
    asks = [generation.Ask([7, 8, 9], length, (0,)) for length in (10, 1000)]
    found = generation.under_way(asks, 4000)
    lengths = [len(ask.prompt_ids) - 3 + ask.max_tokens for ask in found]
    assert set(lengths) == {10, 1000} and lengths.count(1000) / 4000 == pytest.approx(1000 / 1010, abs=0.01)
    assert min(ask.max_tokens for ask in found) >= 1
    assert statistics.fmean(ask.max_tokens for ask in found) == pytest.approx(statistics.fmean(lengths) / 2, rel=0.05)
    assert all(ask.prompt_ids[:3] == [7, 8, 9] and set(ask.prompt_ids) <= {7, 8, 9} for ask in found[:50])
    assert generation.under_way(asks, 3) == generation.under_way(asks, 3)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_generation_rate_ends_when_a_server_is_gone(engine):
    asks = [generation.Ask([1, 2], 4, (0,))]
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        asyncio.run(generation.generation_rate(engine, ["http://127.0.0.1:9"], asks, 4, 5.0, 5.0, 5.0))


def test_generation_alone_is_a_table_of_its_own(tmp_path, capsys):
    args = bench.parse_arguments(["modes", "--out", str(tmp_path), "--urls", "http://a", "--modes"])
    assert args.modes == []
    (tmp_path / "bound.jsonl").write_text(json.dumps({"sequences": 4, "tokens_per_s": 123.0}) + "\n")
    modes.report(tmp_path, args, Output(True, None))
    assert "| 4 | 123 |" in capsys.readouterr().out


def test_a_mode_end_to_end_on_a_cpu(tmp_path):
    """The embedded server and the trainer under torchrun."""
    make_model(tmp_path / "model", "tiny", max_tokens=53)
    words = f"modes --preset cpu --out {tmp_path} --modes in_flight --mean 12 --max-answer 40"
    words += f" --steps 2 --warmup 2 --age 1 --json {tmp_path}/rows.jsonl --time-limit-s 200 --bound-s 0.6"
    with embedded_server(tmp_path / "model", tmp_path / "server.log") as url:
        words = [*words.split(), "--urls", url, "--", "--training.steps", 1000]
        bench_run = Ranks(1, BENCH / "rollouts.py", *words, log=tmp_path / "log")
        bench_run.check(280)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row.get("mode")]
    assert row["mode"] == "in_flight_age1" and row["steps"] == 2
    # The lengths are those of the data, which end most answers before their limit.
    data = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    logged = [json.loads(line) for line in (tmp_path / "in_flight_age1" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if line.get("step", 0) > 0]
    assert 4 <= len(steps) < 1000  # ended soon after the last that is measured
    assert all(line["rollout/truncated_fraction"] < 0.5 for line in steps)
    # A run that is ended late has begun the data again.
    passes = math.ceil(len(steps) * bench.PRESETS["cpu"]["prompts"] / len(data))
    tokens_of_data = sum(sum(row[long_tail.LENGTHS]) for row in data)
    assert sum(line["rollout/answer_tokens"] for line in steps) <= passes * tokens_of_data
    assert 0 <= row["age_max"] <= 1 and row["of_bound"] > 0
    assert "Generation alone" in bench_run.log
