"""The rooms of `torchtitan/grpo`: imports between them form no circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator

from tests.helpers import ROOT

PACKAGE = "torchtitan.grpo"
ROOMS = ROOT / "torchtitan" / "grpo"
ROLLOUTS = (
    "data.load",
    "engines.registry",
    "rollouts.stream",
    "rollouts.record",
    "rollouts.sampler_check",
    "rollouts.teachers.connect",
    "environments.load",
    "rewards.runner",
    "endpoint.server",
    "reporting.sample_log",
    "reporting.step_metrics",
    "policy.batch",
    "policy.packing",
)


def imported(source: str) -> Iterator[str]:
    """Modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports_between_rooms() -> dict[str, set[str]]:
    """Each folder, or file beside the folders, with those that it imports from."""
    edges: dict[str, set[str]] = {}
    for path in ROOMS.rglob("*.py"):
        room = path.relative_to(ROOMS).parts[0].removesuffix(".py")
        for name in imported(path.read_text()):
            if name.startswith(f"{PACKAGE}."):
                edges.setdefault(room, set()).add(name.removeprefix(f"{PACKAGE}.").split(".")[0])
    return {room: others - {room} for room, others in edges.items()}


def test_imports_between_rooms_form_no_circle():
    edges = imports_between_rooms()
    assert edges["weight_sync"] >= {"weight_wire", "engines"}  # the imports are found
    while leaves := [room for room, others in edges.items() if not others & edges.keys()]:
        for room in leaves:
            del edges[room]
    assert not edges, "a circle is among " + ", ".join(
        f"{room} -> {other}" for room, others in sorted(edges.items()) for other in sorted(others & edges.keys())
    )


def test_every_room_says_what_is_in_it():
    for init in ROOMS.rglob("__init__.py"):
        if init.parent == ROOMS:
            continue
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        missing = [p.name for p in init.parent.glob("*.py") if p.name != "__init__.py" and p.stem not in text]
        assert not missing, f"{init.relative_to(ROOT)} says nothing of {', '.join(missing)}"


def test_from_a_prompt_to_packed_rows_nothing_imports_torch():
    """So rollouts can have a process that starts at once. The tokenizers of transformers do without torch."""
    modules = [f"{PACKAGE}.{room}" for room in ROLLOUTS]
    code = f"import sys, importlib\nsys.modules['torch'] = None\nfor name in {modules}: importlib.import_module(name)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
