"""scripts/slurm_grpo.sbatch where there is no Slurm: its commands are stand-ins that run everything on this machine."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.trainer_runs import processes_of

SBATCH = ROOT / "scripts" / "slurm_grpo.sbatch"
LAUNCH, SERVERS = "torchtitan.grpo.process.launch", "torchtitan.grpo.servers"
STAND_INS = {
    "srun": """
        number=1
        while [[ $1 == -* ]]; do
            case $1 in --nodes) number=$2; shift 2 ;; --*=*) shift ;; *) shift 2 ;; esac
        done
        pids=() status=0
        trap 'kill -TERM $(jobs -p)' TERM # before any task can tell the test that it runs
        for ((task = 0; task < number; task++)); do setsid "$@" & pids+=($!); done
        for pid in "${pids[@]}"; do
            while kill -0 "$pid" 2>/dev/null; do code=0; wait "$pid" || code=$?; done
            [ "$code" -gt "$status" ] && status=$code
        done
        exit $status""",
    "scontrol": """
        if [ "$2" = hostnames ]; then printf 'gpu%s\\n' 1 2 3 4; exit; fi
        if [ "$1" = show ]; then echo "JobState=$STATE"; exit; fi
        echo "scontrol $*" >> "$RECORD" """,
    "getent": "echo 10.0.0.${2#gpu} STREAM $2",
    "python": """
        trap 'rm -f "${list:-}"; exit 75' TERM
        echo "$2 $* key of ${#VLLM_API_KEY}" >> "$RECORD"
        if [ "$2" = torchtitan.grpo.servers ]; then
            [ -z "${REFUSED:-}" ] || exit 2
            while [ "$1" != --host ]; do [ "$1" != --urls_file ] || list=$2; shift; done
            echo "http://$2:20000" > "$list"
            unset ENDS
        fi
        [ -z "${ENDS:-}" ] || exit "$ENDS"
        while :; do sleep 0.05; done""",
}


class Job:
    """The script as Slurm runs it, with trainers and servers that only wait. Their command lines name the folder."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.record = folder, folder / "record"
        for name, text in STAND_INS.items():
            (folder / name).write_text("#!/usr/bin/env bash\n" + text)
            (folder / name).chmod(0o755)
        slurm = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "gpu[1-4]",
            "SLURM_GPUS_ON_NODE": "2",
            "STATE": "RUNNING",
        }
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(self.record), "MODEL": str(folder / "model")}
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                ["bash", SBATCH, str(folder / "run.toml"), "--training.steps", "5"],
                cwd=folder,
                env=os.environ | slurm | own | variables,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def lines(self, word: str) -> list[str]:
        text = self.record.read_text() if self.record.exists() else ""
        return sorted(line for line in text.splitlines() if line.startswith(word))

    def wait_for(self, word: str, number: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.lines(word)) < number:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def end(self) -> int:
        status = self.process.wait(20)
        deadline = time.monotonic() + 5
        while left := processes_of(self.folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        return status


@pytest.mark.parametrize(("state", "status"), [("RUNNING", 0), ("CANCELLED", 75)])
def test_a_job_whose_time_is_up_saves_and_is_queued_again_unless_it_was_cancelled(state, status, tmp_path):
    job = Job(tmp_path, STATE=state, SERVER_NODES="2", SERVER_FLAGS="--max-model-len 4096", INTERFACE="")
    job.wait_for(LAUNCH, 2)
    (trainer,) = set(job.lines(LAUNCH))
    assert "--nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint gpu1:14711 --rdzv-id 4711.0" in trainer
    lists = tmp_path / "slurm-4711"
    assert f"--rollout.engine vllm --rollout.urls_file {lists}/urls --rollout.api_key_env VLLM_API_KEY" in trainer
    assert "--training.steps 5" in trainer and "--checkpoint.resume auto" in trainer
    third, fourth = job.lines(SERVERS)
    assert f"servers {tmp_path}/model --engine vllm --replicas 2 --gpus_per_server 1 " in third
    assert f"--urls_file {lists}/gpu3.urls --log_folder {lists}/gpu3 " in third
    assert third.endswith("--host 10.0.0.3 --expose --api_key_env VLLM_API_KEY -- --max-model-len 4096 key of 32")
    assert "--host 10.0.0.4 " in fourth
    assert (lists / "urls").read_text() == "http://10.0.0.3:20000\nhttp://10.0.0.4:20000\n"
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == status, (tmp_path / "log").read_text()
    assert job.lines("scontrol") == ["scontrol requeue 4711"] * (state == "RUNNING")


def test_a_failed_run_ends_the_job_and_its_servers(tmp_path):
    job = Job(tmp_path, ENDS="1")
    assert job.end() == 1 and not job.lines("scontrol")


def test_servers_that_cannot_be_started_end_the_job(tmp_path):
    job = Job(tmp_path, REFUSED="1")
    assert job.end() == 2 and "gpu4 starts no servers" in (tmp_path / "log").read_text()


def test_a_job_without_a_node_to_train_on_is_refused(tmp_path):
    job = Job(tmp_path, SERVER_NODES="4")
    assert job.end() == 2 and "none is left to train" in (tmp_path / "log").read_text()
