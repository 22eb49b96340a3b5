"""`torchtitan-grpo serve` with engines that print how they were called."""

import importlib
import json
import os
import socket
import subprocess
import sys

import pytest

from tests.helpers import COMMAND, ROOT, TINY_QWEN3
from torchtitan.grpo.commands import serve as command

MODEL = "Qwen/Qwen3-0.6B"
with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = str(free.getsockname()[1])  # at the default one, whoever runs the tests may have a server


def serve(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, own = [*COMMAND, "serve", *words, "--port", PORT], os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)


@pytest.fixture
def bare_python(tmp_path):
    """A Python that does not see what is installed here, this project among it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def pretend_vllm(bare_python, tmp_path):
    """Start `serve vllm` with a Python that sees a package called vllm; the server that it starts prints its call.

    What the command decides per version and device is tested here; two versions of the real one do not fit a test run.
    """

    def start(
        *arguments: str, entrypoints: str, plugin: bool = True, VLLM_API_KEY: str = ""
    ) -> subprocess.CompletedProcess[str]:
        server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True)
        for folder in (server.parent, server.parent.parent, server.parent.parent.parent):
            (folder / "__init__.py").touch()
        (tmp_path / "vllm" / "entrypoints" / "cli_args.py").write_text(entrypoints)
        names = ("VLLM_SERVER_DEV_MODE", "CUDA_VISIBLE_DEVICES", "VLLM_USE_FLASHINFER_SAMPLER")
        server.write_text(
            f"import json, os, sys\nprint(json.dumps([sys.argv[1:], [os.environ.get(n) for n in {names!r}]]))\n"
        )
        metadata = tmp_path / "plugin-0.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 0.1\n")
        if plugin:
            entry = "[vllm.general_plugins]\ntorchtitan_grpo = torchtitan.grpo.inside_vllm.plugin:register\n"
            (metadata / "entry_points.txt").write_text(entry)
        return serve(
            "vllm",
            *arguments,
            VLLM_PYTHON=str(bare_python),
            PYTHONPATH=str(tmp_path),
            VIRTUAL_ENV="",
            VLLM_API_KEY=VLLM_API_KEY,
        )

    return start


def test_serve_calls_a_new_vllm_on_cpu(pretend_vllm):
    result = pretend_vllm(MODEL, "--cpu", "--seed", "3", entrypoints="enable_scale_out = False")
    assert result.returncode == 0, result.stderr
    flags, (dev_mode, devices, flashinfer) = json.loads(result.stdout)
    assert flags[:6] == ["--model", MODEL, "--host", "127.0.0.1", "--port", PORT]
    assert json.loads(flags[flags.index("--weight-transfer-config") + 1]) == {"backend": "torchtitan_grpo"}
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert flags[flags.index("--dtype") + 1] == "float32"
    assert "--enable-scale-out" in flags and "--middleware" not in flags
    assert flags[-2:] == ["--seed", "3"]
    assert (dev_mode, devices, flashinfer) == ("1", "", "0")


def test_serve_calls_an_older_vllm_on_two_gpus(pretend_vllm):
    result = pretend_vllm(MODEL, "--gpu", "2,3", entrypoints="")
    assert result.returncode == 0, result.stderr
    flags, (_, devices, _) = json.loads(result.stdout)
    assert "--enable-scale-out" not in flags
    assert flags[flags.index("--tensor-parallel-size") + 1] == "2"
    assert flags[flags.index("--dtype") + 1] == "bfloat16"
    assert devices == "2,3"


def test_serve_guards_an_exposed_vllm_by_a_key_that_nobody_sees(pretend_vllm):
    result = pretend_vllm(MODEL, "--host=0.0.0.0", "--expose", entrypoints="", VLLM_API_KEY="hush")
    assert result.returncode == 0, result.stderr
    flags, _ = json.loads(result.stdout)
    module, _, name = flags[flags.index("--middleware") + 1].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert flags[flags.index("--host") + 1] == "0.0.0.0" and not {"--host=0.0.0.0", "--expose"} & set(flags)
    assert "hush" not in result.stdout + result.stderr and "warning" not in result.stderr


@pytest.mark.parametrize("engine", ["VLLM", "SGLANG"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], ["opens the server to other machines", "_API_KEY", "--expose"]),
        (["--host", "127.example.com"], ["opens the server to other machines"]),
        (["--host="], ["opens the server to other machines"]),
        (["--api-key", "hush"], ["ps", "_API_KEY"]),
        (["--api_key=hush"], ["ps", "_API_KEY"]),
        (["--host", "0.0.0.0", "--expose"], ["warning: --expose without"]),  # then stops at a Python without the engine
    ],
    ids=lambda value: " ".join(value),
)
def test_serve_opens_no_server_by_accident(engine, flags, says, bare_python):
    result = serve(engine.lower(), MODEL, *flags, **{f"{engine}_PYTHON": str(bare_python)})
    assert result.returncode == (1 if "--expose" in flags else 2)
    for words in says:
        assert words.replace("_API_KEY", f"{engine}_API_KEY") in result.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serve_refuses_an_address_that_no_server_can_have_before_an_engine_loads(engine, capsys):
    def refused(*words: str) -> str:
        assert command.main([engine, MODEL, *words]) == 2
        return capsys.readouterr().err

    for port in ("0", "-1", "65536"):
        assert f"--port {port} is no port: give one from 1 to 65535" in refused("--port", port)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"no server can listen at http://127.0.0.1:{port} (Address already in use): give a free --port"
        assert said in refused("--port", str(port))
    assert "http://10.9.9.9:8000 (Cannot assign requested address)" in refused("--host", "10.9.9.9", "--expose")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", ["nosuch", "./no/such", "/no/such", "../such", "~/such", "a/b/c", ""])
def test_serve_refuses_what_is_neither_a_folder_nor_a_name_of_the_hub(engine, model, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert command.main([engine, model]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {model!r} is no folder") and "Give a folder with config.json" in said


def test_serve_refuses_a_key_that_no_request_can_have(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    assert command.main(["vllm", MODEL]) == 2
    assert capsys.readouterr().err.startswith("error: VLLM_API_KEY holds what no HTTP header can carry, such as")


def test_serve_names_the_model_in_a_checkpoint(tmp_path, capsys):
    assert command.main(["vllm", str(tmp_path)]) == 2
    assert f"'{tmp_path}' has no config.json: give a folder with config.json and a tok" in capsys.readouterr().err
    assert command._parsed(["vllm", str(tmp_path), "--hf_config_path", str(TINY_QWEN3)])[0].model == str(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    assert command.main(["sglang", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: '{tmp_path}' has no config.json: give {tmp_path}/hf\n"


def test_serve_leaves_it_to_the_engine_what_it_can_fetch(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--gpt2"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").touch()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (tmp_path / "model.gguf").touch()
    of_hub = ("01-ai/Yi-6B", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "gpt2")
    for model in (*of_hub, str(TINY_QWEN3), "train_configs/tiny_qwen3/", f"{tmp_path}/model.gguf", "s3://bucket/model"):
        assert command._parsed(["vllm", model])[0].model == model


def test_serve_says_how_to_install_the_plugin(pretend_vllm):
    result = pretend_vllm(MODEL, entrypoints="", plugin=False)
    assert result.returncode == 1
    assert f"pip install --no-deps {ROOT}" in result.stderr
    assert result.stdout == ""


@pytest.fixture
def pretend_sglang(bare_python, tmp_path):
    """Start `serve sglang` with a Python that sees a package called sglang; the server that it starts prints its call:
    flags, what ps shows of them, environment."""

    def start(*arguments: str, installed: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        if installed:
            (tmp_path / "sglang").mkdir()
            (tmp_path / "sglang" / "__init__.py").touch()
            names = ("SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES", "SGLANG_API_KEY", "SGLANG_PYTHON")
            (tmp_path / "sglang" / "launch_server.py").write_text(
                "import json, os, sys\nassert __name__ == '__main__'\n"
                f"print(json.dumps([sys.argv[1:], sys.orig_argv, {{n: os.environ.get(n) for n in {names!r}}}]))\n"
            )
        environment = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_API_KEY": ""} | environment
        return serve(
            "sglang",
            *arguments,
            SGLANG_PYTHON=str(bare_python),
            PYTHONPATH=str(tmp_path),
            VIRTUAL_ENV="",
            **environment,
        )

    return start


def test_serve_calls_sglang_on_cpu(pretend_sglang):
    result = pretend_sglang(MODEL, "--cpu", "--max-total-tokens", "99", CUDA_VISIBLE_DEVICES="0")
    assert result.returncode == 0, result.stderr
    flags, _, environment = json.loads(result.stdout)
    assert flags[:6] == ["--model-path", MODEL, "--host", "127.0.0.1", "--port", PORT]
    assert flags[flags.index("--device") + 1] == "cpu"
    assert flags[flags.index("--dtype") + 1] == "float32"
    assert "--skip-tokenizer-init" in flags and "--api-key" not in flags
    assert flags[-2:] == ["--max-total-tokens", "99"]  # the last of two wins
    assert (environment["SGLANG_USE_CPU_ENGINE"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert environment["SGLANG_PYTHON"] is None


@pytest.mark.parametrize(("visible", "chosen"), [("", "1,2"), ("4,5,6", "5,6")])
def test_serve_calls_sglang_on_two_gpus(pretend_sglang, visible, chosen):
    result = pretend_sglang(MODEL, "--gpu", "1,2", CUDA_VISIBLE_DEVICES=visible)
    assert result.returncode == 0, result.stderr
    flags, _, environment = json.loads(result.stdout)
    assert flags[flags.index("--tp-size") + 1] == "2"
    assert flags[flags.index("--dtype") + 1] == "bfloat16"
    assert "--device" not in flags
    assert (environment["SGLANG_USE_CPU_ENGINE"], environment["CUDA_VISIBLE_DEVICES"]) == (None, chosen)


@pytest.mark.parametrize("gpus", ["-1", "0,0"])
def test_serve_refuses_what_is_no_list_of_gpus(pretend_sglang, gpus):
    result = pretend_sglang(MODEL, f"--gpu={gpus}", CUDA_VISIBLE_DEVICES="4,5,6")
    assert result.returncode == 2 and f"{gpus} is to name each device once, counted from 0" in result.stderr


def test_serve_refuses_a_gpu_that_is_not_visible(pretend_sglang):
    result = pretend_sglang(MODEL, "--gpu", "3", CUDA_VISIBLE_DEVICES="4,5,6")
    assert result.returncode == 2
    assert "CUDA_VISIBLE_DEVICES = 4,5,6 has 3 device(s)" in result.stderr


def test_serve_shows_nobody_sglangs_api_key(pretend_sglang):
    result = pretend_sglang(MODEL, "--cpu", "--seed", "3", SGLANG_API_KEY="hush")
    assert result.returncode == 0, result.stderr
    flags, shown, environment = json.loads(result.stdout)
    assert flags[:2] == ["--api-key", "hush"] and flags[-2:] == ["--seed", "3"]
    assert "hush" not in " ".join(shown) and "hush" not in result.stderr
    assert environment["SGLANG_API_KEY"] is None


def test_serve_says_how_to_install_sglang(pretend_sglang):
    result = pretend_sglang(MODEL, installed=False)
    assert result.returncode == 1
    assert "scripts/install_sglang_cpu.sh" in result.stderr
    assert result.stdout == ""
