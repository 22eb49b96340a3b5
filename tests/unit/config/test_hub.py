"""Ids of the hub in place of folders, by the real client and a hub on this machine."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import close_session

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.hub import COMMIT, OLDER, Hub, hub_server
from torchtitan.grpo.commands import evaluate
from torchtitan.grpo.commands.console import all_commands
from torchtitan.grpo.config import hub as module
from torchtitan.grpo.config.frozen import freeze
from torchtitan.grpo.config.hub import HubId, fetched, hub_id, local_folder, model_name, named
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.data.rows import load_rows
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.folder_lock import only_run_in
from torchtitan.grpo.servers import __main__ as servers_command
from torchtitan.grpo.servers.plan import planned_servers

MODEL, KEY = "acme/tiny", "[model] hf_assets_path"
SECRET = "hf_secretsecretsecret"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with a model, `acme/tiny`, that this process uses with an empty cache."""
    folder = tmp_path / "published"
    shutil.copytree(TINY_QWEN3, folder)
    for name in ("model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "original/params.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    server.repos, server.tokens = {f"models/{MODEL}": folder}, {}
    server.asked.clear()
    use(server, tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)
    return server


def use(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client reads from its environment when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    close_session()


def refused(path: str = MODEL, kind: str = "model") -> str:
    with pytest.raises(UserError) as caught:
        local_folder(KEY, path, kind)
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B", "")),
        ("a/b@v1.0", HubId("a/b", "v1.0")),
        ("a/b@refs/pr/1", HubId("a/b", "refs/pr/1")),
        *(
            (text, None)
            for text in ("gpt2", "a/b/c", "/a/b", "./b", "../b", "a/", "a//b", "a/b@", "a b/c", "a/b--c", "")
        ),
    ],
)
def test_which_paths_are_ids(text, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_id(text) == found


def test_a_folder_wins(hub, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert local_folder(KEY, MODEL) == MODEL
    assert hub.asked == []


def test_what_is_needed_is_fetched_once(hub):
    folder = local_folder(KEY, MODEL)
    assert named(folder) == f"{MODEL}@{COMMIT}" and model_name(folder) == "tiny"
    top = {path.name for path in TINY_QWEN3.iterdir() if path.is_file()} | {"model.safetensors"}
    wanted = {name for name in top if name.endswith((".json", ".jinja", ".txt", ".safetensors"))}
    assert {path.name for path in Path(folder).iterdir()} == wanted
    assert sorted(hub.downloads()) == sorted(wanted)
    hub.asked.clear()
    assert local_folder(KEY, MODEL) == folder
    assert hub.downloads() == []


def test_a_cache_behind_a_link_is_known_again(hub, tmp_path, monkeypatch):
    """huggingface_hub 1.9 gives the folder by the path that HF_HUB_CACHE has."""

    def as_in_1_9(name: str, **words: Any) -> str:
        given = words.get("cache_dir") or constants.HF_HUB_CACHE
        folder = os.path.relpath(snapshot_download(name, **words), Path(given).resolve())
        return os.path.join(given, folder)

    (tmp_path / "link").symlink_to(tmp_path)
    use(hub, tmp_path / "link" / "cache", monkeypatch)
    monkeypatch.setattr("huggingface_hub.snapshot_download", as_in_1_9)
    assert named(local_folder(KEY, MODEL)) == f"{MODEL}@{COMMIT}"


def test_a_revision(hub):
    assert named(local_folder(KEY, f"{MODEL}@v1")) == f"{MODEL}@{OLDER}"
    assert f"has no revision v2 of {MODEL}: name a branch, tag or commit" in refused(f"{MODEL}@v2")


def test_other_paths_keep_their_name():
    assert named("models/Qwen3-0.6B") == "models/Qwen3-0.6B"
    assert named("/data/models--a--b/snapshots/" + COMMIT) == "/data/models--a--b/snapshots/" + COMMIT
    assert [model_name(path) for path in ("models/Qwen3@home", "/a/b/")] == ["Qwen3@home", "b"]


@pytest.mark.parametrize("without", ["HF_HUB_OFFLINE", "network"])
def test_without_a_network_the_cache_is_used(without, hub, monkeypatch):
    def disconnect() -> None:
        if without == "HF_HUB_OFFLINE":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        else:
            with socket.socket() as free:  # nobody listens on its port
                free.bind(("127.0.0.1", 0))
                monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        close_session()

    online = hub.url
    disconnect()
    said = refused()
    assert said.startswith(f'{KEY} = "{MODEL}": no such folder, and ') and f"`hf download {MODEL}`" in said
    assert ("unset HF_HUB_OFFLINE" if without == "HF_HUB_OFFLINE" else "is not reached (ConnectError") in said
    assert "--repo-type dataset" in refused(kind="dataset")

    monkeypatch.setattr(constants, "ENDPOINT", online)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()
    folder = local_folder(KEY, MODEL)
    disconnect()
    assert local_folder(KEY, MODEL) == local_folder(KEY, f"{MODEL}@{COMMIT}") == folder
    assert "v1" not in os.listdir(Path(folder).parents[1] / "refs")
    refused(f"{MODEL}@v1")


def test_a_gated_model(hub, monkeypatch):
    hub.tokens[f"models/{MODEL}"] = SECRET
    said = refused()
    assert "127.0.0.1 has it gated" in said and said.endswith("set HF_TOKEN to your token")
    monkeypatch.setenv("HF_TOKEN", SECRET[:-1] + "x")
    assert refused().endswith("set HF_TOKEN to that of an account that may read it")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.asked.clear()
    assert named(local_folder(KEY, MODEL)) == f"{MODEL}@{COMMIT}"
    assert {token for _, _, token in hub.asked} == {SECRET}


def test_no_such_model(hub):
    assert "127.0.0.1 has no such model, or a private one" in refused("acme/tinny")
    assert "has no such dataset" in refused(MODEL, "dataset")


def test_no_message_holds_a_token_or_a_signed_address(hub, monkeypatch):
    def failing(*_, **__):
        raise OSError(errno.ENOSPC, f"no space for https://cdn/x?signature=1 ({SECRET})")

    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    said = refused()
    assert "no space for 127.0.0.1 (...)" in said and "signature" not in said and "give a folder" in said


def test_a_hub_that_does_not_answer(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        assert "is not reached (ReadTimeout" in refused()


def test_a_configuration_with_ids(hub, tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    for split in ("train", "test"):
        (rows / f"{split}.jsonl").write_text(f'{{"question": "{split}", "answer": "1"}}\n')
    (rows / "big.bin").write_text("not read")
    hub.repos["datasets/acme/sums"] = rows
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'[model]\nhf_assets_path = "{MODEL}@v1"\nweights = "random"\n[data]\nsource = "hf"\npath = "acme/sums"\n'
        'validation_path = "acme/sums"\nvalidation_split = "test"\n'
        '[validation]\nenable = true\n[[validation.sets]]\nname = "own"\npath = "acme/sums@v1"\nsplit = "test"\n'
        '[[validation.sets]]\nname = "other"\nsource = "arithmetic"\n'
    )
    given = load_config(["--job.config_file", str(toml)])
    freeze(given)
    config = fetched(given)
    assert sorted({*hub.downloads()} & {"model.safetensors", "big.bin", "train.jsonl"}) == ["train.jsonl"]
    assert load_rows(config.data, False, 0).rows[0]["question"] == "train"
    assert load_rows(config.data, True, 0).rows[0]["question"] == "test"
    assert load_rows(config.validation.sets[0].data, False, 0).rows[0]["question"] == "test"

    values = resolved(config)
    assert values["model.hf_assets_path"] == f"{MODEL}@{OLDER}"
    assert values["data.path"] == values["data.validation_path"] == f"acme/sums@{COMMIT}"
    assert [table.get("path") for table in values["validation.sets"]] == [f"acme/sums@{OLDER}", None]
    assert resolved(given)["model.hf_assets_path"] == f"{MODEL}@v1"  # its tables and sections are its own

    hub.asked.clear()
    assert fetched(given, data=False).data.path == "acme/sums"
    assert not any("sums" in path for _, path, _ in hub.asked)


def test_ranks_of_a_node_fetch_once(hub, monkeypatch):
    """The others wait for the first one, and ask the hub nothing."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(module.os, "getppid", lambda: 1)
    with multiprocessing.get_context("fork").Pool(3) as ranks:
        folders = ranks.starmap(local_folder, [(KEY, MODEL)] * 3, chunksize=1)
    assert len(set(folders)) == 1 and len(hub.downloads()) == len(set(hub.downloads()))
    assert sum("/revision/" in path for _, path, _ in hub.asked) == 1

    hub.revisions["main"] = OLDER
    monkeypatch.setattr(module.os, "getppid", lambda: 2)  # another run
    assert named(local_folder(KEY, MODEL)) == f"{MODEL}@{OLDER}"
    hub.revisions["main"] = COMMIT


def test_a_wait_that_is_too_long(hub):
    cache = Path(constants.HF_HUB_CACHE)
    said = r"MODEL: waited 0 s \(\[comm\] init_timeout_seconds\) .* holds .*/x.lock: raise that key"
    second = module._alone(cache / "x.lock", "MODEL", 0)
    with module._alone(cache / "x.lock", "", 0), pytest.raises(UserError, match=said):
        second.__enter__()


def test_a_cache_that_cannot_be_written(hub, monkeypatch):
    folder = local_folder(KEY, MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    locks = Path(constants.HF_HUB_CACHE) / ".locks"
    shutil.rmtree(locks)
    locks.write_text("")  # root may write anywhere
    assert local_folder(KEY, MODEL) == folder


def test_servers_of_a_run_get_the_folder(hub):
    words = ["--model.hf_assets_path", MODEL, "--lora.enable", "--optimizer.lr", "1e-5"]
    config = fetched(load_config(words))
    (server,) = planned_servers(config, 0, 1)
    assert server.model == config.model.hf_assets_path and named(server.model) == f"{MODEL}@{COMMIT}"


def test_servers_for_a_trainer_elsewhere(hub, tmp_path, capsys, monkeypatch):
    """Its arguments are checked before it is fetched."""

    def refused(model: str, *words: str) -> str:
        try:
            status = servers_command.main([model, "--urls_file", str(tmp_path / "urls"), *words])
        except SystemExit as end:
            status = end.code
        assert status == 2
        return capsys.readouterr().err

    monkeypatch.setenv("SGLANG_PYTHON", "/no/python")
    assert "opens the server to other machines" in refused(MODEL, "--engine", "embedded", "--host", "10.9.9.9")
    assert "is what this command sets" in refused(MODEL, "--engine", "embedded", "--", "--port", "1")
    assert "/no/python does not run" in refused(MODEL, "--engine", "sglang")
    away = "--engine", "embedded", "--host", "10.9.9.9", "--expose"
    assert "no server can listen at 10.9.9.9" in refused(MODEL, *away)
    said = "/proc: logs cannot be written there: "
    assert said in refused(MODEL, "--engine", "embedded", "--log_folder", "/proc")
    monkeypatch.setattr(servers_command, "CLOSE_S", 0.0)
    said = f"another run uses {tmp_path}/urls (host "
    with only_run_in(tmp_path, file_name="other"), only_run_in(tmp_path, file_name="urls"):
        refusal = refused(MODEL, "--engine", "embedded")
    assert said in refusal and "stop it, or set another --urls_file" in refusal
    assert hub.asked == []
    said = refused("acme/tinny", "--engine", "embedded")
    assert 'MODEL = "acme/tinny": no such folder, and 127.0.0.1 has no such model' in said
    (hub.repos[f"models/{MODEL}"] / "config.json").unlink()
    assert f"{COMMIT} has no config.json: name a Hugging Face" in refused(MODEL, "--engine", "embedded")


def test_an_evaluation_that_is_refused_has_fetched_no_weights(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SGLANG_PYTHON", "/no/python")
    quickstart = ["--job.config_file", str(ROOT / "train_configs" / "quickstart.toml")]
    parser, _ = all_commands()

    def refused(*words: str, flags: Sequence[str] = quickstart) -> str:
        arguments = parser.parse_args(["evaluate", MODEL, "--out", str(tmp_path / "out"), *words])
        arguments.flags = list(flags)
        with contextlib.ExitStack() as resources, pytest.raises(UserError) as caught:
            evaluate.evaluate(arguments, resources)
        return str(caught.value)

    assert "unknown flag --no_such" in refused(flags=["--no_such", "1"])
    assert "'none.jsonl' is not a file" in refused("--jsonl", "none.jsonl")
    assert "/no/python does not run" in refused("--engine", "sglang")
    assert "config.json" in hub.downloads() and "model.safetensors" not in hub.downloads()
    monkeypatch.setattr(evaluate, "served", Mock(side_effect=UserError("all is checked")))
    assert refused() == "all is checked"
    assert "model.safetensors" in hub.downloads()
