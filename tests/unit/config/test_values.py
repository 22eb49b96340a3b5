"""A configuration as plain values, for a process that does not import torchtitan."""

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.helpers import ROOT
from torchtitan.grpo.config import job_config
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.values import from_values, to_values

RECIPES = [path.name for path in sorted((ROOT / "train_configs").glob("*.toml"))]
OWN = {
    field.name: type(getattr(job_config.JobConfig(), field.name))
    for field in fields(job_config.JobConfig)
    if type(getattr(job_config.JobConfig(), field.name)).__module__ == job_config.__name__
}
TABLES = """
[data]
source = "arithmetic"
chat_template = false
[[data.mixture]]
name = "short"
source_args = { max = 9 }
[[data.mixture]]
name = "long"
weight = 0.5
functions = ["exact_match"]
source_args = { max = 99 }
[reward]
functions = ["exact_match", "tests.helpers.rewards:varied"]
weights = [1.0, 0.1]
[rollout]
environment = "torchtitan.grpo.environments.calculator:rollout"
environment_args = { nested = { list = [1, 2.5, "é", [true]] } }
[validation]
prompts = 4
[[validation.sets]]
name = "short"
[[validation.sets]]
name = "other"
source = "arithmetic"
source_args = { max = 20 }
samples_per_prompt = 2
"""


def crossed(config: Any) -> Any:
    return from_values(msgspec.msgpack.decode(msgspec.msgpack.encode(to_values(config))))


def properties(section: Any) -> dict[str, Any]:
    return {name: getattr(section, name) for name, kept in vars(type(section)).items() if isinstance(kept, property)}


def plain(value: Any) -> Any:
    """Values without classes; a tuple is as good as a list."""
    if is_dataclass(value):
        value = asdict(value)
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def assert_crosses(config: Any) -> Any:
    there = crossed(config)
    assert vars(there).keys() == {field.name for field in fields(config)}
    for name, cls in OWN.items():
        here, other = getattr(config, name), getattr(there, name)
        if {field.name for field in fields(here)} == {field.name for field in fields(cls)}:
            assert type(other) is cls and plain(other) == plain(here), name
        assert properties(other) == properties(here), "one with torchtitan's keys too has no property"
    for field in fields(config):
        assert plain(getattr(there, field.name)) == plain(getattr(config, field.name)), field.name
    return there


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_crosses(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    job = "sft" if name.startswith("sft_") else "grpo"
    config = load_config(["--job.config_file", f"train_configs/{name}"], dry_run="", job=job)
    there = assert_crosses(config)
    assert there.async_grpo.max_age == config.async_grpo.max_age


def test_tables_of_sources_and_of_held_out_sets_are_objects_with_their_properties(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "tables.toml").write_text(TABLES)
    words = ["--model.hf_assets_path", "train_configs/tiny_qwen3"]
    config = load_config(["--job.config_file", str(tmp_path / "tables.toml"), *words])
    there = assert_crosses(config)
    for here, other in ((config.data.mixture, there.data.mixture), (config.validation.sets, there.validation.sets)):
        assert len(here) == 2 and [type(each) for each in other] == [type(each) for each in here]
        assert [properties(each) for each in other] == [properties(each) for each in here]
        assert all(isinstance(each.data, job_config.Data) for each in other)
    assert [source.data.source_args for source in there.data.mixture] == [{"max": 9}, {"max": 99}]
    assert [held_out.own_rows for held_out in there.validation.sets] == [False, True]
    assert there.rollout.environment_args == {"nested": {"list": [1, 2.5, "é", [True]]}}
