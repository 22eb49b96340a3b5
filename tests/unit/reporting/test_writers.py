import functools
import itertools
import json
import logging
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.helpers import ROOT, Unspeakable
from tests.helpers.meanings import meaning
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.losses import policy_loss
from torchtitan.grpo.policy.sums import mismatch_sums
from torchtitan.grpo.reporting.console import FIELDS
from torchtitan.grpo.reporting.sample_log import SampleLog, given_text
from torchtitan.grpo.reporting.step_metrics import answer_metrics, described, policy_metrics, validation_metrics
from torchtitan.grpo.reporting.writers import MetricsLogger
from torchtitan.grpo.rollouts.teachers.teachers import Teachers


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(ROOT / "train_configs" / "tiny_qwen3"))


def config_of(*arguments: str) -> JobConfig:
    model = str(ROOT / "train_configs" / "tiny_qwen3")
    return load_config(["--model.hf_assets_path", model, *arguments])


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def group_of(rewards: list[float], index: int = 0) -> Group:
    prompt = Prompt(index=index, token_ids=[1, 2], text="1+1=", answer="2")
    return [
        Sample(prompt, [5, 6], [-0.1, -0.2], [3, 4], "stop", text=f"answer {i}", rewards={"match": r}, reward=r)
        for i, r in enumerate(rewards)
    ]


def held_out(greedy: list[float], sampled: list[float]) -> list[HeldOutAnswers]:
    """Answers to one prompt, by their rewards."""
    return [HeldOutAnswers(HeldOut("", [], len(sampled), 1.0, 8), [group_of(greedy)], [group_of(sampled)])]


@pytest.fixture
def run(tmp_path):
    """Builds loggers of one run folder, as a run and its resumes would, and closes them."""
    loggers = []

    def start(*arguments: str, rank0: bool = True, total_steps: int = 10) -> MetricsLogger:
        loggers.append(MetricsLogger(config_of(*arguments), tmp_path, rank0, total_steps))
        return loggers[-1]

    yield start
    for logger in loggers:
        logger.close()


def test_every_step_is_one_line_readable_at_once(run, tmp_path):
    metrics = run()
    metrics.log(1, {"reward/mean": 0.5, "policy/kl": torch.tensor(0.25), "rollout/tokens": 7})
    metrics.log(1, {"validation/greedy_reward": 0.75})
    metrics.log(2, {"reward/mean": 1})
    assert records(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "reward/mean": 0.5,
            "policy/kl": 0.25,
            "rollout/tokens": 7,
            "validation/greedy_reward": 0.75,
        },
        {"step": 2, "reward/mean": 1},
    ]


def test_a_resumed_run_replaces_the_steps_that_it_repeats(run, tmp_path):
    before = run()
    before.log(1, {"sft/loss": 3.0}, "sft/step")
    for step in (1, 2, 3, 4):
        before.log(step, {"reward/mean": step / 10})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rewa')  # cut off by a crash

    resumed = run()
    resumed.log(3, {"reward/mean": 0.9})
    resumed.log(4, {"reward/mean": 1.0})
    assert records(tmp_path / "metrics.jsonl") == [
        {"sft/step": 1, "sft/loss": 3.0},
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 3, "reward/mean": 0.9},
        {"step": 4, "reward/mean": 1.0},
    ]


def test_what_is_no_finite_number_is_left_out_and_warned_of_once(run, tmp_path, caplog):
    metrics = run()
    bad = {
        "policy/kl": math.nan,
        "train/grad_norm": torch.tensor(math.inf),
        "a/vector": torch.zeros(2),
        "a/text": "high",
        "a/none": None,
    }
    with caplog.at_level(logging.WARNING):
        metrics.log(1, bad | {"reward/mean": torch.tensor([0.5])})
        metrics.log(2, bad)
    assert records(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}, {"step": 2}]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == len(bad)
    assert all(any(f"metric {name} " in message for message in warned) for name in bad)


def test_tensorboard_gets_every_step_and_validation(run, tmp_path):
    first = run("--metrics.enable_tensorboard")
    for step in (1, 2, 3, 4):
        first.log(step, {"reward/mean": step / 10})
    first.log(3, {"validation/greedy_reward": 0.3})
    first.close()
    resumed = run("--metrics.enable_tensorboard")
    resumed.log(4, {"reward/mean": 0.8})
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    # Step 4 of the run that crashed is not shown beside the repeated one.
    assert events.Scalars("reward/mean")[-1].value == pytest.approx(0.8)
    assert [event.step for event in events.Scalars("validation/greedy_reward")] == [3]


def test_the_server_that_a_run_starts_has_the_same_name_in_each_run(run, tmp_path):
    metrics = {"server/127.0.0.1_41235/busy_share": 0.5, "server/busy_share": 0.5}
    own = run()
    own.log(1, metrics)
    own.close()
    assert records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "server/embedded/busy_share": 0.5, "server/busy_share": 0.5}
    ]
    for flags in (("--rollout.urls", "http://127.0.0.1:41235"), ("--rollout.replicas", "2")):
        given = run(*flags)
        given.log(1, metrics)
        given.close()
        assert records(tmp_path / "metrics.jsonl") == [{"step": 1, **metrics}]


def test_other_ranks_write_nothing(run, tmp_path):
    metrics = run("--metrics.enable_tensorboard", rank0=False)
    metrics.log(1, {"reward/mean": 0.5})
    samples = SampleLog(config_of(), tmp_path, metrics, tokenizer())
    samples.log(1, [group_of([1.0])], [[0.0]])
    samples.log_validation(1, held_out([1.0], [0.0]))
    samples.close()
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"\[metrics\] enable_wandb.*pip install wandb, or"):
        config_of("--metrics.enable_wandb")


def test_wandb_run_is_written(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_NAME", "named-by-variable")
    monkeypatch.setenv("WANDB_RUN_GROUP", "seeds")
    for _ in range(2):  # the second is a resumed run
        metrics = run("--metrics.enable_wandb", "--grpo.group_size", "4")
        samples = SampleLog(config_of(), tmp_path, metrics, tokenizer())
        metrics.log(1, {"sft/loss": 3.0}, "sft/step")
        metrics.log(1, {"reward/mean": 0.5})
        samples.log(1, [group_of([1.0, 0.0])], [[0.7, -0.7]])
        samples.log_validation(1, held_out([1.0], [0.0]))
        samples.close()
        metrics.close()
    written = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert {path.stem.removeprefix("run-") for path in written} == {(tmp_path / "wandb_run_id").read_text().strip()}
    content = written[0].read_bytes()
    for text in (b"reward/mean", b"sft/loss", b"sft/step", b"named-by-variable", b"seeds", b"grpo.group_size"):
        assert text in content, text
    (table,) = written[0].parent.glob("files/media/table/samples*.json")
    shown = json.loads(table.read_text())
    assert [row[shown["columns"].index("advantage")] for row in shown["data"]] == [-0.7, 0.7]
    assert list(written[0].parent.glob("files/media/table/validation_samples*.json"))


def test_samples_are_spread_over_groups_and_resume(run, tmp_path):
    samples = SampleLog(config_of("--metrics.samples_per_step", "2"), tmp_path, run(), tokenizer())
    groups = [group_of([0.0, 1.0, 0.5], index) for index in (10, 11)]
    advantages = [[-1.0, 1.0, 0.0], [-1.5, 1.5, 0.0]]
    for step in (1, 2):
        samples.log(step, groups, advantages)
    samples.close()
    written = records(tmp_path / "samples.jsonl")
    assert [(r["step"], r["prompt_index"], r["answer"]) for r in written] == [
        (1, 10, "answer 1"),
        (1, 11, "answer 1"),
        (2, 10, "answer 2"),
        (2, 11, "answer 2"),
    ]
    assert written[1] == {
        "step": 1,
        "source": "",
        "prompt_index": 11,
        "prompt": "1+1=",
        "answer": "answer 1",
        "reference": "2",
        "reward": 1.0,
        "rewards": {"match": 1.0},
        "reward_failures": {},
        "advantage": 1.5,
        "finish_reason": "stop",
        "answer_tokens": 2,
        "versions": [3, 4],
        "given": [],
    }
    resumed = SampleLog(config_of("--metrics.samples_per_step", "9"), tmp_path, run(), tokenizer())
    resumed.log(2, groups[:1], advantages[:1])
    resumed.close()
    assert [r["step"] for r in records(tmp_path / "samples.jsonl")] == [1, 1, 2, 2, 2]


def test_an_environments_tokens_are_not_counted_as_the_answers(run, tmp_path):
    group = group_of([1.0])
    group[0].loss_mask = [True, False]
    samples = SampleLog(config_of(), tmp_path, run(), tokenizer())
    samples.log(1, [group], [[0.0]])
    samples.close()
    (line,) = records(tmp_path / "samples.jsonl")
    assert line["answer_tokens"] == 1


def test_held_out_answers_are_stored_and_those_that_a_resume_repeats_dropped(run, tmp_path):
    def log() -> SampleLog:
        return SampleLog(config_of("--metrics.samples_per_step", "0"), tmp_path, run(), tokenizer())

    def stored() -> list[tuple]:
        return [(r["step"], r["kind"], r["reward"]) for r in records(tmp_path / "validation_samples.jsonl")]

    first = log()
    for step in (0, 3):
        first.log_validation(step, held_out([1.0], [0.0, 0.5]))
    first.close()
    before = [(0, "greedy", 1.0), (0, "sampled", 0.0), (0, "sampled", 0.5)]
    assert stored() == before + [(3, *rest) for _, *rest in before]
    resumed = log()  # from a checkpoint of step 1, with another [validation] freq
    resumed.log(2, [group_of([1.0])], [[0.0]])
    resumed.close()
    assert stored() == before


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """What the kernel writes of a line that reaches this size is its beginning, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_no_line_and_ends_nothing(run, tmp_path, caplog):
    def log(step: int) -> None:
        metrics.log(step, {"reward/mean": step / 10})
        samples.log(step, [group_of([1.0])], [[0.0]])
        metrics.log(step, {"validation/greedy_reward": step / 5})

    def logged(*steps: int) -> list[dict]:
        return [{"step": step, "reward/mean": step / 10, "validation/greedy_reward": step / 5} for step in steps]

    caplog.set_level(logging.INFO)
    path = tmp_path / "metrics.jsonl"
    before = run("--metrics.no-enable_tensorboard")  # two files of one second are read in the order of their names
    for step in (1, 2, 3):
        before.log(step, {"reward/mean": step / 10, "validation/greedy_reward": step / 5})
    metrics = run("--metrics.enable_tensorboard")
    samples = SampleLog(config_of(), tmp_path, metrics, tokenizer())
    with files_end_at(path.stat().st_size // 2):
        log(3)  # to drop the third line, the first two are copied, for which there is no room
    assert records(path) == logged(1, 2, 3)
    log(4)
    assert records(path) == logged(1, 2, 3, 4)
    with files_end_at(path.stat().st_size + 10):
        log(5)
        assert records(path) == logged(1, 2, 3, 4)
        log(6)
    log(7)
    samples.close()
    assert records(path) == logged(1, 2, 3, 4, 5, 6, 7)
    assert [record["step"] for record in records(tmp_path / "samples.jsonl")] == [3, 4, 5, 6, 7]
    for said in ("cannot be written: [Errno 27]", "is written again"):
        assert caplog.text.count(f"{path} {said}") == 2
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert {event.step for event in events.Scalars("reward/mean")} >= {4, 7}


def unspeakable(*_, **__):
    raise Unspeakable


@pytest.mark.parametrize("says_why", [True, False])
def test_a_dashboard_that_fails_costs_a_warning(run, tmp_path, caplog, monkeypatch, says_why):
    (tmp_path / "tb").write_text("no folder")
    if not says_why:
        monkeypatch.setattr("torchtitan.grpo.reporting.writers.SummaryWriter", unspeakable)
    metrics = run("--metrics.enable_tensorboard")
    for step in (1, 2):
        metrics.log(step, {"reward/mean": 1})
    assert caplog.text.count("TensorBoard lacks step metrics") == len(records(tmp_path / "metrics.jsonl")) - 1 == 1


def test_the_newest_value_of_a_metric_is_found_in_the_file(run):
    metrics = run()
    assert metrics.last("cost/gpu_hours") == 0.0
    metrics.log(1, {"cost/gpu_hours": 0.5})
    metrics.log(2, {"cost/gpu_hours": 0.75, "reward/mean": 1.0})
    metrics.log(3, {"reward/mean": 1.0})
    assert run().last("cost/gpu_hours") == 0.75


def test_the_folder_holds_the_configuration_that_makes_the_same_run(run, tmp_path):
    arguments = ("--grpo.group_size", "4", "--data.prompt_template", 'Say "{prompt}"  # no comment\n\x7f\u2028')
    run(*arguments)
    again = load_config(["--job.config_file", str(tmp_path / "config.toml")])
    assert resolved(again) == resolved(config_of(*arguments))


def test_what_an_environment_wrote_is_found_in_the_text():
    decode, (group,) = tokenizer().decode, [group_of([1.0])]
    asked, given = (tokenizer()(text, add_special_tokens=False)["input_ids"] for text in ("37*84=<37*84>", "3108\n"))
    sample = group[0]
    sample.token_ids = asked + given + asked[:2] + given
    sample.loss_mask = [True] * len(asked) + [False] * len(given) + [True] * 2 + [False] * len(given)
    sample.text = decode(sample.token_ids, skip_special_tokens=True)
    assert [sample.text[first:end] for first, end in given_text(sample, tokenizer())] == ["3108\n", "3108\n"]
    sample.loss_mask = None
    assert given_text(sample, tokenizer()) == []


def byte_tokenizer(fallback: bool) -> PreTrainedTokenizerBase:
    """A token for each byte and some words, as in GPT-2's or Llama 2's vocabulary, and one special token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else pre_tokenizers.ByteLevel.alphabet()
    words = ["<unk>", *bytes_, *(("\u2581", "\u2581ab") if fallback else ("\u0120ab", "ab"))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    of_bytes = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(of_bytes) if fallback else decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>")


@pytest.mark.parametrize("fallback", [False, True])
def test_what_an_environment_wrote_is_where_decoded_beginnings_say(fallback):
    tokenizer, random, (sample, *_) = byte_tokenizer(fallback), Random(5), group_of([1.0])
    byte_of = tokenizer.get_vocab() if fallback else {}
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for _ in range(150):
        ids = []
        for _ in range(random.randrange(60)):
            text = random.choice(["\u65e5", "\u00e9", "\U0001f600", "a", "ab", "", "\ufffd"])
            own = text.encode()[: random.choice([1, 9, 9, 9])]  # some are cut off
            marks = alphabet.pre_tokenize_str(text) if text else []
            known = (
                [byte_of[f"<0x{byte:02X}>"] for byte in own]
                if fallback
                else [tokenizer.convert_tokens_to_ids(mark) for mark in "".join(mark for mark, _ in marks)[: len(own)]]
            )
            ids += known or [random.choice([len(tokenizer) - 1, len(tokenizer) - 2, len(tokenizer) + 5])]
        sample.token_ids = ids
        mask, sample.loss_mask = True, []
        for _ in ids:
            mask ^= random.random() < 0.3
            sample.loss_mask.append(mask)
        ends = [i for i, (one, next) in enumerate(itertools.pairwise([*sample.loss_mask, None]), 1) if one != next]
        chars = [len(tokenizer.decode(ids[:end], skip_special_tokens=True)) for end in (0, *ends)]
        spans = [
            [first, last]
            for (first, last), end in zip(itertools.pairwise(chars), ends, strict=True)
            if not sample.loss_mask[end - 1] and first < last
        ]
        assert given_text(sample, tokenizer) == spans, (ids, sample.loss_mask)


def test_a_record_that_a_killed_run_tore_inside_a_character_is_dropped(run, tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = {"step": 1, "cost/gpu_hours": 0.5}
    path.write_bytes(json.dumps(whole).encode() + b"\n" + '{"step": 2, "answer": "\u4e09'.encode()[:-1])
    resumed = run()
    assert resumed.last("cost/gpu_hours") == 0.5
    resumed.log(2, {"reward/mean": 1.0})
    assert records(path) == [whole, {"step": 2, "reward/mean": 1.0}]


def test_text_that_is_no_valid_unicode_is_written(run, tmp_path):
    samples = SampleLog(config_of(), tmp_path, run(), tokenizer())
    group = group_of([1.0])
    group[0].text = "half \ud83d of a pair, line\u2028separator"
    samples.log(1, [group], [[0.0]])
    samples.close()
    (record,) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert record["answer"] == group[0].text


def test_metrics_are_documented():
    groups = [group_of([0.0, 1.0])]
    taught = groups[0][0]
    taught.prompt = replace(taught.prompt, source="sums")
    taught.teacher_logprobs = [-1.0] * len(taught.token_ids)
    names = {name for _, name, *_ in FIELDS} | Teachers({}, 1.0).metrics().keys() | {"distill/teacher_s"}
    answers = HeldOutAnswers(HeldOut("", [], 2, 1.0, 8), groups * 2, groups * 2)
    names |= set(answer_metrics(described(groups, 0), [[0.0, 1.0]], 0))
    names |= set(validation_metrics([answers], config_of().reward))
    per_token = torch.zeros(2)
    optional = {"importance": per_token, "reference_logprobs": per_token, "entropy": per_token}
    sample_ids = torch.zeros(2, dtype=torch.int64)
    given = per_token, per_token, per_token, torch.ones(2)
    loss, sums = policy_loss(*given, sample_ids, config_of().grpo, **optional)
    sums |= mismatch_sums(per_token, per_token, torch.ones(2)) | {"server_tokens": [1], "server_mismatch_abs_sum": [0]}
    names |= set(policy_metrics({"loss": loss} | sums, ["http://host:1"]))
    assert [name for name in names if not meaning(name).text] == []
