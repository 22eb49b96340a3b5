"""What a resume says of a changed configuration."""

import json
from pathlib import Path

from torchtitan.grpo.checkpoint.run_config import changes, read_run_config
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import resolved

QUICKSTART = ["--job.config_file", "train_configs/quickstart.toml"]


def test_each_changed_key_is_named_with_both_values_and_the_one_that_holds():
    old = json.loads(json.dumps(resolved(load_config(QUICKSTART))))
    flags = ["--optimizer.lr", "1e-5", "--sft.steps", "0", "--debug.seed", "7", "--reward.weights", "2.0"]
    flags += ["--job.dump_folder", "elsewhere", "--checkpoint.resume", "auto"]  # of this start only
    assert changes(old, resolved(load_config(QUICKSTART + flags))) == [
        "[optimizer] lr = 1e-05, in the checkpoint 0.0008: the new value is used",
        "[debug] seed = 7, in the checkpoint 0: order of the data and random states come from the checkpoint, answers "
        "are sampled by the new seed",
        "[reward] weights = [2.0], in the checkpoint []: the new value is used",
        "[sft] steps = 0, in the checkpoint 600: the warm start is done",
    ]
    assert changes(old, resolved(load_config(QUICKSTART))) == []


def test_tables_are_compared_by_their_contents(tmp_path):
    def of(weight: int) -> dict:
        file = tmp_path / "run.toml"
        head = Path(QUICKSTART[1]).read_text()
        tables = f'[[data.mixture]]\nname = "a"\nweight = {weight}\n[[data.mixture]]\nname = "b"\n'
        tables += "source_args = { max = 9 }\n"
        file.write_text(head + tables)
        return resolved(load_config(["--job.config_file", str(file)]))

    assert changes(of(1), of(1)) == []
    assert [line.partition(" =")[0] for line in changes(of(1), of(2))] == ["[data] mixture"]


def test_keys_of_another_version_of_the_program_are_passed_over():
    assert changes({"grpo.gone": 1, "grpo.both": 1}, {"grpo.new": 2, "grpo.both": 1}) == []


def of_earlier_version(**more) -> dict:
    """What an earlier version saved for the quickstart."""
    run = resolved(load_config(QUICKSTART)) | {"data.chat_template_kwargs": ["enable_thinking=false"]}
    del run["data.source_args"]
    old = {"size": 10000, "tasks": [], "arithmetic_max": 39, "arithmetic_operators": ["+"]}
    old |= {"arithmetic_question": "{left}{operator}{right}="}
    return run | {f"data.{name}": value for name, value in old.items()} | more


def test_keys_of_an_earlier_version_are_read_as_todays(tmp_path):
    def read(**more) -> dict:
        (tmp_path / "run_config.json").write_text(json.dumps(of_earlier_version(**more)))
        return read_run_config(tmp_path)

    run = read()
    assert (run["data.source_args"], run["data.chat_template_kwargs"]) == ({"max": 39}, {"enable_thinking": False})
    assert not run.keys() - resolved(load_config(QUICKSTART)).keys()
    mixture = [
        {"name": "sums", "arithmetic_operators": ["+", "-"]},
        {"name": "gym", "source": "reasoning_gym", "tasks": ["chain_sum"], "size": 50},
        {"name": "same"},
    ]
    sets = [{"name": "sums", "arithmetic_max": 9}, {"name": "gym"}, {"name": "own", "source": "jsonl", "path": "x"}]
    run = read(**{"data.size": 70, "data.mixture": mixture, "validation.sets": sets})
    assert run["data.mixture"] == [
        {"name": "sums", "source_args": {"size": 70, "max": 39, "operators": ["+", "-"]}},
        {"name": "gym", "source": "reasoning_gym", "source_args": {"size": 50, "tasks": ["chain_sum"]}},
        {"name": "same"},  # [data]'s
    ]
    assert run["validation.sets"] == [
        {"name": "sums", "source_args": {"size": 70, "max": 9, "operators": ["+", "-"]}},
        {"name": "gym"},  # its source's
        {"name": "own", "source": "jsonl", "path": "x", "source_args": {}},
    ]


def test_a_checkpoint_from_before_some_of_these_keys_is_read_too(tmp_path):
    run = of_earlier_version()
    del run["data.arithmetic_question"], run["data.arithmetic_operators"]
    (tmp_path / "run_config.json").write_text(json.dumps(run))
    assert read_run_config(tmp_path)["data.source_args"] == {"max": 39}
