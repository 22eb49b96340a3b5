"""Which model and which configuration an evaluation has. tests/integration/test_train.py runs the command."""

import contextlib
import json
import re
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import ROOT, TINY_QWEN3
from torchtitan.grpo.config.job_config import Distill
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.data.load import load_held_out
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.evaluation.inputs import check_not_trained_on, evaluation_config
from torchtitan.grpo.model.hf_config import model_folder
from torchtitan.grpo.servers.plan import planned_servers

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
QUICKSTART = ["--job.config_file", str(ROOT / "train_configs" / "quickstart.toml")]
SHORT = ["--data.max_prompt_tokens", "64", "--rollout.max_answer_tokens", "64"]


def config_of(*flags, engine="embedded", urls=(), **more):
    return evaluation_config(list(flags), TINY_QWEN3, engine, list(urls), **more)


def test_a_model_is_a_checkpoint_with_an_export_or_a_hugging_face_folder(tmp_path):
    assert model_folder(TINY_QWEN3) == TINY_QWEN3
    (tmp_path / "step-3" / "hf").mkdir(parents=True)
    with pytest.raises(UserError, match=r"step-3 is no Hugging Face folder.*\[checkpoint\] export_dtype"):
        model_folder(tmp_path / "step-3")
    (tmp_path / "step-3" / "hf" / "config.json").write_text("{}")
    assert model_folder(tmp_path / "step-3") == tmp_path / "step-3" / "hf"


def test_a_checkpoint_brings_its_runs_configuration_and_its_results_stay_with_it(tmp_path):
    path, step = tmp_path / "run.toml", tmp_path / "run" / "checkpoint" / "step-3"
    of_set = '[[validation.sets]]\nname = "sums"\nsource = "arithmetic"\nsource_args = { max = 3 }\n'
    path.write_text((ROOT / "train_configs" / "quickstart.toml").read_text() + of_set)
    flags = ["--validation.prompts", "7", "--job.dump_folder", "outputs/other", "--rollout.max_answer_tokens", "5"]
    run = load_config(["--job.config_file", str(path), *flags])
    shutil.copytree(TINY_QWEN3, step / "hf")
    saved = resolved(run) | {"grpo.of_another_version": 3}
    saved |= {"data.chat_template": True, "data.chat_template_kwargs": {"enable_thinking": False}}
    (step / "run_config.json").write_text(json.dumps(saved))
    ask = partial(evaluation_config, folder=step / "hf", engine="embedded", urls=[])
    config = ask(["--rollout.max_answer_tokens", "9"])
    (of_set,) = config.validation.sets
    assert (of_set.name, of_set.prompts, of_set.max_answer_tokens, of_set.data.source_args) == (
        "sums",
        7,
        9,
        {"max": 3},
    )
    assert (config.model.hf_assets_path, config.job.dump_folder) == (str(step / "hf"), str(tmp_path / "run"))
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    other = ask(QUICKSTART)
    assert (other.validation.sets, other.validation.prompts) == ([], load_config(QUICKSTART).validation.prompts)
    assert other.job.dump_folder == str(tmp_path / "run")
    assert ask([*QUICKSTART, "--job.dump_folder", "here"]).job.dump_folder == "here"
    for checkpoints, expected in ((str(step.parent), step.parent), ("run/checkpoint", tmp_path)):
        (step / "run_config.json").write_text(json.dumps(saved | {"checkpoint.folder": checkpoints}))
        assert ask([]).job.dump_folder == str(expected)


def test_the_runs_servers_and_ranks_are_not_those_of_the_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # rank 0 also looks for the engine
    of_run = ["--parallelism.tensor_parallel_degree", "1", "--rollout.max_answer_tokens", "7"]
    path = tmp_path / "run.toml"
    file = ["--job.config_file", str(path)]
    text = (ROOT / "train_configs" / "quickstart.toml").read_text() + (
        "\n[parallelism]\ntensor_parallel_degree = 4\n[compile]\nenable = true\n[ray]\nenable = true\n"
    )
    path.write_text(text.replace("[rollout]", '[rollout]\nurls = ["http://a:1", "http://b:1"]\nmin_servers = 2'))
    config = config_of(*file, *of_run)
    assert config.model.hf_assets_path == str(TINY_QWEN3)
    assert (config.rollout.engine, config.rollout.urls, config.rollout.max_answer_tokens) == ("embedded", [], 7)
    path.write_text(
        text.replace(
            "[rollout]", '[rollout]\nreplicas = 2\ngpus_per_server = 2\nserver_flags = ["-x"]\nquantization = "fp8"'
        ).replace('engine = "embedded"', 'engine = "vllm"')
    )
    assert config_of(*file, *of_run).rollout.quantization == "none", "the embedded server has no FP8"
    config = config_of(*file, *of_run, engine="vllm")
    assert (config.rollout.replicas, config.rollout.gpus_per_server, config.rollout.server_flags) == (1, 1, [])
    asked = config_of(*file, "--rollout.replicas", "3", "--rollout.gpus-per-server", "2", engine="vllm")
    assert (asked.rollout.replicas, asked.rollout.gpus_per_server) == (3, 2)
    given = config_of(*file, engine="sglang", urls=["http://c:1", "http://d:1"])
    assert (given.rollout.urls, given.rollout.replicas) == (["http://c:1", "http://d:1"], 0)


OF_A_TRAINER = {
    "checkpoint": 'keep_best = "validation/majority_at_4"\ninterval = 40',
    "grpo": "overlong_buffer_tokens = 7",
    "rollout": 'api_key_env = "NO_SUCH_KEY"\nserve_key_env = "NO_SUCH_KEY"\nserve_port = PORT\nmemory_share = 0.4',
}
TEACHER = '[distill]\nteacher_urls = ["http://t:1"]\nmode = "add"\napi_key_env = "NO_SUCH_KEY"\n'


def test_what_only_a_trainer_reads_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    path, rows = tmp_path / "run.toml", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    text = (ROOT / "train_configs" / "quickstart.toml").read_text()
    for section, keys in OF_A_TRAINER.items():
        text = text.replace(f"[{section}]\n", f"[{section}]\n{keys}\n")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        path.write_text(text.replace("PORT", str(port)).replace("interval = 1000", "") + TEACHER)
        file = ["--job.config_file", str(path)]
        sampled = config_of(*file, "--validation.samples_per_prompt", "16", "--rollout.max_answer_tokens", "5")
        assert sampled.rollout.serve_port == 0 and sampled.distill == Distill() and sampled.checkpoint.keep_best == ""
        config_of(*file, jsonl=[rows])
        with pytest.raises(UserError, match=r"^\[rollout\] api_key_env .*: the variable is not set"):
            config_of(*file, urls=["http://a:1"])
        plays = ["--rollout.environment", "endpoint", "--data.chat_template"]
        with pytest.raises(UserError, match=rf"serve_port = {port}: .* cannot be opened(.|\n)*serve_key_env"):
            monkeypatch.setenv("RANK", "0")
            config_of(*file, *plays)


def test_a_checkpoint_of_supervised_training_needs_a_configuration(tmp_path):
    step = tmp_path / "run" / "checkpoint" / "step-3"
    shutil.copytree(TINY_QWEN3, step / "hf")
    (step / "run_config.json").write_text("{}")
    (step / "trainer.json").write_text(json.dumps({"step": 3, "conversations": {}}))
    with pytest.raises(UserError, match=r"step-3 is of sft_train.py, .* give one by --job.config_file"):
        evaluation_config([], step / "hf", "embedded", [])
    config = evaluation_config(QUICKSTART, step / "hf", "embedded", [])
    assert config.job.dump_folder == str(tmp_path / "run")
    sft = ["--job.config_file", str(ROOT / "train_configs" / "sft_qwen3_0.6b_2gpu.toml"), "--training.seq_len", "2048"]
    sft += SHORT
    assert evaluation_config(sft, step / "hf", "embedded", []).validation.prompts == 256


def test_its_servers_load_the_models_weights_and_have_the_first_gpus(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    config = config_of(*QUICKSTART, engine="vllm", server_flags="""--max-num-seqs 8 --more '{"a": 1, "b": 2}'""")
    (server,) = planned_servers(config, gpus=1, trainers_here=0, model=str(TINY_QWEN3))
    argv = server.argv(20000)
    assert server.gpus == (0,) and argv[argv.index("--model") + 1] == str(TINY_QWEN3) and "dummy" not in argv
    assert argv[-4:] == ["--max-num-seqs", "8", "--more", '{"a": 1, "b": 2}']


@pytest.mark.parametrize(
    ("words", "urls", "says"),
    [
        ("--gpu 1", (), "CUDA_VISIBLE_DEVICES"),
        ("--more '{", (), "--server-flags --more '{: a shell cannot read this"),
        ("--port 9000", (), r'server_flags has "--port"'),
        ("--max-num-seqs 8", ("http://a:1",), r"server_flags = .* is read with \[rollout\] replicas"),
    ],
)
def test_flags_that_its_servers_cannot_have_are_refused(words, urls, says, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match=says):
        config_of(*QUICKSTART, engine="vllm", urls=urls, server_flags=words)


def test_rows_that_the_run_trained_on_are_not_asked(tmp_path):
    with pytest.raises(UserError, match=r"\[validation\] enable = false.*--jsonl"):
        config_of(*QUICKSTART, "--validation.no-enable")
    path, *named_alike = (tmp_path / name for name in ("my set.jsonl", "\u6570\u5b66.jsonl", "\u7269\u7406.jsonl"))
    path.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    config = config_of(*QUICKSTART, "--validation.no-enable", jsonl=[path, *named_alike])
    held_out, *others = config.validation.sets
    assert [each.name for each in others] == ["__-2", "__-3"]
    alike = [tmp_path / name for name in ("a/x.jsonl", "b/x.jsonl", "x-1.jsonl")]
    for file in alike:
        file.parent.mkdir(exist_ok=True)
        shutil.copy(path, file)
    assert [each.name for each in config_of(*QUICKSTART, jsonl=alike[:2]).validation.sets] == ["x-1", "x-2"]
    assert [each.name for each in config_of(*QUICKSTART, jsonl=alike).validation.sets] == ["x-1", "x-2", "x-1-3"]
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
        return config_of(*data, *SHORT, "--validation.enable", "--validation.prompts", prompts)

    Path("run_config.json").write_text(json.dumps(resolved(config_with())))
    config = config_with(**asked)
    tokenizer = load_tokenizer(str(TINY_QWEN3))
    check = partial(check_not_trained_on, config, load_held_out(config, tokenizer), tmp_path / "hf", tokenizer)
    if not refused:
        return check()
    with pytest.raises(UserError, match=r"2 of the 6 held-out prompts .* trained on: .*\[validation\] prompts = 4"):
        check()


@pytest.mark.parametrize("jsonl", ["far.jsonl", ""])
def test_a_set_longer_than_the_model_is_refused_unless_its_positions_are_scaled(tmp_path, jsonl):
    raw = json.loads((TINY_QWEN3 / "config.json").read_text()) | {"max_position_embeddings": 512}
    says = '[[validation.sets]] "far" max_prompt_tokens +' if jsonl else "[data] max_prompt_tokens + [rollout]"
    says = re.escape(f"{says} max_answer_tokens = 9 + 504 is over this model's maximum of 512 tokens")
    refused = pytest.raises(UserError, match=says)
    flags = [*QUICKSTART, "--data.max_prompt_tokens", "9", "--rollout.max_answer_tokens", "504"]
    flags += ["--training.seq_len", "2048"]  # of a run: it says nothing of an evaluation
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    for urls, changed in (
        ([], {}),
        (["http://a:1"], {}),
        ([], {"max_position_embeddings": 513}),
        ([], {"rope_parameters": YARN}),
        ([], {"rope_parameters": dynamic}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | changed))
        with contextlib.nullcontext() if urls or changed else refused:
            config = evaluation_config(flags, tmp_path, "vllm", urls, jsonl=[Path(jsonl)] if jsonl else None)
            assert {server.max_model_len for server in planned_servers(config, 1, 0, str(tmp_path))} <= {513}


def test_an_unknown_flag_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--validation\.promts: did you mean --validation\.prompts"):
        config_of(*QUICKSTART, "--validation.promts", "3")
    with pytest.raises(UserError, match="evaluate has no --dry_run"):
        config_of(*QUICKSTART, "--dry-run", "h100")
    with pytest.raises(UserError, match=r"evaluate has no --rollout\.urls: give --url"):
        config_of(*QUICKSTART, "--rollout.urls=http://a:1")
