"""Addresses: of servers, as `[rollout] urls`, lines of `urls_file` and `[distill]` write them."""

import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan.grpo.config.keys import shortened
from torchtitan.grpo.errors import UserError

PORTS = range(20_000, 32_768)
"""Of servers that a run starts: below those that Linux gives to outgoing connections (net.ipv4.ip_local_port_range),
which would take them first."""


def is_of_another_node(url: str) -> bool:
    """Whether its address is known to be none of this machine's. Nobody is asked for a name."""
    try:
        host = urlsplit(url).hostname or ""
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return True
    return False


def url_problem(url: str) -> str | None:
    """Say what is wrong with a base address; None if nothing is. The text never holds a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as whoever asks for its address: "a..b" has an empty part
    except ValueError as error:
        return f"{error}; write http://host:port"
    if parts.username is not None or parts.password is not None:
        return f"a user or password for {parts.hostname}: use [rollout] api_key_env instead"
    plain = url.isprintable() and " " not in url and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
        return f"{shortened(repr(url))} is no base address: write http://host:port or https://host:port"
    if parts.path.rstrip("/").endswith("/v1"):  # an OpenAI client's: the health route is not below it
        return f"{shortened(repr(url))} is no base address: leave out /v1"
    return None


def teachers_by_source(entries: list[str]) -> dict[str, list[str]]:
    """`[distill] teacher_urls` by the source whose prompts they score; "" has those for all other prompts."""
    teachers: dict[str, list[str]] = {}
    for entry in entries:
        source, _, url = entry.rpartition("=")
        teachers.setdefault(source, []).append(url.rstrip("/"))
    return teachers


def read_urls(path: str | Path) -> list[str]:
    """The addresses in a text file, one `http://host:port` per line. Empty lines and # comments are ignored.

    Raises:
        UserError: The file cannot be read, lists no server or has a bad line. The message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"[rollout] urls_file: {path}: {error.strerror}") from error
    urls: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        url = line.partition("#")[0].strip().rstrip("/")
        if not url:
            continue
        problem = url_problem(url)
        if url in urls:
            problem = f"{url} is in line {urls[url]} already: one line per server"
        if problem:
            raise UserError(f"[rollout] urls_file: {path} line {number}: {problem}")
        urls[url] = number
    if not urls:
        raise UserError(f"[rollout] urls_file: {path} lists no server: write one base address a line, http://host:port")
    return list(urls)
