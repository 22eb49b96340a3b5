"""Functions by import path: found beside the user, wherever the script is."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT, Unspeakable
from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process import import_path
from torchtitan.grpo.process.import_path import load_function
from torchtitan.grpo.rewards.runner import RewardRunner


def test_a_script_given_by_its_path_finds_the_users_modules(tmp_path):
    """Python puts the script's folder on the path, not the one that the user is in."""
    (tmp_path / "beside_me.py").write_text("def reward(answer, prompt):\n    return 1.0\n")
    code = "import sys; sys.path[:] = [p for p in sys.path if p]\n"
    code += "import torchtitan_overlay\nfrom torchtitan.grpo.process.import_path import load_function\n"
    code += "print(load_function('[reward] functions', 'beside_me:reward', 'answer', 'prompt')('', None))"
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{code}")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1.0\n", done.stderr


def test_reward_workers_find_them_too(tmp_path, monkeypatch):
    (tmp_path / "worker_finds_me.py").write_text("def reward(answer, prompt):\n    return float(answer)\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    sample = Sample(Prompt(0, [1], "q", "a", {}), [1], [0.0], [0], "stop", text="0.5")
    with RewardRunner(Reward(functions=["worker_finds_me:reward"], workers=1)) as runner:
        runner.score([sample])
    assert (sample.reward, sample.reward_failures) == (0.5, {})


def test_an_installed_module_comes_first(tmp_path, monkeypatch):
    """A file of the user's must not replace a library that is imported later."""
    (tmp_path / "tomllib.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "tomllib", raising=False)
    monkeypatch.chdir(tmp_path)
    assert load_function("[key] name", "tomllib:loads", "text")("a = 1") == {"a": 1}
    assert sys.path[-1] == os.getcwd() and import_path.os.getcwd() == str(tmp_path)


def test_a_module_that_fails_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"no module 'not_there' in this folder \({tmp_path}\)"):
        load_function("[reward] functions", "not_there.inside:score")
    (tmp_path / "wants.py").write_text("raise ModuleNotFoundError('run pip install wanted')\n")
    with pytest.raises(UserError, match="cannot import 'wants': ModuleNotFoundError: run pip install wanted"):
        load_function("[reward] functions", "wants:score")


@pytest.mark.parametrize("name", ["a_folder", "sys"])
def test_a_module_without_a_file_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=rf'^\[reward\] functions: module \'{name}\' has no function "score"$'):
        load_function("[reward] functions", f"{name}:score")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("sys.exit('please set MY_DATA')", "'please set MY_DATA'"),
        ("argparse.ArgumentParser().parse_args(['--x'])", "2"),
    ],
)
def test_a_module_that_ends_the_process_says_what_it_wanted(tmp_path, monkeypatch, text, code):
    (tmp_path / "exits.py").write_text(f"import argparse, sys\n{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = rf"^\[rollout\] environment: \"exits:f\": importing 'exits' ended .*sys.exit\({code}\).*move that under"
    with pytest.raises(UserError, match=said):
        load_function("[rollout] environment", "exits:f")


def test_a_signal_during_an_import_is_not_the_modules_fault(tmp_path):
    """Nor does the status change."""
    (tmp_path / "is_stopped.py").write_text("import os, time\nos.kill(os.getpid(), 15)\ntime.sleep(30)\n")
    code = "from torchtitan.grpo.process.stopping import run_and_exit, stop_in_time\n"
    code += "from torchtitan.grpo.process import import_path\n"
    code += "stop_in_time()\nrun_and_exit(lambda: import_path.import_function('key', 'is_stopped:f'))"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, timeout=60)
    assert done.returncode == 143


def test_an_error_that_cannot_say_what_it_is_is_named(tmp_path, monkeypatch):
    (tmp_path / "speechless.py").write_text("from tests.helpers import Unspeakable\nraise Unspeakable\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"cannot import 'speechless': Unspeakable: \("):
        load_function("[rollout] environment", "speechless:f")
    with pytest.raises(UserError, match=r"failed on a trial: Unspeakable: \("), import_path.trial("key", "name"):
        raise Unspeakable
