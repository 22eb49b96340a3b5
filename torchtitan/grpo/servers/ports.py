"""The ports of servers, each reserved against other supervisors of the machine."""

import errno
import socket
import sys

from torchtitan.grpo.config.urls import PORTS
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import http_url, try_to_bind


class ReservedPort:
    """A port for one server: the first that is free, so addresses, and with them names of metrics, seldom change.

    Another run may be starting servers too, which listen only after a while. So a socket without a file, whose name
    has the port, is held until `close` or the end of this process (Linux).

    Args:
        host: Address that the server will listen on.

    Raises:
        UserError: No port is free, or the host is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        for port in PORTS:
            if (reserved := _reserve(port)) is not None:
                self.port, self._reserved = port, reserved
                if self.is_free():
                    return
                reserved.close()
        raise UserError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {host}")

    @property
    def url(self) -> str:
        return http_url(self._host, self.port)

    def is_free(self) -> bool:
        """Whether a server could listen at it now."""
        try:
            try_to_bind(self._host, self.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            why = f"no server can listen at {self._host} ({error.strerror}): name an address of this machine"
            raise UserError(why) from error
        return True

    def close(self) -> None:
        """Let others have it."""
        self._reserved.close()


def _reserve(port: int) -> socket.socket | None:
    """Keep other supervisors of this machine from a port. None: one of them has it."""
    reserved = socket.socket(socket.AF_UNIX)
    if sys.platform.startswith("linux"):
        try:
            reserved.bind(f"\0torchtitan-grpo-server-{port}")
        except OSError:
            reserved.close()
            return None
    return reserved
