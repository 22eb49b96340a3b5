"""Ids of the Hugging Face Hub in place of folders: `owner/name`, or `owner/name@revision`, a branch, tag or commit.

`fetched` gives a configuration that names local folders instead, before anything reads them. A folder that exists is
never taken for an id. `huggingface_hub` downloads, caches and authenticates, and its environment variables hold:
HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeVar
from urllib.parse import quote, urlsplit

from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.job_config import Data, HeldOutSet, MixtureSource
from torchtitan.grpo.config.tables import PATH_KEYS
from torchtitan.grpo.errors import UserError, in_words

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)
Table = TypeVar("Table", MixtureSource, HeldOutSet)
Kind = Literal["model", "dataset"]

HUB_KEYS = ("model.hf_assets_path", "data.path", "data.validation_path")
"""The keys that may name an id."""
CONFIG = ("config.json",)
TEXTS = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")
"""Config, tokenizer and chat template."""
WEIGHTS = ("model*.safetensors",)
"""No copy of them in another format or layout (`original/`, `consolidated.safetensors`)."""
ROWS = ("*.md", *(f"*{end}*" for end in (".parquet", ".arrow", ".json", ".csv", ".tsv", ".txt")), "*.gz", "*.zst")
"""Of a dataset. README.md names its subsets."""
_ID = re.compile(r"([^/@]+/[^/@]+)(?:@([\w./-]+))?")
_SNAPSHOT = re.compile(r"(?:model|dataset)s--(.+?)--(.+)/snapshots/([0-9a-f]{40})")
_FRESH_S = 120.0
"""How long what a process has fetched holds for the others of its node. They start within seconds of each other."""
_WAIT_S = 1800.0
_POLL_S = 0.1


class HubId(NamedTuple):
    """`revision` is "" for the main branch."""

    name: str
    revision: str


def hub_id(path: str) -> HubId | None:
    """The id that a path is; None if it is a folder, or cannot be an id."""
    found = _ID.fullmatch(path)
    if found is None or os.path.exists(path):
        return None
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(found[1])
    except HFValidationError:
        return None
    return HubId(found[1], found[2] or "")


def named(path: str) -> str:
    """`Qwen/Qwen3-0.6B@COMMIT` for the folder where `local_folder` has put that. Others are returned as they are."""
    found = _SNAPSHOT.fullmatch(os.path.relpath(path, _cache())) if os.path.isabs(path) else None
    return f"{found[1]}/{found[2]}@{found[3]}" if found else path


def model_name(path: str) -> str:
    """`Qwen3-0.6B`, of a folder of that name or of its id."""
    name = named(path)
    return PurePath(path if name == path else name.partition("@")[0]).name


def fetched(config: JobConfig, data: bool = True, files: Sequence[str] = ()) -> JobConfig:
    """A copy that names local folders in `[model] hf_assets_path`, and in the paths of rows with `source = "hf"`.

    Other processes of this node that want the same wait for the one that fetches it, up to
    `[comm] init_timeout_seconds`.

    Args:
        data: This process reads rows, too.
        files: Patterns of the model's files. Empty: all that the run reads.

    Raises:
        UserError: The hub has no such model or dataset, or refuses it, or is not reached and the cache lacks it.
    """
    limit_s = float(config.comm.init_timeout_seconds)
    wanted = files or (*TEXTS, *(WEIGHTS if config.model.weights == "hf" else ()))
    model = local_folder("[model] hf_assets_path", config.model.hf_assets_path, "model", wanted, limit_s)
    values: dict[str, Any] = {"model.hf_assets_path": model}
    if data:
        values["data"] = replace(
            _rows("[data]", config.data, limit_s),
            mixture=[_table("[[data.mixture]]", each, limit_s) for each in config.data.mixture],
        )
        values["validation.sets"] = [_table("[[validation.sets]]", each, limit_s) for each in config.validation.sets]
    return changed(config, values)


def _table(title: str, table: Table, limit_s: float) -> Table:
    rows = _rows(f'{title} "{table.name}"', table.data, limit_s)
    given = {key: named(getattr(rows, key)) if key in PATH_KEYS else value for key, value in table.given.items()}
    return replace(table, data=rows, given=given)


def _rows(title: str, data: Data, limit_s: float) -> Data:
    if data.source != "hf":
        return data
    given = {key: path for key in PATH_KEYS if (path := getattr(data, key))}
    own: dict[str, Any] = {k: local_folder(f"{title} {k}", p, "dataset", ROWS, limit_s) for k, p in given.items()}
    return replace(data, **own)


def local_folder(
    key: str, path: str, kind: Kind = "model", files: Sequence[str] = (*TEXTS, *WEIGHTS), limit_s: float = _WAIT_S
) -> str:
    """The folder of an id, with its newest files if the hub is reached, else with those that were fetched before.

    Args:
        key: What named it, for messages.
        path: Is returned if it is no id.
        files: Patterns. Those of a model match files of its top folder only.
        limit_s: Longest wait for another process of this node, which fetches the same.

    Raises:
        UserError: See `fetched`.
    """
    wanted = hub_id(path)
    if wanted is None:
        return path
    lock = f"{kind}s--{wanted.name.replace('/', '--')}/grpo-{quote(wanted.revision, '')}-{len(files)}.lock"
    with _alone(_cache() / ".locks" / lock, f'{key} = "{path}"', limit_s) as file:
        folder = _said(file)
        if not folder:
            folder = _fetch(f'{key} = "{path}"', wanted, kind, files)
            _say(file, folder)
    logger.info(f"{key} is {named(folder)}, in {folder}")
    return folder


def _fetch(what: str, wanted: HubId, kind: Kind, files: Sequence[str]) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import get_session

    hooks = get_session().event_hooks["request"]
    if _bounded not in hooks:
        hooks.append(_bounded)
    try:
        return snapshot_download(
            wanted.name,
            repo_type=kind,
            revision=wanted.revision or None,
            allow_patterns=list(files),
            ignore_patterns=["*/*"] if kind == "model" else None,
            cache_dir=_cache(),  # not all versions resolve links, and `named` knows its folders by it
            etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception as error:  # the kinds of HTTP errors differ by version
        raise UserError(f"{what}: no such folder, and {_why(error, wanted, kind)}") from error


def _bounded(request: Any) -> None:
    """What the client asks before it downloads has no time limit of its own."""
    from huggingface_hub import constants

    own = {name: limit for name, limit in request.extensions.get("timeout", {}).items() if limit is not None}
    limits = dict.fromkeys(("connect", "read", "write", "pool"), constants.HF_HUB_ETAG_TIMEOUT)
    request.extensions["timeout"] = limits | own


def _why(error: Exception, wanted: HubId, kind: Kind) -> str:
    """Why something is not fetched, and what to change. Says nothing that may hold a token or a signed address."""
    from huggingface_hub import constants, errors, get_token

    host, place = urlsplit(constants.ENDPOINT).hostname, f"the cache {_cache()}"
    command = f"hf download {wanted.name}{' --repo-type dataset' if kind == 'dataset' else ''}"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    is_local = isinstance(error, errors.LocalEntryNotFoundError)
    said = re.sub(r"\w+://\S+", f"{host}", in_words((is_local and error.__cause__) or error))
    said = said.replace(get_token() or "\0", "...")[:300]
    if isinstance(error, errors.GatedRepoError):
        other = "that of an account that may read it" if get_token() else "your token"
        return f"{host} has it gated: accept its conditions there, and set HF_TOKEN to {other}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{host} has no such {kind}, or a private one: correct it, or set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{host} has no revision {wanted.revision or 'main'} of {wanted.name}: name a branch, tag or commit"
    if is_local and constants.HF_HUB_OFFLINE:
        return f"{place} does not have all of it: unset HF_HUB_OFFLINE, or run `{command}` where there is a network"
    if status == 401:
        return f"{host} does not know the token in HF_TOKEN: correct it, or unset it"
    if is_local:
        return (
            f"{host} is not reached ({said}), and {place} does not have all of it: check network, proxy and "
            f"HF_ENDPOINT, or run `{command}` where there is a network"
        )
    return f"fetching it from {host} into {place} failed ({said}): try again, or give a folder"


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


@contextlib.contextmanager
def _alone(lock: Path, what: str, limit_s: float) -> Iterator[TextIO | None]:
    """Hold the lock, whose file the processes of a node read and write. None in a cache that cannot be written.

    Raises:
        UserError: Another process has held it for longer than `limit_s`.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+", encoding="utf-8")
    except OSError:
        yield None
        return
    deadline = time.monotonic() + limit_s
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{what}: waited {limit_s:g} s ([comm] init_timeout_seconds) for another process, which "
                        f"fetches it and holds {lock}: raise that key"
                    ) from None
                time.sleep(_POLL_S)
            except OSError:  # a network file system without locks: huggingface_hub has others
                break
        yield file


def _launcher() -> str:
    """The same for the ranks of a run on a node, which one process has started; "" for a rank that is alone there."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    run = f"{socket.gethostname()}:{os.getppid()}:{os.environ.get('MASTER_PORT', '')}"
    return "" if ranks == "1" else run


def _said(file: TextIO | None) -> str:
    """The folder that another rank of this node has just fetched; "" if none has."""
    if file is None or not _launcher():
        return ""
    file.seek(0)
    try:
        said = json.loads(file.read() or "{}")
    except ValueError:  # the writer was killed
        return ""
    fresh = said.get("launcher") == _launcher() and time.time() - said["at"] < _FRESH_S
    return said["folder"] if fresh and os.path.isdir(said["folder"]) else ""


def _say(file: TextIO | None, folder: str) -> None:
    if file is not None:
        file.truncate(0)
        file.write(json.dumps({"launcher": _launcher(), "at": time.time(), "folder": folder}))
        file.flush()
