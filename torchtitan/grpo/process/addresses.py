"""Addresses of servers: how one is written, and who reaches it."""

import ipaddress

LOOPBACK = "127.0.0.1"


def http_url(host: str, port: int) -> str:
    """The base address of a host (a name, or an IPv4 or IPv6 address) and a port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name counts as beyond it, except `localhost`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
