"""HTTP connections whose replies have one deadline. urllib3's limits are for each read, and a server that sends a byte
now and then would hold a call without end."""

import http.client
import io
import socket
import time
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

_LARGEST = 1 << 30


def pool_of(url: str, connections: int = 1) -> urllib3.HTTPConnectionPool:
    """Connections to a server, kept for further calls. `urllib3.Timeout(total=...)` bounds a call's reply as a whole.
    No call is repeated."""
    pool = urllib3.connection_from_url(url, maxsize=connections, retries=False)
    pool.ConnectionCls = _Secure if isinstance(pool, urllib3.HTTPSConnectionPool) else _Plain
    return pool


class _Reads(io.RawIOBase):
    """Reads from a socket that all end within the timeout that it has now."""

    def __init__(self, raw: Any, sock: socket.socket):
        self._raw, self._sock = raw, sock
        self._deadline = time.monotonic() + (sock.gettimeout() or 0.0)  # urllib3 has set it to what is left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reply(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Reads(self.fp.detach(), sock))

    def begin(self) -> None:
        super().begin()
        if (self.length or 0) > _LARGEST:  # memory for all of it would be taken at once
            raise http.client.HTTPException(f"a reply of {self.length} bytes")


class _Plain(HTTPConnection):
    response_class = _Reply


class _Secure(HTTPSConnection):
    response_class = _Reply
