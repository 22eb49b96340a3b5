"""Transport "ipc": the group of one trainer and one server on one machine, and on CUDA on one GPU.

The server maps the trainer's buffers once (`shared_buffers`). A bucket is then a message that names its buffer:
the server loads straight from it and says when it has. Nothing is copied between the two, and nothing passes through
the host but messages. The memory of a bucket does not change until every rank of the server has released it.

Messages go over a Unix socket without a file. It reaches this machine only, passes the files of host memory, and ends
at both sides when a process does. Other users are turned away. Rank 0's, each one JSON object in a packet:

    {"open": 0, "bytes": 1048608}                 buffer 0 is the file that comes along; on CUDA `handle` has its handle
    {"bucket": 1, "buffer": 0, "bytes": 1048608}  the first bucket is in buffer 0
    {"sum": [1, 7, 28, 1048576, 12]}              of an all-reduce

The others':

    {"released": 1}                               how many buckets since the start
    {"row": [1, 7, 28, 1048576, 12]}              this rank's part of an all-reduce

Needs torch only, so it runs in any server.
"""

import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire.refusals import ELSEWHERE
from torchtitan.grpo.weight_wire.shared_buffers import allocate, export, is_shared, location, open_shared, same_location
from torchtitan.grpo.weight_wire.transports import ABANDONED

_LOCATION = "place"
_PACKET_BYTES = 1 << 16
_FDS_MAX = 4
_ACCEPT_S = 0.05
_DEVICE_LOOK_S = 0.001
_LOST = "the other end has closed the connection"


class Shared:
    """A work in this group: `done` once it is complete. It moves on when anyone looks at any of them."""

    def __init__(self, group: "SharedMemoryGroup") -> None:
        self._group = group
        self.done = False
        self.wire = torch.empty(0)
        """Of a bucket that was received: its bytes in the trainer's memory."""

    def is_completed(self) -> bool:
        if not self.done:
            self._group.advance()
        return self.done

    def wait(self) -> None:
        """It is complete: nothing is left to wait for."""


class _Sent(Shared):
    """Rank 0: a bucket. `filled` is the event after which the device has filled it."""

    def __init__(self, group: "SharedMemoryGroup", message: dict[str, Any], filled: torch.cuda.Event | None):
        super().__init__(group)
        self.message, self.filled, self.told = message, filled, False
        self.staged = False


class _Sum(Shared):
    def __init__(self, group: "SharedMemoryGroup", tensor: torch.Tensor):
        super().__init__(group)
        self.tensor = tensor


class _Peer:
    """Rank 0's connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.released = 0
        self.rows: deque[list[int]] = deque()


class SharedMemoryGroup:
    """As far as `transport.Group` uses it, a process group: `broadcast` and `allreduce`. Used by one thread at a time.

    Args:
        store: Where the ranks meet. All of them have met.
        device: Where buckets lie at this end.
        timeout_s: Longest wait for the other ranks to join.

    Raises:
        ValueError: This rank is not where rank 0 is. The message names both places.
        TimeoutError, RuntimeError, OSError: The others did not join.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float):
        self._rank, self._device = rank, device
        self._peers: list[_Peer] = []
        self._buffers: dict[int, int | torch.Tensor] = {}  # rank 0: address -> number; others: number -> memory
        self._staged: torch.Tensor | None = None
        self._sent: deque[_Sent] = deque()
        self._expected: deque[Shared] = deque()
        self._arrived: deque[torch.Tensor] = deque()
        self._sums: deque[_Sum] = deque()
        self._opened = self._count = 0
        deadline = time.monotonic() + timeout_s
        if rank == 0:
            self._accept(store, size - 1, deadline)
        else:
            self._join(store, deadline)

    def _accept(self, store: dist.Store, wanted: int, deadline: float) -> None:
        name = f"torchtitan-grpo-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen(wanted)
            listener.settimeout(_ACCEPT_S)
            store.set(_LOCATION, json.dumps(location(self._device) | {"socket": name}))
            while len(self._peers) < wanted:
                if store.check([ABANDONED]):
                    raise RuntimeError("the connection has been given up")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out waiting for the server to open the trainer's socket")
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    if _user(connection) != os.getuid():
                        connection.close()
                        continue
                    connection.setblocking(False)
                    self._peers.append(_Peer(connection))

    def _join(self, store: dist.Store, deadline: float) -> None:
        theirs, ours = json.loads(store.get(_LOCATION)), location(self._device)
        if not same_location(theirs, ours):
            raise ValueError(
                f"{ELSEWHERE}: it is on host {ours['host']}, device {ours['device']}, and the trainer on host "
                f"{theirs['host']}, device {theirs['device']}"
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(max(_ACCEPT_S, deadline - time.monotonic()))
            connection.connect(f"\0{theirs['socket']}")
        except OSError as error:  # one machine, but not one network namespace
            connection.close()
            raise ValueError(
                f"{ELSEWHERE}: the trainer's socket cannot be opened ({error}); are they in two containers?"
            ) from error
        connection.setblocking(False)
        self._peers = [_Peer(connection)]
        # A trainer that is killed while nothing is on its way would otherwise leave its memory mapped, and so taken.
        watch = threading.Thread(
            target=_forget_at_end, args=(os.dup(connection.fileno()), weakref.ref(self)), daemon=True
        )
        watch.name = "weight-transfer-watch"
        watch.start()

    def forget(self) -> None:
        """The other end is gone: drop its memory, except what is being loaded."""
        self._buffers.clear()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions | None = None) -> Shared:
        """Rank 0: lend the bucket to the others; the work is done when all have released it.

        A bucket that is not in shared memory is copied there first. Only one such can be on its way.
        """
        (wire,) = tensors
        staged = not is_shared(wire)
        if staged:
            wire = self._stage(wire)
        number = self._buffers.get(wire.data_ptr())
        if number is None:
            number = self._buffers[wire.data_ptr()] = self._opened
            self._opened += 1
            exported, fds = export(wire)
            self._tell({"open": number} | exported, fds)
        filled = None
        if self._device.type == "cuda":
            filled = torch.cuda.Event()
            filled.record(torch.cuda.current_stream(self._device))
        self._count += 1
        sent = _Sent(self, {"bucket": self._count, "buffer": number, "bytes": wire.numel()}, filled)
        sent.staged = staged
        self._sent.append(sent)
        self.advance()
        return sent

    def _stage(self, wire: torch.Tensor) -> torch.Tensor:
        if any(sent.staged for sent in self._sent):
            raise RuntimeError("one bucket from outside of shared memory at a time")
        staged = self._staged
        if staged is None or staged.numel() < wire.numel():
            if staged is not None:
                self._buffers.pop(staged.data_ptr())
            staged = self._staged = allocate(wire.numel(), self._device)
        return staged[: wire.numel()].copy_(wire)

    def receive(self) -> Shared:
        """The others: the next bucket. The work has its `wire`; `release` it."""
        work = Shared(self)
        self._expected.append(work)
        return work

    def release(self, work: Shared) -> None:
        """The others: the bucket is no longer needed, once the current stream has done what it has to do by now."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        work.wire = torch.empty(0)
        self._count += 1
        self._tell({"released": self._count})

    def allreduce(self, tensors: list[torch.Tensor]) -> Shared:
        """A sum over all ranks, in place, of a few integers."""
        (tensor,) = tensors
        work = _Sum(self, tensor)
        self._sums.append(work)
        if self._rank:
            self._tell({"row": tensor.flatten().tolist()})
        self.advance()
        return work

    def rest(self, seconds: float) -> None:
        """Wait until a message comes, or the device may have filled the next bucket; for `seconds` at most."""
        if any(not sent.told for sent in self._sent):
            # `poll` counts in whole milliseconds. Looks each 0.1 ms would take a seventh of the interpreter's time.
            time.sleep(min(seconds, _DEVICE_LOOK_S))
            return
        messages = select.poll()
        try:
            for peer in self._peers:
                messages.register(peer.connection, select.POLLIN)
            messages.poll(seconds * 1e3)
        except (OSError, ValueError) as error:  # closed by another thread
            raise RuntimeError(_LOST) from error

    def advance(self) -> None:
        """Take the messages that have come, and send those that are due."""
        for peer in self._peers:
            took = False
            while True:
                try:
                    read = self._read(peer.connection)
                except RuntimeError:
                    if took:  # messages before the end of a connection count; the next look raises
                        break
                    raise
                if read is None:
                    break
                self._take(peer, *read)
                took = True
        while self._expected and self._arrived:
            work = self._expected.popleft()
            work.wire, work.done = self._arrived.popleft(), True
        if self._rank:
            return
        for sent in self._sent:
            if not sent.told:
                if sent.filled is not None and not sent.filled.query():
                    break
                self._tell(sent.message)
                sent.told = True
        released = min(peer.released for peer in self._peers)
        while self._sent and self._sent[0].message["bucket"] <= released:
            self._sent.popleft().done = True
        while self._sums and all(peer.rows for peer in self._peers):
            work = self._sums.popleft()
            rows = [work.tensor.flatten().tolist(), *(peer.rows.popleft() for peer in self._peers)]
            total = [sum(column) for column in zip(*rows, strict=True)]
            self._finish_sum(work, total)
            self._tell({"sum": total})

    def _take(self, peer: _Peer, message: dict[str, Any], fds: list[int]) -> None:
        if "open" in message:
            self._buffers[message["open"]] = open_shared(message, fds, self._device)
        elif "bucket" in message:
            buffer = self._buffers.get(message["buffer"])
            if not isinstance(buffer, torch.Tensor):
                raise RuntimeError(_LOST)  # at this end, by another thread
            self._arrived.append(buffer[: message["bytes"]])
        elif "sum" in message:
            self._finish_sum(self._sums.popleft(), message["sum"])
        elif "released" in message:
            peer.released = message["released"]
        else:
            peer.rows.append(message["row"])

    def _finish_sum(self, work: _Sum, total: list[int]) -> None:
        tensor = work.tensor
        tensor.copy_(torch.tensor(total, dtype=tensor.dtype).view(tensor.shape))
        work.done = True

    @staticmethod
    def _read(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        try:
            packet, fds, _, _ = socket.recv_fds(connection, _PACKET_BYTES, _FDS_MAX)
        except BlockingIOError:
            return None
        except OSError as error:
            raise RuntimeError(_LOST) from error
        if not packet:
            raise RuntimeError(_LOST)
        return json.loads(packet), fds

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        packet = json.dumps(message).encode()
        for peer in self._peers:
            try:
                socket.send_fds(peer.connection, [packet], fds or [])
            except OSError as error:  # closed, or frozen for as long as it takes to fill a socket
                raise RuntimeError(f"{_LOST}, or does not read it: {error}") from error

    def abort(self) -> None:
        """Leave at once. What a load still reads stays mapped until it drops it."""
        for peer in self._peers:
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)  # the watch's copy of the socket ends too
            peer.connection.close()
        self.forget()
        self._expected.clear()
        self._arrived.clear()
        self._sent.clear()
        self._sums.clear()


def _forget_at_end(fd: int, group: "weakref.ref[SharedMemoryGroup]") -> None:
    """Wait, in a thread, until either end closes the connection."""
    end = select.poll()
    end.register(fd, 0)
    end.poll()
    os.close(fd)
    if (left := group()) is not None:
        left.forget()


def _user(connection: socket.socket) -> int:
    """Of the process at the other end."""
    size = struct.calcsize("3i")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
