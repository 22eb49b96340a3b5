"""Servers without a model: the real receiver of weights behind the real routes, many in one process.

A server receives and checks the weights and then drops them, so that many fit on one device. `POST /fault` makes the
next update sleep or end the process.
"""

import functools
import itertools
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from unittest.mock import patch
from urllib.parse import urlsplit

import torch

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.receiver import Receiver

START_TIMEOUT_S = 180.0
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


def one_at_a_time(route: Callable) -> Callable:
    """As in a real engine, a new connection waits until the update under way has ended."""

    @functools.wraps(route)
    def locked(self, body: dict) -> dict:
        with self._busy:
            return route(self, body)

    return locked


class FakeServer:
    """State of one server. A route's method takes the JSON body and returns the JSON reply, or raises (HTTP 500)."""

    def __init__(self, device: torch.device):
        self._device = device
        self._receiver: Receiver | None = None
        self._fault: dict = {}
        self._paused = self._updating = False
        self._busy = threading.Lock()
        self._version = "default"

    def fault(self, body: dict) -> dict:
        """Spoil the next update: {"sleep_s": S} or {"kill": true}."""
        unknown = sorted(body.keys() - {"sleep_s", "kill"})
        if unknown:
            raise ValueError(f"/fault: unknown {unknown}; known: sleep_s, kill")
        self._fault = body
        return {}

    @one_at_a_time
    def init_weight_transfer_engine(self, body: dict) -> dict:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._updating = None, False
        self._receiver = Receiver(body["init_info"], self._device)
        return {}

    def pause(self, _body: dict) -> dict:
        self._paused = True
        return {}

    def start_weight_update(self, _body: dict) -> dict:
        self._updating = True
        return {}

    @one_at_a_time
    def update_weights(self, body: dict) -> dict:
        if not (self._paused and self._updating):
            raise RuntimeError("update_weights before pause and start_weight_update")
        receiver, version = self._receiver, body["update_info"]["version"]
        numbers = itertools.count(1)

        self._updating = False
        receiver.receive(body["update_info"], lambda tensors: self.load(version, next(numbers), tensors), copies=True)
        self._updating = receiver is self._receiver  # else the trainer has given up this update and reconnected
        return {}

    def finish_weight_update(self, body: dict) -> dict:
        if not self._updating:
            raise RuntimeError("finish_weight_update without a complete update")
        self._updating, self._version = False, body["weight_version"]
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
        }[path]

    def load(self, version: int, number: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Drop bucket `number`, counted from 1. A fault strikes in the first one, while later ones arrive."""
        fault, self._fault = self._fault, {}
        if fault.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(fault.get("sleep_s", 0.0))


_POSTS = ["fault", "init_weight_transfer_engine", "pause", "resume"]
_POSTS += ["start_weight_update", "update_weights", "finish_weight_update"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # as real servers: connections are kept
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(lambda path: self.server.fake.get(path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")

        def call(path: str) -> dict:
            name = path.strip("/")
            if name not in _POSTS:
                raise KeyError(path)
            return getattr(self.server.fake, name)(body)

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

    def __init__(self, host: str, port: int, fake: FakeServer):
        super().__init__((host, port), Handler)
        self.fake = fake


def raise_open_files_limit() -> None:
    """As many files as this user may open: each server's group takes about ten on either side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Child:
    """A function in a process of its own, which sees one device and ends with this process.

    Args:
        run: Called with `arguments`, the child's device and a connection to this process.
        device: "cpu", or the index of a GPU, which the child sees as cuda:0.
    """

    def __init__(self, run: Callable, *arguments: object, device: str):
        # A process forked after imports that initialise CUDA could not use it.
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        seen = torch.device("cpu" if device == "cpu" else "cuda:0")
        self.process = context.Process(target=_in_child, args=(run, *arguments, seen, theirs), daemon=True)
        with patch.dict(os.environ):  # the child reads it before its imports, which may initialise CUDA
            for name in list(os.environ):
                if name in _TORCHRUN_NAMES or name.startswith(_TORCHRUN_PREFIXES):
                    del os.environ[name]
            os.environ["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self.process.start()

    def check(self) -> None:
        """Raise if the process has ended. Its traceback is on stderr."""
        if not self.process.is_alive():
            raise UserError(f"a child process ended with exit status {self.process.exitcode}; stderr says why")

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _in_child(run: Callable, *arguments: object) -> None:
    def exit_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    threading.Thread(target=exit_with_parent, daemon=True).start()
    run(*arguments)


class Receivers(Child):
    """A child process with `servers` servers, whose addresses `urls` waits for."""

    def __init__(self, servers: int, device: str):
        super().__init__(_serve, servers, device=device)

    @functools.cached_property
    def urls(self) -> list[str]:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._connection.poll(0.05):
            self.check()
            if time.monotonic() > deadline:
                raise UserError(f"the receiver process did not serve within {START_TIMEOUT_S:g} s")
        return self._connection.recv()


def _serve(servers: int, device: torch.device, parent: Connection) -> None:
    raise_open_files_limit()
    listeners = [Listener("127.0.0.1", 0, FakeServer(device)) for _ in range(servers)]
    for listener in listeners[1:]:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
    parent.send([f"http://127.0.0.1:{listener.server_port}" for listener in listeners])
    listeners[0].serve_forever()
