"""`[rollout] replicas`: a run that starts its servers, and keeps them alive. What is killed leaves nothing behind.

test_engine_conformance.py has vLLM and SGLang under the same supervisor, killed and fed again.
"""

import os
import signal
import time
from pathlib import Path

from tests.helpers import TINY_QWEN3
from tests.helpers.ranks import Ranks
from tests.helpers.servers import server_pids
from tests.helpers.trainer_runs import attempt, endless, environment, processes_of, steps

REPLICAS: dict[str, str | None] = {
    "--rollout.replicas": "2",
    "--rollout.min_servers": "2",
    "--grpo.prompts_per_step": "16",
    "--checkpoint.no-enable": None,
}


def test_servers_that_die_come_back_and_die_with_the_trainer(tmp_path):
    with endless(tmp_path / "run", REPLICAS) as run:
        urls = (run.folder / "servers" / "urls.txt").read_text().split()
        first = steps(run.folder)[0]
        assert len(urls) == first["sync/servers_in_traffic"] == 2
        before = server_pids(run.folder)
        killed_at = time.monotonic()
        os.kill(before[0], signal.SIGKILL)
        run.wait_for("the end to be noticed", lambda: "ended with SIGKILL: starting it again in 1 s" in run.log)
        noticed_s = time.monotonic() - killed_at

        def is_back() -> bool:
            last = steps(run.folder)[-1]
            return last["sync/servers_restarted"] == 1 and last["sync/servers_in_traffic"] == 2

        # With min_servers = 2 the run would have ended if a server that returns did not count.
        run.wait_for("it to be back", is_back)
        print(f"noticed after {noticed_s:.1f} s, back after {time.monotonic() - killed_at:.1f} s")
        assert len(server_pids(run.folder)) == 2 and set(server_pids(run.folder)) - set(before)
        assert (run.folder / "servers" / "urls.txt").read_text().split() == urls
        lines = steps(run.folder)
        mismatches = [line.get("policy/mismatch_abs", 0.0) for line in lines]
        assert max(mismatches) < 1e-4, "no answer came from the restarted weights"

        run.process.kill()
        gone_at = time.monotonic()
        run.wait_until_gone(10)
        print(f"gone {time.monotonic() - gone_at:.1f} s after kill -9 of the trainer")


def test_a_colocated_server_reads_the_trainers_memory_and_comes_back(tmp_path):
    """A whole run over transport "ipc", whose server sleeps while the trainer trains: its weights are gone then.

    kill -9 of the server leaves it nothing, and it gets the newest weights."""
    flags = {"--rollout.colocate": None, "--grpo.prompts_per_step": "16", "--checkpoint.no-enable": None}
    flags |= {"--rollout.sleep_while_training": None}
    with endless(tmp_path / "run", flags) as run:
        (server,) = server_pids(run.folder)
        trainers_files = Path(f"/proc/{server}/maps").read_text().count("memfd:torchtitan-grpo")
        assert trainers_files, "it has mapped the trainer's buffers"
        os.kill(server, signal.SIGKILL)

        def is_back() -> bool:
            last = steps(run.folder)[-1]
            return last["sync/servers_restarted"] == 1 and last["sync/servers_in_traffic"] == 1

        run.wait_for("it to be back", is_back)
        lines = steps(run.folder)
        assert all(line.get("policy/mismatch_abs", 0.0) < 1e-4 for line in lines)
        woken = [name for line in lines for name in line if name.endswith("/wake_s")]
        assert len(woken) >= len(lines) - 1, "it slept in each step but the one that it died in"
        (server,) = server_pids(run.folder)
        assert Path(f"/proc/{server}/maps").read_text().count("memfd:torchtitan-grpo") == trainers_files
        run.process.kill()
        run.wait_until_gone(10)


def test_each_rank_has_a_colocated_server_and_all_sleep_in_step(tmp_path):
    """One is killed, and comes back: no step has a server that is awake, or that was not fed."""
    flags = {"--rollout.colocate": None, "--rollout.sleep_while_training": None, "--checkpoint.no-enable": None}
    flags |= {"--weight_sync.straggler_seconds": "60"}
    with endless(tmp_path / "run", flags, ranks=2) as run:
        servers = server_pids(run.folder)
        assert len(servers) == 2
        os.kill(servers[1], signal.SIGKILL)

        def is_back() -> bool:
            last = steps(run.folder)[-1]
            return last["sync/servers_restarted"] == 1 and last["sync/servers_in_traffic"] == 2

        run.wait_for("it to be back", is_back)
        known = len(steps(run.folder))
        run.wait_for("further steps", lambda: len(steps(run.folder)) >= known + 3)
        lines = steps(run.folder)
        assert all(line.get("policy/mismatch_abs", 0.0) < 1e-4 for line in lines)
        for line in lines[known:]:
            assert len([name for name in line if name.endswith("/wake_s")]) == line["sync/servers_in_traffic"] == 2
        run.process.kill()
        run.wait_until_gone(10)


def test_a_server_that_cannot_start_ends_the_run_with_its_log(tmp_path):
    flags = {"--rollout.replicas": "1", "--rollout.server_flags=--max-model-len,99999": None}
    status, said = attempt(tmp_path / "run", flags)
    assert status == 2 and "Traceback" not in said, said[-3000:]
    error = said[said.index("\nerror: server 0 (http://127.0.0.1:") :]
    assert "ended with exit status 1 before it served; its log " in error
    assert "--max-model-len 99999: the model's max_position_embeddings is" in error
    assert processes_of(tmp_path / "run") == []


def test_the_command_keeps_servers_for_a_trainer_elsewhere(tmp_path: Path):
    listed, log = tmp_path / "urls.txt", tmp_path / "log"
    words = [TINY_QWEN3, "--engine", "embedded", "--cpu", "--urls_file", listed, "--", "--max-model-len", "64"]
    command = Ranks(1, "torchtitan.grpo.servers", *words, log=log, environment=environment())
    try:
        command.wait_until("the server", lambda: "server 0 serves at" in command.log)
        status, said = attempt(tmp_path / "run", {"--rollout.urls_file": str(listed), "--training.steps": "1"})
        assert status == 0, said[-3000:]
        command.send_signal(signal.SIGINT)
        assert command.wait(15) == 0
        assert not listed.exists()
    finally:
        command.kill()
