"""Connections to a real embedded server, hundreds of them: what they leave behind in the process."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import requests
import torch

from tests.helpers.embedded_servers import ServerThread
from torchtitan.grpo.engines.embedded import server as embedded
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.inside_vllm.backend import FINGERPRINTS
from torchtitan.grpo.weight_sync.disk import FolderLink
from torchtitan.grpo.weight_sync.link import GroupLink, Pause, ServerLink, WeightSyncError
from torchtitan.grpo.weight_sync.push import Dropped
from torchtitan.grpo.weight_sync.sglang_adapter_link import SglangAdapterLink
from torchtitan.grpo.weight_sync.sglang_link import SglangFolderLink, SglangLink
from torchtitan.grpo.weight_wire import receiver
from torchtitan.grpo.weight_wire.buckets import TensorSpec, plan_buckets, plan_from_json, plan_to_json
from torchtitan.grpo.weight_wire.receiver import PROTOCOL
from torchtitan.grpo.weight_wire.version_names import own_run

CPU = torch.device("cpu")
PLAN = plan_to_json(plan_buckets([TensorSpec("weight", torch.float32, (8,))], 1 << 10))
INFO = {"protocol": PROTOCOL, "run": own_run(), "num_buffers": 1, "timeout_seconds": 60.0, "plan": PLAN}


@pytest.fixture
def server() -> Iterator[ServerThread]:
    server = ServerThread(0, takes_weights=True)
    yield server
    server.close()


@pytest.fixture
def link(server: ServerThread) -> GroupLink:
    control = VllmControl(server.url, None, 60.0)
    return GroupLink(control, "gloo", CPU, 60.0, Pause(), lambda: None, lambda: None, lambda: 0)


def refused(link: GroupLink) -> None:
    with pytest.raises(UserError, match=f"weight transfer protocol 0 from the trainer, {PROTOCOL} on the server"):
        link.connect(INFO | {"protocol": 0, "of_another_protocol": True, "adapter": {"of_another_protocol": True}})


def accepted(link: GroupLink) -> None:
    link.connect(INFO)
    link.close()


def used() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@dataclass
class InitInfo(receiver.InitInfo):
    """Of protocol 3, which had one more field and did not look at the protocol first."""

    verify: bool = field(kw_only=True)


def test_an_earlier_server_is_told_by_the_field_that_it_misses(link: GroupLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(receiver, "InitInfo", InitInfo)
    with pytest.raises(UserError, match=f"protocol {PROTOCOL} from the trainer, 3 or an earlier one on the server"):
        link.connect(INFO)


@pytest.mark.parametrize("attempt", [refused, accepted])
def test_connections_leave_no_threads_and_no_descriptors(link: GroupLink, attempt: Callable[[GroupLink], None]):
    """Without the garbage collector, which a trainer runs rarely."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            attempt(link)
        before = used()
        for _ in range(25):
            attempt(link)
        deadline = time.monotonic() + 5
        while any(now > then + 5 for now, then in zip(used(), before, strict=True)):
            assert time.monotonic() < deadline, f"threads and descriptors: {before}, then {used()}"
            time.sleep(0.05)
    finally:
        gc.enable()


def test_a_server_that_fell_asleep_without_a_reply_is_woken(server: ServerThread, link: GroupLink):
    """Its weights are gone. What an update wrote to them would go nowhere."""
    link.control.timeout_s = 0.1
    server.loop.call_soon_threadsafe(time.sleep, 1.0)
    with pytest.raises(EngineError):
        link.control.sleep()
    link.control.timeout_s = 60.0
    VllmControl(server.url, None, 60.0).sleep()
    weights = list(server.generator.model.parameters())
    assert not any(weight.numel() for weight in weights)
    link.stop(1)
    assert all(weight.isnan().all() and weight.numel() for weight in weights)
    with pytest.raises(EngineError, match="a weight update failed or is not finished"):
        link.control.resume()


def test_what_is_asked_while_an_update_waits_for_its_turn_is_refused_if_it_fails(
    server: ServerThread, link: GroupLink, monkeypatch: pytest.MonkeyPatch
):
    busy = threading.Event()
    monkeypatch.setattr(embedded, "held_fingerprints", lambda model: busy.set() or time.sleep(0.5) or {})
    link.connect(INFO)
    link.control.pause()
    link.close()  # the trainer is gone
    body = {"version": 1, "resume": True}
    with ThreadPoolExecutor() as pool:
        pool.submit(requests.post, f"{server.url}/collective_rpc", json={"method": FINGERPRINTS}, timeout=10)
        assert busy.wait(10)
        update = pool.submit(link.control.update, body)
        time.sleep(0.1)
        resume = pool.submit(link.control.resume)
        with pytest.raises(EngineError):
            update.result()
        with pytest.raises(EngineError, match="mix of two versions"):
            resume.result()
    assert link.control.is_paused()


class Asked:
    """The control of a server that replies at once. `given_up` is set while it reads a version."""

    asleep, url = False, "http://server"

    def __init__(self) -> None:
        self.names: list[str] = []
        self.given_up = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            self.names.append(name)
            if name in ("update", "receive", "load_folder", "load_adapter"):
                self.given_up.set()

        return call

    def adapters(self) -> list[str]:
        return []


def link_of(kind: type[ServerLink], control: Asked, check: Callable[[], None] = lambda: None) -> ServerLink:
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    link = kind(control, "gloo", CPU, 60.0, Pause(), check, lambda: None, lambda: 0)
    link._group = SimpleNamespace(size=1, rest=None, broadcast=lambda _: done, all_reduce=lambda _: done, abort=list)
    link._held = SimpleNamespace(begin=lambda: None, add=lambda *_: None)
    return link


@pytest.mark.parametrize("kind", [GroupLink, SglangLink])
def test_a_copy_that_finds_no_room_on_the_device_costs_this_server_alone(kind: type[ServerLink]):
    """Any other error than the link's own ends the run."""

    def to(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    link, (bucket,) = link_of(kind, Asked()), plan_from_json(PLAN)
    feed = SimpleNamespace(version=1, bucket=lambda _: (SimpleNamespace(to=to), None), release=list)
    link.stop(1)
    with pytest.raises(WeightSyncError, match="phase transfer, version 1, 0 bytes: CUDA out of memory"):
        link.update(feed, [bucket], 1)


@pytest.mark.parametrize("kind", [GroupLink, FolderLink, SglangLink, SglangFolderLink, SglangAdapterLink])
def test_a_server_that_read_a_copy_while_it_was_given_up_is_not_resumed(kind: type[ServerLink]):
    """What it read may be torn."""
    control = Asked()

    def check() -> None:
        if control.given_up.is_set():
            raise Dropped

    link = link_of(kind, control, check)
    (bucket,) = plan_from_json(PLAN)
    wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
    feed = SimpleNamespace(version=1, folder="", bucket=lambda _: (wire, None))
    feed.expected = () if kind is FolderLink else lambda: [1] * receiver.ACK_FIELDS
    feed.release = lambda _: control.given_up.wait(10)
    acknowledged = []
    link._group.all_reduce = acknowledged.append  # without it a server that resumes by itself does not
    link.stop(1)
    with pytest.raises(Dropped):
        link.update(feed, [bucket], 1)
    assert not {"finish_update", "resume"} & set(control.names) and not acknowledged
