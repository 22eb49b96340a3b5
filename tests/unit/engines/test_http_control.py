"""Control calls to something that is not an engine but answers 200, like a proxy in front of a lost server."""

import http.server
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from torchtitan.grpo.engines.http_control import HttpControl, NoReply, ServerError
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError


class Proxy(http.server.BaseHTTPRequestHandler):
    said = b""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.said)))
        self.end_headers()
        self.wfile.write(self.said)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
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


@pytest.mark.parametrize(("kind", "call", "said"), CASES)
def test_a_reply_that_is_not_as_expected_is_the_servers_failure(kind, call, said, url, monkeypatch):
    monkeypatch.setattr(Proxy, "said", said)
    with pytest.raises(ServerError, match=rf"{url}: phase .*answers not as expected"):
        CALLS[call](kind(url, timeout_s=5))


@pytest.mark.parametrize(("listens", "hint"), [(True, "if it hangs"), (False, "Start the server")])
def test_the_error_of_an_unhealthy_server_says_what_to_do(listens, hint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"{url}: not healthy after 0.5 s .*{hint}.* start_timeout_seconds"):
            VllmControl(url).wait_healthy(0.5)


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
