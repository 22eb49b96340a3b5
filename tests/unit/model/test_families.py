"""The table of families: light to import, complete, and the only place that names them."""

import ast
import subprocess
import sys

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from tests.helpers import ROOT
from torchtitan.grpo.model.families import FAMILIES, MODEL_TYPES


def test_the_table_imports_no_model():
    """The embedded server and the configuration read it."""
    code = "import sys, torchtitan.grpo.model.families; print([m for m in sys.modules if m.startswith(BAD)])"
    bad = ("torchtitan.models", "torchtitan.protocols", "transformers")
    answer = subprocess.run(
        [sys.executable, "-c", code.replace("BAD", repr(bad))], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_transformers_knows_each_architecture_by_the_same_names(architecture):
    config_cls = CONFIG_MAPPING[MODEL_TYPES[architecture]]
    assert MODEL_FOR_CAUSAL_LM_MAPPING[config_cls].__name__ == architecture


def test_no_other_file_names_a_family():
    """As a string of its own, that is: a message may give an example."""
    names = {*FAMILIES, *MODEL_TYPES, *MODEL_TYPES.values()}
    files = [ROOT / "grpo_train.py", *(ROOT / "torchtitan/grpo").rglob("*.py")]
    naming = {
        str(path.relative_to(ROOT))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    own = {f"torchtitan/grpo/model/{name}.py" for name in (*FAMILIES, "families")}
    own |= {"torchtitan/grpo/commands/smollm2.py"}  # it writes one model's folder
    assert "torchtitan/grpo/model/families.py" in naming
    assert naming <= own, naming - own
