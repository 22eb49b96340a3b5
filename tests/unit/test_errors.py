import os
import subprocess
import sys

from tests.helpers import ROOT
from torchtitan.grpo.errors import UserError, did_you_mean, refuse

REFUSED = """
import os, pathlib, time
from torchtitan.grpo.errors import UserError, refuse
ready = pathlib.Path("rank 1 is here")
while os.environ["RANK"] == "0" and not ready.exists():
    time.sleep(0.01)
ready.touch()
try:
    raise UserError("[grpo] lr: unknown\\n  - and more")
except UserError as error:
    status = refuse(error)
os._exit(status)
"""


def test_did_you_mean():
    assert did_you_mean("lerning_rate", ["learning_rate", "steps"]) == ' (did you mean "learning_rate"?)'
    assert did_you_mean("zzz", ["learning_rate"]) == ""


def test_a_refused_run_ends_in_its_error_under_torchrun(tmp_path):
    (tmp_path / "refused.py").write_text(REFUSED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "refused.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line.strip() for line in lines[-3:-1]] == ["traceback : error: [grpo] lr: unknown", "- and more"]
    assert set(lines[-1]) == {"="}
    assert lines.count("error: [grpo] lr: unknown") == 1 and "on rank" not in done.stderr
    assert done.stderr.count("exitcode  : ") == 1, "torchrun lists no other rank"


def test_without_torchrun_the_error_is_the_last_line(capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert refuse(UserError("no such file")) == 2
    assert capsys.readouterr().err == "error: no such file\n"
    monkeypatch.setenv("RANK", "3")
    assert refuse(UserError("no such file")) == 2
    assert capsys.readouterr().err == "error on rank 3: no such file\n"
