"""A Hugging Face Hub on this machine: what the real `huggingface_hub` asks before and while it downloads."""

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

COMMIT, OLDER = "c" * 40, "a" * 40
"""Of the main branch, and of the tag `v1`."""


@dataclass
class Hub:
    """Its repositories, and what it was asked.

    Attributes:
        url: For HF_ENDPOINT.
        repos: Folders by `models/owner/name` or `datasets/owner/name`, all of whose revisions have the same files.
        revisions: Commit of each branch and tag.
        tokens: By repository that is gated: the token that may read its files.
        asked: Method, path and token of each request.
    """

    url: str = ""
    repos: dict[str, Path] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    tokens: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def downloads(self) -> list[str]:
        """The files that were read, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]

    def environment(self, cache: Path) -> dict[str, str]:
        """Of a process that uses this hub."""
        own = {"HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
        return own | {"HF_TOKEN": "", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_IMPLICIT_TOKEN": ""}

    def answer(self, method: str, url: str, token: str) -> tuple[int, dict[str, str], bytes]:
        path = urllib.parse.unquote(urllib.parse.urlsplit(url).path).strip("/")
        self.asked.append((method, path, token))
        kind, *parts = path.removeprefix("api/").split("/") if path.startswith(("api/", "datasets/")) else (
            "models", *path.split("/")
        )  # fmt: skip
        owner, name, verb, revision, *rest = [*parts, "", "", "", ""]
        repo, file = f"{kind}/{owner}/{name}", "/".join(part for part in rest if part)
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self.revisions.get(revision, revision)
        if commit not in self.revisions.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = self.repos[repo]
        files = sorted(found for found in folder.rglob("*") if found.is_file())
        if verb == "revision":
            siblings = [{"rfilename": str(found.relative_to(folder))} for found in files]
            return 200, {}, json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}).encode()
        if verb == "tree":
            entries = [
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size, "oid": _etag(f)}
                for f in files
            ]
            return 200, {}, json.dumps(entries).encode()
        if token != self.tokens.get(repo, token):
            return 401, {"X-Error-Code": "GatedRepo"}, b""
        if not (folder / file).is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_etag(folder / file)}"', "X-Repo-Commit": commit}, (folder / file).read_bytes()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub in threads of this process, on the loopback address."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            status, headers, body = hub.answer(self.command, self.path, token)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
