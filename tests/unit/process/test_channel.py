"""Messages and large bytes between two processes, over a pair of sockets."""

import gc
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from process_group import wait_for

from tests.helpers.files import limited
from torchtitan.grpo.process.channel import Channel, ChannelClosed

MIB = 2**20


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both in this process."""
    channels = [Channel(end, name) for end, name in zip(socket.socketpair(), ("here", "there"), strict=True)]
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def received(channel: Channel, count: int) -> list[list]:
    return [channel.receive()[0] for _ in range(count)]


def test_messages_of_all_threads_and_kinds_keep_their_order(ends):
    here, there = ends
    made = iter(range(1, 100, 2))
    for number in range(0, 100, 2):
        here.send([number, None, 0.5, "é", {"name": [True]}])
        here.send_made(lambda: [next(made)])
        here.send_made(lambda: None)
    messages = received(there, 100)
    assert [message[0] for message in messages] == list(range(100))
    assert messages[0] == [0, None, 0.5, "é", {"name": [True]}]

    threads = [threading.Thread(target=lambda n=n: [here.send([n, i]) for i in range(50)]) for n in range(4)]
    for thread in threads:
        thread.start()
    messages = received(there, 200)
    assert all([i for n, i in messages if n == number] == list(range(50)) for number in range(4))


def test_numbers_and_texts_of_a_type_of_their_own_arrive_as_plain_ones(ends):
    here, there = ends

    class Text(str):
        def __str__(self) -> str:
            return "another"

    class Number(int): ...

    here.send([np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), Number(4), Text("x"), {Text("k"): 1}])
    (arrived,) = received(there, 1)
    assert arrived == [0.1, 0.5, 3, True, 4, "x", {"k": 1}]
    assert [type(value) for value in arrived[:-1]] == [float, float, int, bool, int, str]
    here.send([np.float64(0.1), "\ud800"])
    assert received(there, 1) == [[0.1, "?"]]
    with pytest.raises(TypeError, match="MessagePack has no builtins"):
        here.send([object()])


def test_what_is_made_is_made_after_all_before_it_is_sent(ends):
    here, there = ends
    here.send([b"x" * MIB])  # more than the socket takes
    known = ["old"]
    here.send_made(lambda: list(known))
    known[0] = "new"
    assert received(there, 2)[1] == ["new"]


def test_files_come_with_their_message(ends):
    here, there = ends
    large = os.urandom(3 * MIB)
    here.send(["none"])
    here.send(["three"], [large, b"", memoryview(large)[:5]], [], [b""])
    here.send(["many"], *[[bytes([number])] for number in range(8)])
    assert there.receive() == (["none"], [])
    message, files = there.receive()
    assert message == ["three"] and files == [large + large[:5], b"", b""]
    assert there.receive()[1] == [bytes([number]) for number in range(8)]
    with pytest.raises(ValueError, match="at most 8 files, and this one 9"):
        here.send(["too many"], *[[b""]] * 9)


def test_messages_larger_than_the_socket_pass_both_ways_at_once(ends):
    large = [os.urandom(4 * MIB) for _ in range(3)]
    for part in large:
        for channel in ends:
            channel.send([part])
    got: dict[Channel, list] = {}
    threads = [threading.Thread(target=lambda c=c: got.setdefault(c, received(c, 3))) for c in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [got[channel] for channel in ends] == [[[part] for part in large]] * 2


def test_nobody_waits_for_an_end_that_does_not_read(ends):
    here, there = ends
    began = time.monotonic()
    for number in range(20):
        here.send([number, b"x" * MIB], [b"y" * MIB])
    here.close(0.1)
    assert time.monotonic() - began < 2.0
    with pytest.raises(ChannelClosed):
        received(there, 20)


def test_what_is_sent_last_arrives_when_the_end_is_closed_with_time_for_it(ends):
    here, there = ends
    here.send(["large", b"x" * MIB])
    here.send(["last"])
    reader: list[list] = []
    thread = threading.Thread(target=lambda: reader.extend(received(there, 2)))
    thread.start()
    here.close(20.0)
    thread.join(20)
    assert reader[1] == ["last"]
    with pytest.raises(ChannelClosed, match="has ended"):
        there.receive()


@pytest.mark.parametrize("when", ["between messages", "amid a message"])
def test_a_process_that_is_killed_closes_the_channel(when):
    own, its = socket.socketpair()
    if not (pid := os.fork()):
        own.close()
        channel = Channel(its, "child")
        channel.send(["first"], [b"file"])
        if when == "amid a message":
            channel.send([b"x" * 8 * MIB], [b"y" * MIB])
        time.sleep(60)
        os._exit(1)
    its.close()
    channel = Channel(own, "parent")
    assert channel.receive() == (["first"], [b"file"])
    before = open_files()
    if when == "amid a message":
        assert select.select([own], [], [], 20)[0], "the next one has begun"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(ChannelClosed, match="ended amid a message" if when == "amid a message" else "ended"):
        channel.receive()
    for _ in range(3):
        channel.send(["nobody"], [b"hears it"])
    assert not wait_for(lambda: open_files() == before, 5), "files of messages that were not sent are closed"
    channel.close()
    channel.send(["nobody"], [b"hears it"])  # a thread that has not heard of the end
    assert open_files() == before - 1


def test_a_close_ends_the_wait_of_both_readers(ends):
    ended = []

    def wait(channel: Channel) -> None:
        with pytest.raises(ChannelClosed):
            channel.receive()
        ended.append(channel)

    threads = [threading.Thread(target=wait, args=(channel,)) for channel in ends]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ends[0].close()
    for thread in threads:
        thread.join(5)
    assert len(ended) == 2


def test_a_message_amid_which_the_channel_is_closed_leaves_no_file(ends, monkeypatch):
    here, _ = ends
    before = open_files()
    monkeypatch.setattr("torchtitan.grpo.process.channel.encoded", lambda message: here.close() or b"")
    here.send(["nobody"], [b"hears it"])
    here.send_made(lambda: pytest.fail("nobody hears it"))
    assert open_files() == before - 1


def test_no_descriptor_and_no_memory_is_left(ends):
    here, there = ends
    before = open_files()
    for number in range(50):
        here.send([number], [b"x" * 1000], [])
        message, files = there.receive()
        assert message == [number] and files[0] == b"x" * 1000
    del files
    assert not wait_for(lambda: open_files() == before, 5)
    assert "memfd:torchtitan-grpo" not in Path("/proc/self/maps").read_text()
    here.send([0], [b"kept"])
    (kept,) = there.receive()[1]
    here.close()
    there.close()
    gc.collect()
    assert kept == b"kept", "a file outlives its channel"


def test_who_has_no_memory_for_a_file_does_not_take_the_other_end_for_gone(ends):
    here, there = ends
    here.send([1], [bytes(32 * MIB)])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used + 16 * MIB), pytest.raises(OSError, match="Cannot allocate memory") as raised:
        there.receive()
    assert type(raised.value) is OSError
    here.send([2])
    assert there.receive() == ([2], [])


def test_a_message_that_cannot_be_made_is_its_senders_error(ends, caplog):
    here, there = ends
    for value, error in ((object(), TypeError), (2**70, OverflowError)):
        with pytest.raises(error):
            here.send([value], [b"file"])
    here.send(["half a character: \ud83d", {"\ud83d": ("\ud83d",)}])
    assert there.receive()[0] == ["half a character: ?", {"?": ["?"]}]
    here.send_made(lambda: 1 / 0)
    with pytest.raises(ChannelClosed):  # nobody waits for it
        there.receive()
    assert "ZeroDivisionError" in caplog.text
