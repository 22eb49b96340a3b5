"""The code of docs/from_python.md runs, and what the page promises is there."""

import importlib
import re

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import arguments, embedded_url, environment, steps

PAGE = (ROOT / "docs" / "from_python.md").read_text(encoding="utf-8")


def test_the_pages_loss_advantage_and_trainer_run(tmp_path):
    files = re.findall(r"`(\w+\.py)`[^`]*\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in files] == ["my_losses.py", "my_trainer.py"]
    for name, code in files:
        (tmp_path / name).write_text(code)
    [flags] = re.findall(r"--job\.config_file run\.toml (--grpo\..*?)```", PAGE, re.DOTALL)
    flags = flags.replace("\\", "").split()
    given = arguments(tmp_path / "run", {"--rollout.urls": embedded_url(), "--training.steps": "2"})
    path = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = Ranks(1, tmp_path / "my_trainer.py", *given, *flags, log=tmp_path / "log.txt", environment=path)
    assert run.wait(120) == 0, run.log[-4000:]
    lines = steps(tmp_path / "run")
    assert [0 <= line["reward/solved_fraction"] <= 1 for line in lines] == [True, True]
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert 'policy_loss = "my_losses:reinforce"' in (tmp_path / "run" / "config.toml").read_text()


def test_what_the_page_promises_is_there():
    names = re.findall(r"`((?:grpo_train|sft_train|torchtitan\.grpo)\.[\w.]+)`", PAGE.partition("## What stays")[2])
    assert len(names) > 15
    for name in names:
        module, _, rest = name.partition(".")
        while rest[0].islower() and "." in rest:  # modules first
            part, _, rest = rest.partition(".")
            module += f".{part}"
        found = importlib.import_module(module)
        for part in rest.split("."):
            found = getattr(found, part)
