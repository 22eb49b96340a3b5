"""Where the ranks of a weight-transfer group meet: a TCPStore of the trainer's, and rank 0's way into the group."""

import socket
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire.transport import PREFIX, Group, in_thread
from torchtitan.grpo.weight_wire.transports import ABANDONED

_STORE_S = 10.0
"""For the store's first answer, once its port takes connections. If it is closed in between, TCPStore waits so long."""
_WORD_S = 0.5
"""How long a rendezvous that is given up goes on telling so."""


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`. Sends nothing."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def host_store(address: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """A rendezvous store that listens on `address` only (a TCPStore has no password), and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def join_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The rendezvous store that `host_store` made.

    It listens before anybody is told its port. Nobody there means that who made it has gone or given up. TCPStore would
    go on trying for `timeout_s` and more, and a server that waits so answers nobody.

    Raises:
        RuntimeError: Nobody listens there, or the address cannot be reached.
        TimeoutError: The other end takes connections and does not answer, as a process that is frozen.
    """
    where = f"{address}:{port}, where the other end listened for this connection,"
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        raise RuntimeError(
            f"{where} cannot be reached ({error}): it has given the connection up, or the network is in the way"
        ) from error
    first = timedelta(seconds=min(timeout_s, _STORE_S))
    joining = in_thread(lambda: dist.TCPStore(address, port, None, False, first), "weight-transfer-store")
    try:
        store = joining.result(timeout_s)
    except TimeoutError:
        raise TimeoutError(f"{where} does not answer") from None
    finally:
        del joining  # its error's traceback has this frame
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class Rendezvous:
    """Where the ranks of one group meet, and rank 0's way into the group, in a thread.

    The thread has a connection to the store, but not the store itself. So `give_up` can end it, wherever it waits, by
    taking the store away.

    Args:
        address: This machine's, on the route to the other end. The store listens there, at `port`.
        backend, size, device, timeout_s, prefixes: As for rank 0's `Group`.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        device: torch.device,
        timeout_s: float,
        address: str,
        prefixes: Sequence[str] = (),
    ):
        store, self.port = host_store(address, timeout_s)
        self._store: dist.Store | None = store
        connection = join_store(address, self.port, timeout_s)
        self.joined = in_thread(
            lambda: Group(backend, connection, 0, size, device, timeout_s, address, prefixes), "weight-sync-join"
        )

    def group(self) -> "Group":
        """The group that rank 0 has joined. It keeps the store. Raises what joining raised."""
        group = self.joined.result()
        group.hosts, self._store = self._store, None
        return group

    def give_up(self, served: "Future[None]") -> None:
        """The group will not come about. Waits for half a second at most.

        Args:
            served: The call that has the other end join. Once that has found the store, the store's end ends it.
        """
        self.joined.add_done_callback(_abort_late)
        if self._store is not None:
            with suppress(RuntimeError):
                dist.PrefixStore(PREFIX, self._store).set(ABANDONED, "1")  # so that ranks which look end quietly
            both: list[Future[Any]] = [self.joined, served]
            futures.wait(both, timeout=_WORD_S)
            self._store = None


def _abort_late(joined: "Future[Group]") -> None:
    if joined.exception() is None:
        joined.result().abort()
