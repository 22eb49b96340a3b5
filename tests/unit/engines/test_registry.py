"""Every engine is one row, and the row is all that weight sync and rollouts need."""

import pkgutil
import subprocess
import sys
from typing import get_args

import pytest

from torchtitan.grpo.config.keys import keys
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.registry import ENGINES, make_server
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.rollouts.teachers.scorers import Scorer
from torchtitan.grpo.weight_sync.link import ServerLink


def test_the_configuration_lists_the_engines() -> None:
    for key in ("rollout.engine", "distill.engine"):
        assert set(get_args(keys()[key].type)) == set(ENGINES) == set(COMMANDS)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_has_all_parts_of_an_engine(engine: str) -> None:
    row = ENGINES[engine]
    assert row.command is COMMANDS[engine]
    assert issubclass(pkgutil.resolve_name(row.scorer), Scorer)
    links = [pkgutil.resolve_name(path) for path in (row.link, row.disk_link)]
    assert all(issubclass(link, ServerLink) for link in links)
    assert links[0] is not links[1]
    server = make_server(engine, "http://a:8000", None, 5.0, 7.0)
    assert server.engine is row
    assert isinstance(server.control, HttpControl)
    assert (server.control.timeout_s, server.client.request_timeout_s) == (5.0, 7.0)


def test_the_engines_need_neither_weight_sync_nor_its_wire() -> None:
    """Of weight_wire/ they know names, refusals and the table of transports, which move no bytes."""
    code = (
        "import sys, torchtitan.grpo.engines.registry\n"
        "names = [name.removeprefix('torchtitan.grpo.') for name in sys.modules]\n"
        "known = ('', '.model_identity', '.version_names', '.refusals', '.transports')\n"
        "known = [f'weight_wire{name}' for name in known]\n"
        "sys.exit(str([name for name in names if name.startswith('weight_') and name not in known] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "", done.stderr
