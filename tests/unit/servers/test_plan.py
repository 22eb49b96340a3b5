"""Which commands `[rollout] replicas` stands for, and when the servers sleep."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.helpers import TINY_QWEN3
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.machine import check_machine, shares_gpu
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.server_commands.command import ALL_LINEAR, ServerCommandError, visible_devices
from torchtitan.grpo.process.server_commands.sglang import SglangCommand
from torchtitan.grpo.process.server_commands.vllm import VllmCommand
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.servers.__main__ import parse_arguments, planned
from torchtitan.grpo.servers.own import OwnServers
from torchtitan.grpo.servers.plan import plan_lines, planned_servers
from torchtitan.grpo.servers.state import ServerState
from torchtitan.grpo.servers.supervisor import Supervisor


def configured(*flags: str) -> JobConfig:
    """As for a dry run, which looks for no engine."""
    return load_config(["--model.hf_assets_path", str(TINY_QWEN3), *flags], "h100")


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_trainers_have_the_first_gpus_and_servers_the_next_ones(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = configured("--rollout.engine", "vllm", "--rollout.replicas", "2", "--rollout.gpus_per_server", "2")
    servers = planned_servers(config, gpus=8, trainers_here=3)
    assert [server.gpus for server in servers] == [(3, 4), (5, 6)]
    argv = servers[1].argv(20001)
    assert value(argv, "--tensor-parallel-size") == "2" and value(argv, "--port") == "20001"
    assert value(argv, "--load-format") == "dummy" and value(argv, "--host") == "127.0.0.1"
    assert int(value(argv, "--max-model-len")) == config.training.seq_len
    assert servers[1].environment()["CUDA_VISIBLE_DEVICES"] == "5,6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1")
    assert servers[0].environment()["CUDA_VISIBLE_DEVICES"] == "4,3"


def test_on_a_cpu_the_longest_request_is_one_that_the_model_can_take(tmp_path):
    of_configs = {'{"max_position_embeddings": 512}': "512", '{"max_position_embeddings": 9999}': "1024"}
    unclear = "{}", '{"max_position_embeddings": null}', "[]", "{"  # vLLM says what is wrong
    of_configs |= dict.fromkeys(unclear, "1024")
    for text, longest in of_configs.items():
        (tmp_path / "config.json").write_text(text)
        argv = VllmCommand(str(tmp_path), ()).argv(1)
        assert value(argv, "--max-model-len") == longest
    assert value(VllmCommand("org/name", ()).argv(1), "--max-model-len") == "1024"


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", "1024"),
        ("--max-num-seqs 512 --config-format hf", "1024"),
        ("--max-num-seqs=500 --cudagraph-metrics", "1008"),
        ("--max_num_seqs 600 --max-num-seqs 9", "32"),
        ("--max-num-seqs many", "1024"),  # vLLM says what is wrong with it
        *(
            (flag, None)
            for flag in ("--enforce-eager", "-O0", "-cc.mode=0", "--cudagraph-capture-sizes 8", "--config=a")
        ),
        *((flag, None) for flag in ("--compilation_config={}", "--max-cudagraph-capture-size 8", "--spec-model x")),
    ],
)
def test_vllm_on_a_gpu_has_graphs_for_larger_passes_unless_told_otherwise(flags, tokens):
    own = tuple(flags.split())
    for gpus in (None, (0,)):
        argv = VllmCommand("org/name", gpus, own).argv(1)
        ours = argv[: -len(own) or None]
        assert (
            value(ours, "--max-cudagraph-capture-size") if "--max-cudagraph-capture-size" in ours else None
        ) == tokens
    others = VllmCommand("m", ()), SglangCommand("m")
    assert all("--max-cudagraph-capture-size" not in other.argv(1) for other in others)


def test_vllm_on_a_gpu_has_a_process_for_its_worker():
    flag = "--distributed-executor-backend"
    for gpus in (None, (0,), (0, 1)):
        assert value(VllmCommand("m", gpus).argv(1), flag) == "mp"
    others = VllmCommand("m", ()), SglangCommand("m")
    assert all(flag not in other.argv(1) for other in others)


def test_servers_of_adapters_load_the_base_and_have_a_slot_that_fits():
    words = ["--lora.enable", "--optimizer.lr", "1e-4", "--rollout.engine", "vllm", "--rollout.replicas", "1"]
    for rank, slot in ((1, 1), (9, 16), (32, 32), (257, 320)):
        (server,) = planned_servers(configured(*words, "--lora.rank", str(rank)), 2, 1)
        argv = server.argv(1)
        assert "--enable-lora" in argv and value(argv, "--max-lora-rank") == str(slot)
        assert value(argv, "--model") == str(TINY_QWEN3) and "--load-format" not in argv


def test_servers_quantize_what_they_get(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # rank 0 also looks for the engine
    words = ["--rollout.engine", "vllm", "--rollout.replicas", "1", "--rollout.quantization", "fp8"]
    for gpus, how in ((0, "fp8_per_block"), (2, "fp8_per_tensor")):  # vLLM's kernels for CPUs take bfloat16
        argv = planned_servers(configured(*words), gpus, 1)[0].argv(1)
        assert (value(argv, "--quantization"), value(argv, "--dtype")) == (how, "bfloat16")
    assert value(argv, "--linear-backend") == "marlin", "weights alone are rounded"
    assert value(argv, "--moe-backend") == "marlin", "of experts, too"
    replays = planned_servers(configured(*words, "--grpo.routing_replay"), 2, 1)[0].argv(1)
    assert value(replays, "--moe-backend") == "triton" and replays.count("--moe-backend") == 1
    assert any(
        "quantization" in message and "on a CPU" in message for message in check_machine(configured(*words), 1, 0)
    )


def test_servers_tell_their_experts_for_routing_replay(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # rank 0 also looks for the engine
    for engine, flags in (
        ("vllm", "--enable-return-routed-experts --moe-backend triton"),
        ("sglang", "--enable-return-routed-experts"),
    ):
        words = ["--rollout.engine", engine, "--rollout.replicas", "1"]
        config = configured(*words, "--grpo.routing_replay")
        (_, line) = plan_lines(config, 2, 1)
        assert flags in line
        assert "--enable-return-routed-experts" not in plan_lines(configured(*words), 2, 1)[1]
        assert any("on a CPU" in message and "tells no experts" in message for message in check_machine(config, 1, 0))


def test_servers_tell_the_kept_tokens_of_top_k(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")  # rank 0 also looks for the engine
    words = ["--rollout.replicas", "1", "--rollout.top_k", "20", "--rollout.engine"]
    (on_cpu,) = [m for m in check_machine(configured(*words, "vllm"), 1, 0) if "top_k" in m]
    assert "on a CPU, vLLM does not tell which tokens it kept" in on_cpu
    assert not [m for m in check_machine(configured(*words, "sglang"), 1, 0) if "top_k" in m]
    (server,) = planned_servers(configured(*words, "vllm"), 2, 1)
    assert "--return-sampling-mask" in server.argv(1)
    (without,) = planned_servers(configured(*words[:2], "--rollout.engine", "vllm"), 2, 1)
    assert "--return-sampling-mask" not in without.argv(1)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text("enable_lora: bool = False")
    with pytest.raises(ServerCommandError, match=r"does not tell which tokens it kept.* install vLLM 0\.32 or newer"):
        server.argv(1, str(tmp_path))


def test_vllm_may_be_asked_for_as_many_likeliest_tokens_as_the_run_wants(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    words = ["--rollout.engine", "vllm", "--rollout.replicas", "1", "--grpo.score_centering"]
    assert "--max-logprobs 32" in plan_lines(configured(*words, "32"), 2, 1)[1]
    assert "--max-logprobs" not in plan_lines(configured(*words, "20"), 2, 1)[1], "its own limit"


def test_sglang_has_place_for_the_adapted_layers_and_all_versions_under_way(monkeypatch):
    words = ["--lora.enable", "--optimizer.lr", "1e-4", "--rollout.engine", "sglang", "--rollout.replicas", "1"]
    (server,) = planned_servers(configured(*words, "--lora.rank", "24"), 2, 1)
    argv = server.argv(1)
    assert value(argv, "--max-lora-rank") == "24" and "--enable-lora" in argv
    assert value(argv, "--max-loras-per-batch") == "2" and "--lora-backend" not in argv
    assert value(argv, "--model-path") == str(TINY_QWEN3) and "--load-format" not in argv
    place = argv.index("--lora-target-modules")
    assert argv[place + 1 : place + 8] == list(ALL_LINEAR) and argv[place + 8].startswith("--")
    words += ["--async_grpo.enabled", "--async_grpo.max_trajectory_age_steps", "3"]
    config = configured(*words, "--lora.target_modules", "q_proj,v_proj")
    (_, line) = plan_lines(config, 2, 1)
    assert "--enable-lora --max-lora-rank 16 --lora-target-modules q_proj v_proj --max-loras-per-batch 5" in line
    monkeypatch.setenv("RANK", "1")  # rank 0 also looks for the engine
    assert any("SGLang does not start with --enable-lora" in message for message in check_machine(config, 1, 0))
    assert OwnServers(config, torch.device("cuda"), 1).weight_sync.transport == "disk"


@pytest.mark.parametrize(
    ("flags", "gpus", "trainers", "devices"),
    [
        ("", 0, 1, ["cpu"]),
        ("", 2, 1, ["cuda:1"]),
        ("", 2, 2, ["cuda:0"]),
        ("--rollout.replicas 1", 1, 1, ["cuda:0"]),
        ("--weight_sync.transport ipc", 2, 1, ["cuda:0"]),
        ("--rollout.replicas 2", 4, 2, ["cuda:2", "cuda:3"]),
        ("--rollout.urls http://a:1", 2, 1, []),
    ],
)
def test_one_embedded_server_is_started_unasked_and_shares_rank_0s_gpu_if_no_other_is_free(
    flags, gpus, trainers, devices, monkeypatch
):
    config = configured(*flags.split())
    servers = planned_servers(config, gpus, trainers)
    assert [value(server.argv(1), "--device") for server in servers] == devices
    assert all("--memory-share" not in server.argv(1) for server in servers)
    shares = shares_gpu(config, gpus, trainers)
    assert shares == ("cuda:0" in devices)
    assert any("GPU 0, the trainer's" in line for line in plan_lines(config, gpus, trainers)) == shares
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    transport = OwnServers(config, torch.device("cuda" if gpus else "cpu"), trainers).weight_sync.transport
    # NCCL joins no two processes on one GPU.
    assert transport == ("ipc" if "ipc" in flags else "gloo" if shares else "auto")


def test_a_colocated_server_has_the_trainers_gpu_and_its_share():
    for engine, flag in (("vllm", "--gpu-memory-utilization"), ("embedded", "--memory-share")):
        config = configured("--rollout.engine", engine, "--rollout.colocate", "--rollout.memory_share", "0.4")
        (server,) = planned_servers(config, gpus=8, trainers_here=1)
        assert server.gpus == (0,) and value(server.argv(1), flag) == "0.4"
        (server,) = planned_servers(config, gpus=0, trainers_here=1)
        assert server.gpus == () and flag not in server.argv(1)


def test_several_trainers_have_a_server_each_which_other_gpus_reach_over_nccl(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = configured("--rollout.engine", "vllm", "--rollout.colocate")
    assert [server.gpus for server in planned_servers(config, gpus=2, trainers_here=2)] == [(0,), (1,)]
    own = OwnServers(config, torch.device("cuda"), 2)
    assert own.weight_sync.transport == "ipc"
    own._kept = Mock(spec=Supervisor, urls=["http://a:1", "http://a:2"])
    assert [own.on_another_gpu(url) for url in own._kept.urls] == [False, True]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"1 of this run's 2 are here: .* set \[rollout\] replicas"):
        configured("--rollout.engine", "vllm", "--rollout.colocate")


def test_only_vllm_on_a_gpu_is_told_at_its_start_that_it_will_sleep():
    for engine, gpus, told in (("vllm", 1, True), ("vllm", 0, False), ("embedded", 1, False)):
        config = configured("--rollout.engine", engine, "--rollout.colocate", "--rollout.sleep_while_training")
        (server,) = planned_servers(config, gpus=gpus, trainers_here=1)
        assert ("--enable-sleep-mode" in server.argv(1)) == told


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_key_of_the_run_is_the_servers_and_in_no_command_line(engine, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hush")
    monkeypatch.setenv(f"{engine.upper()}_API_KEY", "another")
    monkeypatch.setenv("RANK", "0")
    flags = ["--rollout.engine", engine, "--rollout.replicas", "1"]
    (server,) = planned_servers(configured(*flags, "--rollout.api_key_env", "MY_KEY"), 2, 1)
    assert server.environment()[f"{engine.upper()}_API_KEY"] == "hush"
    assert "hush" not in " ".join(server.argv(1)) and "RANK" not in server.environment()
    assert "--middleware" in server.argv(1) or engine == "sglang"
    (server,) = planned_servers(configured(*flags), 2, 1)
    assert f"{engine.upper()}_API_KEY" not in server.environment()


def test_flags_of_the_file_come_last_and_the_dry_run_shows_them():
    words = "--rollout.server_flags=--gpu-memory-utilization,0.5"
    config = configured("--rollout.engine", "vllm", "--rollout.replicas", "2", words)
    assert plan_lines(config, 2, 1)[2].startswith("  1, NO GPU is left on a node of 2: ")
    title, first, second = plan_lines(config, 3, 1)
    assert title.startswith("servers: 2, kept alive, with logs in ")
    assert first.startswith("  0, GPU 1: ") and first.endswith(" --load-format dummy --gpu-memory-utilization 0.5")
    assert second.startswith("  1, GPU 2: ") and "--skip-tokenizer-init" not in second
    assert plan_lines(configured("--rollout.urls", "http://a:1"), 2, 1) == []


@pytest.mark.parametrize(
    ("flags", "gpus", "says"),
    [
        (
            ["--rollout.replicas", "3"],
            3,
            "replicas = 3 needs 4 GPUs, and this machine has 3: 1 trainer process + 3",
        ),
        (["--rollout.replicas", "1", "--rollout.gpus_per_server", "2"], 2, "needs 3 GPUs"),
        (["--rollout.replicas", "1", "--rollout.gpus_per_server", "2"], 3, ""),
    ],
)
def test_too_few_gpus_are_refused_with_the_sum(flags, gpus, says, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # rank 0 also looks for the engine
    messages = [m for m in check_machine(configured("--rollout.engine", "vllm", *flags), 1, gpus) if "replicas" in m]
    assert (len(messages) == 1 and says in messages[0]) if says else not messages


def test_a_python_without_the_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho; echo False\n")
    python.chmod(0o755)
    flags = ["--model.hf_assets_path", str(TINY_QWEN3), "--rollout.engine", "sglang", "--rollout.replicas", "1"]
    monkeypatch.setenv("SGLANG_PYTHON", str(python))
    with pytest.raises(UserError, match=rf"\[rollout\] replicas = 1: {python} has no SGLang; set SGLANG"):
        load_config(flags)
    monkeypatch.setenv("SGLANG_PYTHON", "/no/python")
    with pytest.raises(UserError, match=r"\[rollout\] replicas = 1: /no/python does not run"):
        load_config(flags)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "10.0.0.7"], "opens the server to other machines"),
        (["--host", "0.0.0.0", "--expose"], "no address that a trainer can use"),
        (["--api_key_env", "NOT_SET"], "NOT_SET is not set"),
        (["--api_key_env", "OF_A_FILE"], "OF_A_FILE holds what no HTTP header can carry"),
        (["--replicas", "0"], "at least 1"),
        (["--urls_file", ""], "--urls_file . is a folder: name the file to write"),
        (["--start_timeout_seconds", "nan"], "--start_timeout_seconds must be over 0"),
        (["--engine", "embedded", "--gpus_per_server", "2"], "--gpus_per_server 2: embedded runs on one device"),
        (["--", "--host=0.0.0.0"], "--host after -- is what this command sets"),
        (["--", "--tensor_parallel_size", "2"], "--tensor-parallel-size after -- is what this command sets"),
    ],
)
def test_the_command_refuses(words, says, capsys, monkeypatch):
    monkeypatch.setenv("OF_A_FILE", "secret\n")
    with pytest.raises(SystemExit):
        parse_arguments([str(TINY_QWEN3), "--engine", "vllm", "--urls_file", "urls", *words])
    assert says in capsys.readouterr().err


def test_the_command_counts_gpus_from_the_first_and_passes_flags_on():
    words = [str(TINY_QWEN3), "--engine", "sglang", "--urls_file", "urls", "--replicas", "2", "--first_gpu", "4"]
    servers = planned(parse_arguments([*words, "--host", "10.0.0.7", "--expose", "--", "--random-seed", "3"]))
    assert [server.gpus for server in servers] == [(4,), (5,)]
    assert servers[0].argv(1)[-2:] == ["--random-seed", "3"] and value(servers[0].argv(1), "--host") == "10.0.0.7"


def test_devices_count_among_the_visible_ones():
    assert visible_devices([0, 2], {}) == "0,2"
    assert visible_devices([1, 2], {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}) == "GPU-b,GPU-c"


@pytest.mark.parametrize("case", ["busy", "always busy", "loading", "does not sleep", "down", "stopped"])
def test_no_step_begins_before_each_server_is_left_alone_and_asleep(case):
    config = configured("--rollout.colocate", "--rollout.sleep_while_training")
    config.rollout.start_timeout_seconds = 0.5 if case == "always busy" else 30.0
    own = OwnServers(config, torch.device("cpu"), 2)
    fleet = Fleet(["http://a:1", "http://b:2"], lambda url: Server(url, Mock(spec=HttpControl)))
    first, second = fleet.servers
    states = {server.url: ServerState(server.url, healthy=True) for server in fleet.servers}
    kept = Mock(spec=Supervisor, may_restart=threading.Event())
    type(kept).states = property(lambda _: list(states.values()))

    def end(url: str, why: str) -> None:
        assert not kept.may_restart.is_set()
        states[url] = replace(states[url], healthy=False, down=True, why=why)

    kept.end = end
    own._fleet, own._kept = fleet, kept
    first.at_rest, second.at_rest = True, case == "loading"
    if case == "does not sleep":
        second.control.sleep.side_effect = EngineError("no reply")
    elif case in ("down", "loading"):
        states[second.url] = replace(states[second.url], healthy=False, down=case == "down")

    def later() -> None:
        deadline = time.monotonic() + 10
        while not fleet.resting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        states[second.url] = replace(states[second.url], healthy=True)
        second.at_rest = True

    began = time.monotonic()
    if case not in ("always busy", "down"):
        threading.Timer(0.3, own.stop if case == "stopped" else later).start()
    with pytest.raises(StopRequested) if case == "stopped" else nullcontext():
        own.sleep()
    waited_s = time.monotonic() - began
    assert waited_s < 20 and (case == "down" or waited_s > 0.25)
    slept = [server.control.sleep.called for server in fleet.servers]
    assert slept == [case != "stopped", case in ("busy", "loading", "does not sleep")]
    why = {"always busy": "did not come to rest before the next step in time"}
    why["does not sleep"] = "does not sleep: no reply"
    assert states[second.url].why == why.get(case, "")
    if case != "stopped":
        assert not kept.may_restart.is_set()
        own.make_room(Mock())
        assert kept.may_restart.is_set() and not fleet.resting
