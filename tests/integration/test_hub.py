"""Runs whose model and data are ids of a hub on this machine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import TINY_QWEN3
from tests.helpers.hub import COMMIT, OLDER, Hub, hub_server
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import arguments, embedded_url, environment, steps
from torchtitan.grpo.config.resolved import FILE
from torchtitan.grpo.errors import REFUSED

MODEL, ROWS = "acme/tiny", "acme/sums"
SFT = {
    "--job.config_file": "train_configs/sft_quickstart.toml",
    "--model.hf_assets_path": MODEL,
    "--data.source": "hf",
    "--data.source_args": "{}",
    "--data.path": ROWS,
    "--training.steps": 2,
    "--sft.batch_size": 8,
    "--sft.target_column": "answer",
    "--validation.no-enable": None,
    "--checkpoint.resume": "auto",
    "--metrics.no-enable_tensorboard": None,
}

SHORT = {"--training.steps": "1", "--sft.steps": "0", "--checkpoint.no-enable": None}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    rows = tmp_path / "published" / "rows"
    rows.mkdir(parents=True)
    lines = [json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) for i in range(24)]
    (rows / "train.jsonl").write_text("\n".join(lines))
    shutil.copytree(TINY_QWEN3, rows.parent / "model")
    with hub_server() as hub:
        hub.repos = {f"models/{MODEL}": rows.parent / "model", f"datasets/{ROWS}": rows}
        yield hub


def start(hub: Hub, folder: Path, ranks: int = 1, offline: bool = False, **flags: object) -> Ranks:
    given = SFT | {"--job.dump_folder": folder} | {f"--{name}": value for name, value in flags.items()}
    return run(
        hub,
        folder,
        ranks,
        "sft_train.py",
        [word for flag in given.items() for word in flag if word is not None],
        offline,
    )


def run(hub: Hub, folder: Path, ranks: int, script: str, words: list[object], offline: bool = False) -> Ranks:
    environ = environment() | hub.environment(folder.parent / "hf") | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    log = folder.parent / f"{folder.name}.log"
    return Ranks(ranks, "tests.helpers.with_hub", script, *words, log=log, environment=environ)


def test_ranks_fetch_once_and_the_record_names_the_commit(hub, tmp_path):
    folder = tmp_path / "run"
    start(hub, folder, ranks=2).check()
    read = hub.downloads()
    assert len(read) == len(set(read)) and {"config.json", "tokenizer.json", "train.jsonl"} <= set(read)
    config = (folder / FILE).read_text()
    assert f'hf_assets_path = "{MODEL}@{COMMIT}"' in config and f'path = "{ROWS}@{COMMIT}"' in config

    hub.revisions["main"] = OLDER
    resumed = start(hub, folder, **{"training.steps": 3})
    resumed.check()
    changed = f'[model] hf_assets_path = "{MODEL}@{OLDER}", in the checkpoint "{MODEL}@{COMMIT}"'
    assert f"{changed}: weights come from the checkpoint" in resumed.log
    assert [line["step"] for line in steps(folder)] == [1, 2, 3]


def test_rollouts_read_an_id(hub, tmp_path):
    flags = {name: value for name, value in SFT.items() if name.startswith(("--model", "--data"))}
    words = arguments(tmp_path / "run", SHORT | flags | {"--rollout.urls": embedded_url()})
    run(hub, tmp_path / "run", 1, "grpo_train.py", words).check()
    assert len(steps(tmp_path / "run")) == 1 and "train.jsonl" in hub.downloads()


def test_a_dry_run_fetches_the_config_alone(hub, tmp_path):
    dry = start(hub, tmp_path / "dry", dry_run="h100")
    dry.check()
    assert hub.downloads() == ["config.json"]
    assert f'hf_assets_path = "{MODEL}@{COMMIT}"' in dry.log and f'path = "{ROWS}"' in dry.log
    hub.asked.clear()
    text = tmp_path / "dry.toml"  # what it printed makes the same run, without a network too
    text.write_text(dry.log[dry.log.index("[job]") :])
    again = start(hub, tmp_path / "again", offline=True, dry_run="h100", **{"job.config_file": text})
    again.check()
    assert hub.asked == []
    no_tokenizer = start(hub, tmp_path / "run", offline=True)
    assert no_tokenizer.wait(120) == REFUSED, no_tokenizer.log
    assert f'[model] hf_assets_path = "{MODEL}": no such folder, and the cache' in no_tokenizer.log
    assert "unset HF_HUB_OFFLINE" in no_tokenizer.log


def test_ranks_refuse_what_the_hub_lacks(hub, tmp_path):
    refused = start(hub, tmp_path / "run", ranks=2, **{"model.hf_assets_path": "acme/tinny"})
    assert refused.wait(120) == REFUSED, refused.log
    said = ': [model] hf_assets_path = "acme/tinny": no such folder, and 127.0.0.1 has no such model'
    assert said in refused.log and "Traceback" not in refused.log
    assert not (tmp_path / "run").exists()
