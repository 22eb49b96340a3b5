"""What a resume says of a changed configuration."""

import json
from pathlib import Path

from torchtitan.grpo.checkpoint.run_config import changes
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
