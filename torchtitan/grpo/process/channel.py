"""Messages between two processes of one machine, in order, over a pair of sockets: MessagePack, no pickle.

Large bytes do not pass through the socket. They are files without a name, whose descriptors do: the other process maps
them, and when both have let go of them they are gone, however either ended.
"""

import contextlib
import logging
import mmap
import os
import queue
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.errors import PlainError

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview
Message = list[Any]
_Unsent = Callable[[], Message | None] | tuple[bytes, list[int]]
"""What makes a message, or its bytes and the descriptors of its files."""
_HEADER = struct.Struct("<QB")
_FILES_MAX = 8


class ChannelClosed(ConnectionError):
    """The other process has ended, or this one has closed the channel."""


class Channel:
    """One end. Any thread may send, and never waits for the other process: a thread writes. One thread receives.

    What cannot be sent any more is dropped: `receive` says that the other end is gone.
    """

    def __init__(self, end: socket.socket, name: str) -> None:
        self._socket = end
        self._unsent: queue.SimpleQueue[_Unsent | None] = queue.SimpleQueue()
        self._is_open, self._is_closing = True, False
        self._lock = threading.Lock()  # of the queue's end, which is None
        self._writer = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._writer.start()

    def send(self, message: Message, *files: Sequence[Buffer]) -> None:
        """Send a message, and beside it files, each of its parts end to end.

        Raises:
            TypeError, ValueError, OverflowError: MessagePack has no such value, or the files are more than 8.
            OSError: There is no memory for the files.
        """
        if len(files) > _FILES_MAX:
            raise ValueError(f"a message has at most {_FILES_MAX} files, and this one {len(files)}")
        if not self._is_open:
            return
        payload = encoded(message)
        descriptors: list[int] = []
        try:
            for parts in files:
                descriptors.append(_file(parts))
        except BaseException:
            _close_all(descriptors)
            raise
        if not self._put((payload, descriptors)):
            _close_all(descriptors)

    def send_made(self, make: Callable[[], Message | None]) -> None:
        """Send what `make` returns when all messages before it are sent; nothing for None. If it raises, the channel
        closes: the message would be missing."""
        self._put(make)

    def receive(self) -> tuple[Message, list[memoryview]]:
        """The next message with its files. Waits for it, without a limit: who expects an answer bounds that wait.

        Raises:
            ChannelClosed: There will be none.
            PlainError: This process has no room for its files.
            OSError: It has no memory for them.
        """
        descriptors: list[int] = []
        try:
            payload = self._received(descriptors)
            return msgspec.msgpack.decode(payload), [_mapped(descriptor) for descriptor in descriptors]
        finally:
            _close_all(descriptors)

    def close(self, flush_s: float = 0.0) -> None:
        """Wait so long for what is not sent yet, and close this end."""
        self._put(None)
        self._writer.join(flush_s)
        self._is_open = False
        self._shut()
        self._socket.close()

    def _received(self, descriptors: list[int]) -> bytearray:
        """The bytes of the next message. Its files' descriptors are added as they come."""
        try:
            head = b""
            while len(head) < _HEADER.size:
                more, those, *_ = socket.recv_fds(self._socket, _HEADER.size - len(head), _FILES_MAX)
                descriptors += those
                if not more:
                    raise ChannelClosed("the other process has ended")
                head += more
            size, count = _HEADER.unpack(head)
            if len(descriptors) != count:
                raise PlainError(f"process {os.getpid()} has no room for {count} more open files (ulimit -n)")
            payload = bytearray(size)
            left = memoryview(payload)
            while left:
                got = self._socket.recv_into(left)
                if not got:
                    raise ChannelClosed("the other process has ended amid a message")
                left = left[got:]
            return payload
        except ChannelClosed:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _put(self, item: _Unsent | None) -> bool:
        """Whether the writer will see it: nothing comes after None."""
        with self._lock:
            if self._is_closing:
                return False
            self._is_closing = item is None
            self._unsent.put(item)
            return True

    def _write(self) -> None:
        while (item := self._unsent.get()) is not None:
            payload, descriptors = item if isinstance(item, tuple) else (None, [])
            try:
                if self._is_open and callable(item):
                    payload = None if (message := item()) is None else encoded(message)
                if self._is_open and payload is not None:
                    head = _HEADER.pack(len(payload), len(descriptors))
                    sent = socket.send_fds(self._socket, [head], descriptors)
                    self._socket.sendall(head[sent:])
                    self._socket.sendall(payload)
            except Exception as error:
                self._is_open = False
                if not isinstance(error, OSError):  # else the other process is gone
                    logger.exception("a message to another process cannot be made")
                self._shut()
            finally:
                _close_all(descriptors)

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the other process closed first
            self._socket.shutdown(socket.SHUT_RDWR)


def encoded(message: Any) -> bytes:
    """As MessagePack.

    Raises:
        TypeError, ValueError, OverflowError: MessagePack has no such value.
    """
    try:
        return msgspec.msgpack.encode(message, enc_hook=_plain)
    except UnicodeEncodeError:  # JSON of a model or a tool may have half a character
        return msgspec.msgpack.encode(_whole_characters(message), enc_hook=_plain)


def _plain(value: Any) -> Any:
    """The same number or text without a type of its own, as NumPy's: an environment may score with `np.mean`.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"MessagePack has no {type(value).__module__}.{type(value).__qualname__}")


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list | tuple):
        return [_whole_characters(each) for each in value]
    if isinstance(value, dict):
        return {_whole_characters(name): _whole_characters(each) for name, each in value.items()}
    return value


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _file(parts: Sequence[Buffer]) -> int:
    """The descriptor of a file without a name, in memory, that holds these bytes."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("torchtitan-grpo", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int) -> memoryview:
    size = os.fstat(descriptor).st_size
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else b"")
