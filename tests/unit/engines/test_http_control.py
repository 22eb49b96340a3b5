"""Calls to something that is not an engine but answers 200, like a proxy in front of a lost server; calls that fail."""

import asyncio
import contextlib
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import urllib3

from tests.helpers.files import no_files_left
from torchtitan.grpo.engines import http_control
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.http_control import HttpControl, NoReply, ServerError
from torchtitan.grpo.engines.protocol import LocalError, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.environments import openenv
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.worker import ServerWorker


class Proxy(http.server.BaseHTTPRequestHandler):
    said = b""
    missing = ""
    asked: list[str]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append(self.path)
        self.send_response(404 if self.path == self.missing else 200)
        self.send_header("Content-Length", str(len(self.said)))
        self.end_headers()
        self.wfile.write(self.said)

    do_POST = do_GET
    send_head = http.server.BaseHTTPRequestHandler.send_header

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(Proxy, "asked", [], raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


CALLS: dict[str, Callable[[HttpControl], object]] = {
    "world size": lambda control: control.world_size(),
    "version": lambda control: control.weight_version(),
    "sampling": lambda control: control.check_sampling([1]),
    "check": lambda control: control.check(100),
}


REPLIES = (b"<html>back soon</html>", b"null", b"[]", b"{}", b'{"data": 3}')
CASES = [(VllmControl, call, said) for call in CALLS for said in REPLIES]
# Where SGLang's names are missing it is an old one.
CASES += [(SglangControl, call, said) for call in CALLS for said in (REPLIES if call == "sampling" else REPLIES[:2])]
CASES += [(VllmControl, "world size", b'{"world_size": 1e400}')]
CASES += [
    (VllmControl, "check", b'{"world_size": 1, "data": [{"id": "m", "max_model_len": "4096"}]}'),
    (SglangControl, "check", b'{"version": "0.5.23", "context_length": [4096]}'),
    (SglangControl, "world size", b'{"dp_size": [2]}'),
]


@pytest.mark.parametrize(("kind", "call", "said"), CASES)
def test_a_reply_that_is_not_as_expected_is_the_servers_failure(kind, call, said, url, monkeypatch):
    monkeypatch.setattr(Proxy, "said", said)
    with pytest.raises(ServerError, match=rf"{url}: phase .*answers not as expected"):
        CALLS[call](kind(url, timeout_s=5))


def test_a_reply_that_no_memory_could_hold_is_the_servers_failure(url, monkeypatch):
    for size in (10**12, 10**30):
        monkeypatch.setattr(Proxy, "send_header", lambda self, name, _, size=size: self.send_head(name, size))
        with pytest.raises(ServerError, match=rf"/resume: .*a reply of {size} bytes"):
            VllmControl(url, timeout_s=5).resume()


def test_a_route_that_a_server_lacks_is_asked_for_once_on_a_connection(url, monkeypatch):
    monkeypatch.setattr(Proxy, "missing", "/weight_info")
    control = VllmControl(url, timeout_s=5)
    assert [control.weight_version() for _ in range(3)] == [None] * 3
    assert Proxy.asked == ["/weight_info"]
    monkeypatch.setattr(Proxy, "missing", "")  # a newer server has taken its place
    monkeypatch.setattr(Proxy, "said", b'{"weight_version": "7"}')
    control.init_transfer({})
    assert [control.weight_version() for _ in range(2)] == ["7", "7"]


def test_a_server_on_the_trainers_gpu_is_told_apart_by_nccls_word():
    said = "Worker failed with error 'NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9\nLast error: "
    said += "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60'"
    with pytest.raises(UserError, match=r'is on the trainer.s GPU.*set \[weight_sync\] transport = "ipc"'):
        VllmControl("http://127.0.0.1:1")._explain(500, "connect", "/init_weight_transfer_engine", said)


@pytest.mark.parametrize(("listens", "hint"), [(True, "if it hangs"), (False, "Start the server")])
def test_the_error_of_an_unhealthy_server_says_what_to_do(listens, hint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"{url}: not healthy after 0.5 s .*{hint}.* start_timeout_seconds"):
            VllmControl(url).wait_healthy(0.5)


def test_an_https_address_of_a_server_without_tls_is_named_at_once(url, monkeypatch):
    sent = []
    monkeypatch.setattr(Proxy, "send_header", lambda self, *_: sent.append(self.headers.get("Authorization")))
    secure = url.replace("http", "https")
    with pytest.raises(UserError, match=f"{secure}: the server speaks plain HTTP: write {url}$"):
        VllmControl(secure, "secret").wait_healthy(60)
    assert set(sent) == {None}, "its API key crosses no network in the clear"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ssl.SSLError("WRONG_VERSION_NUMBER"), 404, r"speaks plain HTTP: write http://\[::1\]:443/a$"),
        (ssl.SSLCertVerificationError("self-signed"), 404, r"not healthy after 0.2 s \(last: SSLError: .*self-signed"),
        (ssl.SSLEOFError("closed"), 301, r"not healthy after 0.2 s \(last: SSLError: .*closed"),
    ],
)
def test_plain_http_is_what_the_port_of_https_speaks_without_tls(error, status, said, monkeypatch):
    """A certificate that is not trusted is one of TLS, and what redirects may be."""

    def pool(url: str, *_: object) -> SimpleNamespace:
        def urlopen(*_: object, **__: object) -> urllib3.HTTPResponse:
            if url.startswith("https"):
                raise urllib3.exceptions.SSLError(error)
            return urllib3.HTTPResponse(headers={"Location": url}, status=status)

        return SimpleNamespace(urlopen=urlopen)

    monkeypatch.setattr(http_control, "pool_of", pool)
    with pytest.raises(UserError, match=said):
        VllmControl("https://[::1]/a").wait_healthy(0.2)


def test_a_busy_server_and_one_that_is_gone_are_different_errors():
    """Weight sync gives the first another chance."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        control = VllmControl(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(ServerError, match="nobody listens there") as gone:
            control.weight_version()
        assert not isinstance(gone.value, NoReply)
        taken.listen()
        with pytest.raises(NoReply, match=r"no reply to /weight_info within 0\.2 s"):
            control.weight_version()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_trainer_without_files_left_blames_no_server(host, monkeypatch):
    url = f"http://{host}:9"
    client, loop = VllmClient(url, None, 5.0, lambda: 0), asyncio.new_event_loop()
    monkeypatch.setattr(ServerWorker, "_make_link", staticmethod(lambda *_: None))
    fleet = Fleet([url], lambda url: Server(url, VllmControl(url)))
    fleet.admit(fleet.servers[0], 0)
    worker = ServerWorker(fleet.servers[0], SimpleNamespace(lock=threading.RLock(), fleet=fleet), "gloo", None)
    with no_files_left():
        for call in (VllmControl(url).is_healthy, lambda: VllmControl(url).wait_healthy(1.0)):
            with pytest.raises(LocalError, match=r"ran out of file descriptors.*its limit is [0-9]+.*ulimit -Hn"):
                call()
        with pytest.raises(LocalError, match=r"lower \[rollout\] max_concurrent_requests"):
            loop.run_until_complete(client.generate([1], SamplingParams(1, 1.0, 1), "r"))
        with pytest.raises(LocalError):
            worker._look_after_health()
    loop.run_until_complete(client.close())
    loop.close()
    assert fleet.servers[0].in_traffic


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n"
REPLY = HEAD + b"{}".ljust(30)


class Dripping:
    """A server on one connection. Of each reply so many bytes come at once, then a byte now and then."""

    def __init__(self, *at_once: int) -> None:
        self.asked, self.listening = 0, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve, args=at_once, daemon=True)
        self.thread.start()

    def serve(self, *at_once: int) -> None:
        connection, _ = self.listening.accept()
        with self.listening, connection, contextlib.suppress(OSError):  # the other end hangs up
            for first in at_once:
                self.asked += bool(connection.recv(1 << 16))
                connection.sendall(REPLY[:first])
                for byte in REPLY[first:]:
                    time.sleep(0.04)
                    connection.sendall(bytes([byte]))


@pytest.mark.parametrize("at_once", [0, len(HEAD)], ids=["head", "body"])
def test_a_server_that_sends_a_byte_now_and_then_does_not_hold_a_call(at_once):
    """On the connection of the call before it."""
    server = Dripping(len(REPLY), at_once)
    control = VllmControl(server.url)
    control.resume()
    control.timeout_s = 0.4
    with pytest.raises(NoReply, match=r"phase resume: no reply to /resume within 0\.4 s"):
        control.resume()
    server.thread.join(10)
    assert server.asked == 2


def test_an_environment_that_sends_a_byte_now_and_then_does_not_hold_the_start(monkeypatch):
    monkeypatch.setattr(openenv, "REACH_TIMEOUT_S", 0.4)
    with pytest.raises(UserError, match=r"no server answers there: .*timed out"):
        openenv.OpenEnvEnvironment(Dripping(0).url, {})


def test_an_environment_at_no_address_ends_the_start():
    with pytest.raises(UserError, match="no server answers there: Failed to parse"):
        openenv.OpenEnvEnvironment("http://[::1", {})
