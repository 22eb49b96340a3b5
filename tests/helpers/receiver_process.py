"""A server without a model: the real receiver of weights behind the real routes. It records what it receives.

    python receiver_process.py READY_FILE PORT [--fault KIND VERSION SECONDS] [--bucket-s S] [--jitter-s S]
        [--control-s S]

Writes its address into READY_FILE. KIND acts while the second bucket of VERSION is loaded: `sleep` for SECONDS, `die`
by SIGKILL, or `stop` by SIGSTOP. Loading a bucket takes `--bucket-s` seconds and a random share of `--jitter-s` more.
A pause and the start of an update take `--control-s` each.

`GET /tensors` answers {name: [dtype, shape, sha256 of the bytes]} of the last tensors received. Each version taken into
service adds a line to READY_FILE.taken: the version, and the sha256 of that answer.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch

from torchtitan.grpo.weight_wire.receiver import Receiver, UpdateInfo
from torchtitan.grpo.weight_wire.version_names import version_name

parser = argparse.ArgumentParser()
parser.add_argument("ready", type=Path)
parser.add_argument("port", type=int)
parser.add_argument("--fault", nargs=3, default=["", "0", "0"])
parser.add_argument("--bucket-s", type=float, default=0.0)
parser.add_argument("--jitter-s", type=float, default=0.0)
parser.add_argument("--control-s", type=float, default=0.0)
args = parser.parse_args()
fault, fault_version, fault_s = args.fault[0], int(args.fault[1]), float(args.fault[2])


def one_at_a_time(route: Callable) -> Callable:
    """As in a real engine, a new connection waits until the update under way has ended."""

    @functools.wraps(route)
    def locked(self, body: dict) -> dict:
        with self._busy:
            return route(self, body)

    return locked


class RecordingServer:
    """State of the server. A route's method takes the JSON body and returns the JSON reply, or raises (HTTP 500)."""

    def __init__(self) -> None:
        self.tensors: dict[str, list] = {}
        self._receiver: Receiver | None = None
        self._paused = False
        self._busy = threading.Lock()
        self._version = "default"

    @one_at_a_time
    def init_weight_transfer_engine(self, body: dict) -> dict:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        self._receiver = Receiver(body["init_info"], torch.device("cpu"))
        return {}

    def pause(self, _body: dict) -> dict:
        time.sleep(args.control_s)
        self._paused = True
        return {}

    @one_at_a_time
    def update_weights(self, body: dict) -> dict:
        if not self._paused:
            raise RuntimeError("update_weights before pause")
        time.sleep(args.control_s)
        info = UpdateInfo(**body["update_info"])
        numbers = itertools.count(1)
        self._receiver.receive(
            body["update_info"], lambda tensors: self.load(info.version, next(numbers), tensors), copies=True
        )
        self._version = version_name(info.version, info.run)
        digest = hashlib.sha256(json.dumps(self.tensors, sort_keys=True).encode()).hexdigest()
        with open(f"{args.ready}.taken", "a") as taken:
            taken.write(f"{info.version} {digest}\n")
        self._paused = not info.resume
        return {}

    def resume(self, _body: dict) -> dict:
        self._paused = False
        return {}

    def get(self, path: str) -> dict:
        return {
            "/health": {},
            "/get_world_size": {"world_size": 1},
            "/weight_info": {"weight_version": self._version},
            "/is_paused": {"is_paused": self._paused},
            "/tensors": self.tensors,
        }[path]

    def load(self, version: int, number: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if number == 1:
            self.tensors = {}
        if number == 2 and version == fault_version:
            if fault in ("die", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)
            time.sleep(fault_s)
        time.sleep(args.bucket_s + random.uniform(0, args.jitter_s))
        for name, tensor in tensors:
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            self.tensors[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


_POSTS = ["init_weight_transfer_engine", "pause", "resume", "update_weights"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # as real servers: connections are kept
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(lambda path: self.server.recording.get(path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")

        def call(path: str) -> dict:
            name = path.strip("/")
            if name not in _POSTS:
                raise KeyError(path)
            return getattr(self.server.recording, name)(body)

        self._answer(call)

    def _answer(self, call: Callable[[str], dict]) -> None:
        path = urlsplit(self.path).path
        try:
            status, value = 200, call(path)
        except KeyError:
            status, value = 404, {"error": f"no such route: {path}"}
        except Exception as error:
            status, value = 500, {"error": str(error)}
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        pass


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", args.port), Handler)
        self.recording = RecordingServer()


if __name__ == "__main__":
    listener = Listener()
    args.ready.with_suffix(".part").write_text(f"http://127.0.0.1:{listener.server_port}")
    args.ready.with_suffix(".part").rename(args.ready)
    listener.serve_forever()
