import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.grpo.weight_wire import version_names
from torchtitan.grpo.weight_wire.version_names import lives, other_run, own_run, version_name, version_of

OTHER = "gpu-01-4711-5f3a2c"


@pytest.mark.parametrize(
    ("name", "ours", "run"),
    [
        (version_name(7), 7, ""),
        (version_name(7, OTHER), None, OTHER),
        ("7", None, ""),
        ("default", None, ""),
        (f"-1@{OTHER}", None, ""),
        ("9" * 5000 + f"@{own_run()}", None, ""),
        ("", None, ""),
    ],
    ids=["ours", "theirs", "no run", "a name", "negative", "long", "empty"],
)
def test_a_version_belongs_to_one_run(name, ours, run):
    assert (version_of(name), other_run(name)) == (ours, run)


def test_the_process_of_a_run_is_known_on_its_host():
    child = subprocess.Popen(
        [sys.executable, "-c", f"{Path(version_names.__file__).read_text()}\nprint(own_run(), flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    run = child.stdout.readline().strip()
    assert run != own_run() and lives(run) and lives(own_run())
    assert version_names.describe_run(run).endswith(f"(process {child.pid} on {version_names._host()})")
    child.kill()
    child.stdout.read()
    while lives(run):  # until it is a zombie, at the latest
        pass
    child.wait()
    assert lives(run) is False
    assert lives(OTHER) is None
