"""scripts/evaluate.py: which model, which configuration, where results go. tests/integration/test_train.py runs it."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from scripts import evaluate
from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.servers import group_members
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.data.load import load_held_out
from torchtitan.grpo.data.prompts import load_tokenizer
from torchtitan.grpo.errors import UserError

EVALUATES = {"stdin": subprocess.PIPE, "process_group": 0}
QUICKSTART = ["--job.config_file", str(ROOT / "train_configs" / "quickstart.toml")]


def config_of(*words):
    arguments, flags = evaluate.parse_arguments([str(TINY_QWEN3), *words])
    return evaluate.read_config(arguments, flags, TINY_QWEN3)


def test_a_model_is_a_checkpoint_with_an_export_or_a_hugging_face_folder(tmp_path):
    assert evaluate.model_folder(TINY_QWEN3) == TINY_QWEN3
    (tmp_path / "step-3" / "hf").mkdir(parents=True)
    with pytest.raises(UserError, match=r"step-3 is no Hugging Face folder.*\[checkpoint\] export_hf"):
        evaluate.model_folder(tmp_path / "step-3")
    (tmp_path / "step-3" / "hf" / "config.json").write_text("{}")
    assert evaluate.model_folder(tmp_path / "step-3") == tmp_path / "step-3" / "hf"


def test_the_runs_servers_and_ranks_are_not_those_of_the_evaluation(tmp_path):
    of_run = ["--parallelism.tensor_parallel_degree", "1", "--rollout.max_answer_tokens", "7"]
    path = tmp_path / "run.toml"
    text = (ROOT / "train_configs" / "quickstart.toml").read_text()
    path.write_text(text.replace("[rollout]", '[rollout]\nurls = ["http://a:1", "http://b:1"]\nmin_servers = 2') + (
        "\n[parallelism]\ntensor_parallel_degree = 4\n[compile]\nenable = true\n"
    ))  # fmt: skip
    config = config_of("--job.config_file", str(path), *of_run)
    assert config.model.hf_assets_path == str(TINY_QWEN3)
    assert (config.rollout.engine, config.rollout.urls, config.rollout.max_answer_tokens) == ("embedded", [], 7)
    started = config_of("--job.config_file", str(path), "--engine", "vllm")
    assert started.rollout.engine == "vllm" and len(started.rollout.urls) == 1
    path.write_text(
        path.read_text().replace('urls = ["http://a:1", "http://b:1"]', 'replicas = 2\nserver_flags = ["-x"]')
    )
    config = config_of("--job.config_file", str(path), *of_run)
    assert (config.rollout.replicas, config.rollout.server_flags) == (0, [])
    given = config_of(
        "--job.config_file", str(path), "--engine", "sglang", "--url", "http://c:1", "--url", "http://d:1"
    )
    assert given.rollout.urls == ["http://c:1", "http://d:1"]


def test_rows_that_the_run_trained_on_are_not_asked(tmp_path):
    with pytest.raises(UserError, match=r"\[validation\] enable = false.*--jsonl"):
        config_of(*QUICKSTART, "--validation.no-enable")
    path = tmp_path / "my set.jsonl"
    path.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    config = config_of(*QUICKSTART, "--validation.no-enable", "--jsonl", str(path))
    (held_out,) = config.validation.sets
    assert (held_out.name, held_out.own_rows, held_out.data.path) == ("my_set", True, str(path))
    assert held_out.samples_per_prompt == config.validation.samples_per_prompt


@pytest.mark.parametrize(
    ("asked", "refused"),
    [({"prompts": "6"}, True), ({"path": "b.jsonl", "prompts": "6"}, False), ({"prompts": "3"}, False), ({}, False)],
)
def test_more_rows_than_a_checkpoints_run_held_out_are_not_asked(asked, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, first in (("a", 0), ("b", 100)):
        rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(first, first + 12)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config_with(path="a.jsonl", prompts="4"):
        data = "--data.source", "jsonl", "--data.path", path, "--data.prompt_template", f"{prompts}: {{prompt}}"
        return config_of(*data, "--validation.enable", "--validation.prompts", prompts)

    Path("run_config.json").write_text(json.dumps(resolved(config_with())))
    config = config_with(**asked)
    tokenizer = load_tokenizer(str(TINY_QWEN3))
    check = partial(evaluate.check_not_trained_on, config, load_held_out(config, tokenizer), tmp_path / "hf", tokenizer)
    if not refused:
        return check()
    with pytest.raises(UserError, match=r"2 of the 6 held-out prompts .* trained on: .*\[validation\] prompts = 4"):
        check()


def test_an_unknown_flag_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--validation\.promts: did you mean --validation\.prompts"):
        config_of(*QUICKSTART, "--validation.promts", "3")


@pytest.mark.parametrize("end", ["stdin", "signal"])
def test_a_server_ends_with_its_workers_when_the_script_stops_it_or_is_killed(end):
    server = "sleep 1000 & (trap '' TERM; echo up; sleep 1000) & wait"  # a worker that ignores SIGTERM
    guard = evaluate.GUARD.replace(f"sleep {evaluate.STOP_S:g}", "sleep 0.3")
    command = ["bash", "-c", guard, "guard", "bash", "-c", server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, **EVALUATES) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            assert len(group_members(process.pid)) > 2
            if end == "stdin":  # as the kernel closes it when the script is killed
                process.stdin.close()
                process.wait(10)
            else:
                evaluate.stop_group(process)
            deadline = time.monotonic() + 10
            while group_members(process.pid):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_the_guard_ends_with_the_servers_status():
    with subprocess.Popen(["bash", "-c", evaluate.GUARD, "guard", "bash", "-c", "exit 7"], **EVALUATES) as process:
        assert process.wait(10) == 7
        evaluate.stop_group(process)


def test_results_never_overwrite_others(tmp_path):
    folders = [evaluate.new_folder(tmp_path / "a" / "step-3").name for _ in range(3)]
    assert folders == ["step-3", "step-3-2", "step-3-3"]
