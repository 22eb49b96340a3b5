"""Addresses of servers: how one is written, who reaches it, whether a server can have it; and which key it may have."""

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
UNSENDABLE = "holds what no HTTP header can carry, such as a line break at its end: export the key alone"


def http_url(host: str, port: int) -> str:
    """The base address of a host (a name, or an IPv4 or IPv6 address) and a port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name counts as beyond it, except `localhost`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def try_to_bind(host: str, port: int) -> None:
    """Raises the OSError of a server that would listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        probe.bind((host, port))


def is_sendable(key: str) -> bool:
    """Whether a request can have this API key. If not, HTTP clients raise an error that shows it."""
    return key.isascii() and key.isprintable()
