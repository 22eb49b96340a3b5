"""Servers without a model: the real receiver of weights behind the real routes, many in one process.

What a server does with the weights besides receiving and checking them is left out, so that many fit on one device
and any of them can be made slow or killed: `POST /fault` says which update shall sleep or end the process.
"""

import functools
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.receiver import Receiver

START_TIMEOUT_S = 180.0
_LOG_TAIL_CHARS = 3000
_SCRIPT = Path(__file__).parents[1] / "weight_sync.py"
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


def one_at_a_time(route):
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
        """Spoil updates: {"sleep_s": S} or {"kill": true}, and optionally "version" (default: whichever comes next)
        and "updates", how many of them (default 1, -1: all). {} ends it."""
        unknown = sorted(body.keys() - {"sleep_s", "kill", "version", "updates"})
        if unknown:
            raise ValueError(f"/fault: unknown {unknown}; known: sleep_s, kill, version, updates")
        self._fault = {"sleep_s": 0.0, "kill": False, "version": None, "updates": 1} | body
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
        receiver.receive(body["update_info"], lambda tensors: self.load(version, next(numbers), tensors))
        self._updating = receiver is self._receiver  # else the trainer has given this update up and connected anew
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
        """What becomes of bucket `number`, counted from 1: it is thrown away. Later ones are on their way meanwhile."""
        fault = self._fault
        if number > 1 or not fault or fault["updates"] == 0 or fault["version"] not in (None, version):
            return
        fault["updates"] -= 1
        if fault["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(fault["sleep_s"])


_POSTS = (
    "fault",
    "init_weight_transfer_engine",
    "pause",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "resume",
)


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

    def _answer(self, call) -> None:
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


def serve(args) -> None:
    """`receiver`: serve until the process is ended, or until `--parent-pid` is gone."""
    raise_open_files_limit()
    device = torch.device(args.device)
    if args.parent_pid:
        threading.Thread(target=exit_without, args=(args.parent_pid,), daemon=True).start()
    ports = [args.port + i if args.port else 0 for i in range(args.servers)]
    listeners = [Listener(args.host, port, FakeServer(device)) for port in ports]
    if args.sleep_s:
        fault = {"sleep_s": args.sleep_s, "updates": 1 if args.sleep_version is not None else -1}
        listeners[args.sleep_server].fake.fault(fault | {"version": args.sleep_version})
    for listener in listeners[1:]:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
    urls = "\n".join(f"http://{args.host}:{listener.server_port}" for listener in listeners)
    print(urls, flush=True)
    if args.ready_file:
        part = Path(f"{args.ready_file}.part")
        part.write_text(urls)
        part.rename(args.ready_file)
    listeners[0].serve_forever()


def exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Child:
    """This script with another subcommand, as a process of its own that ends with this one.

    Args:
        arguments: Subcommand and flags.
        device: "cpu", or the index of a GPU, the only one that the child then sees, as cuda:0.
    """

    def __init__(self, arguments: list[str], device: str):
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in _TORCHRUN_NAMES and not name.startswith(_TORCHRUN_PREFIXES)
        }
        environment["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, str(_SCRIPT), *arguments, "--parent-pid", str(os.getpid())]
        command += ["--device", "cpu" if device == "cpu" else "cuda:0"]
        # A group of its own: Ctrl-C reaches the trainer alone, which then ends its children.
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, process_group=0
        )

    def check(self) -> None:
        """Raise if the process has ended, with the end of what it said."""
        if self.process.poll() is not None:
            said = Path(self._log.name).read_text(errors="replace")[-_LOG_TAIL_CHARS:]
            raise UserError(f"a child process ended with exit status {self.process.returncode}; it said:\n{said}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class Receivers(Child):
    """A child process with `servers` servers, which `urls` waits for."""

    def __init__(self, servers: int, device: str):
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._ready = Path(self._folder.name) / "urls"
        super().__init__(["receiver", "--servers", str(servers), "--ready-file", str(self._ready)], device)

    @functools.cached_property
    def urls(self) -> list[str]:
        """The servers' addresses, once they answer."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.exists():
            self.check()
            if time.monotonic() > deadline:
                raise UserError(f"the receiver process did not serve within {START_TIMEOUT_S:g} s")
            time.sleep(0.05)
        return self._ready.read_text().split()

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
