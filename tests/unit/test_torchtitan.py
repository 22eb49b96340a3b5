"""CONTRIBUTING.md lists what is used of torchtitan, for whoever moves to a newer one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torchtitan
from tests.helpers import ROOT

CODE = [*ROOT.glob("*.py"), *ROOT.glob("torchtitan/grpo/**/*.py"), *ROOT.glob("scripts/**/*.py")]
ROW = re.compile(r"^\| `(torchtitan\.[\w.]+)` \| (.+?) \| .+ \|$", re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """Symbols of upstream's torchtitan that a file imports, at its top or inside a function. Of a module that it
    imports, what it takes out of it."""
    tree = ast.parse(path.read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(upstream(alias.name) for alias in node.names), f"{path}: use from ... import"
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names}
            for name in filter(upstream, names):
                if is_module(name):
                    modules[names[name]] = name
                else:
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"


def upstream(name: str) -> bool:
    return name.startswith("torchtitan.") and not f"{name}.".startswith("torchtitan.grpo.")


def is_module(name: str) -> bool:
    """By upstream's files: `find_spec` would import the packages above it."""
    paths = [Path(root).joinpath(*name.split(".")[1:]) for root in torchtitan.__path__]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


def test_what_is_used_of_torchtitan_is_listed_with_its_place() -> None:
    used: dict[str, set[str]] = {}
    for path in CODE:
        for name in imported(path):
            used.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    listed = dict(ROW.findall((ROOT / "CONTRIBUTING.md").read_text()))
    assert set(listed) == set(used)
    for name, paths in used.items():
        files = sorted(path.removeprefix("torchtitan/grpo/") for path in paths)
        assert listed[name] == (", ".join(f"`{file}`" for file in files) if len(files) <= 3 else "many files"), name


def test_the_list_is_of_imports_wherever_they_are(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from torchtitan.grpo import errors\ndef f():\n    from torchtitan.config import JobConfig as J\n"
        "    from torchtitan.distributed import utils as u\n    return u.dist_sum, errors.UserError\n"
    )
    assert list(imported(file)) == ["torchtitan.config.JobConfig", "torchtitan.distributed.utils.dist_sum"]
