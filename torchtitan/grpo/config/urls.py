"""The base address of a server, as `[rollout] urls` and the lines of `[rollout] urls_file` write it."""

from urllib.parse import urlsplit


def url_problem(url: str) -> str | None:
    """Say what is wrong with a base address; None if nothing is. The text never holds a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{error}; write http://host:port"
    if parts.username is not None or parts.password is not None:
        return f"a user or password for {parts.hostname}: use [rollout] api_key_env instead"
    plain = url.isprintable() and " " not in url and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
        return f"{url!r} is no base address: write http://host:port or https://host:port"
    return None
