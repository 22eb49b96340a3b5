"""A server that only takes weights: the real receiver behind the real routes, without a model.

    python receiver_process.py READY_FILE [--port PORT] [--fault KIND VERSION SECONDS] [--bucket-s S] [--jitter-s S]

Writes its address into READY_FILE. KIND, while the second bucket of VERSION is being loaded: `sleep` for SECONDS, `die`
by SIGKILL, or `stop` by SIGSTOP. Loading a bucket takes `--bucket-s` seconds, and up to `--jitter-s` more at random.

`GET /tensors` answers {name: [dtype, shape, sha256 of the bytes]} of what arrived last. Each version that is taken into
service becomes a line of READY_FILE.taken: the version, and the sha256 of that answer.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch

from torchtitan.grpo.weight_sync.receiver import Receiver

parser = argparse.ArgumentParser()
parser.add_argument("ready", type=Path)
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--fault", nargs=3, default=["", "0", "0"])
parser.add_argument("--bucket-s", type=float, default=0.0)
parser.add_argument("--jitter-s", type=float, default=0.0)
args = parser.parse_args()
fault, fault_version, fault_s = args.fault[0], int(args.fault[1]), float(args.fault[2])


busy = threading.Lock()


def one_at_a_time(route):
    """As in a real engine, a new connection waits until the update under way has ended."""

    @functools.wraps(route)
    def locked(self, body: dict) -> dict:
        with busy:
            return route(self, body)

    return locked


class Server:
    """State and routes; a route takes the JSON body and returns the JSON reply, or raises (HTTP 500)."""

    receiver: Receiver | None = None
    paused = False
    active = False
    version = "default"

    def __init__(self):
        self.tensors: dict[str, list] = {}

    @one_at_a_time
    def init_weight_transfer_engine(self, body: dict) -> dict:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = Receiver(body["init_info"], torch.device("cpu"))
        return {}

    @one_at_a_time
    def update_weights(self, body: dict) -> dict:
        if not (self.paused and self.active):
            raise RuntimeError("update_weights before pause and start")
        self.active = False
        buckets_loaded = 0

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            nonlocal buckets_loaded
            buckets_loaded += 1
            if buckets_loaded == 2 and body["update_info"]["version"] == fault_version:
                if fault in ("die", "stop"):
                    os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)
                time.sleep(fault_s)
            time.sleep(args.bucket_s + random.uniform(0, args.jitter_s))
            for name, tensor in tensors:
                data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                self.tensors[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]

        self.tensors = {}
        self.receiver.receive(body["update_info"], load)
        self.active = True
        return {}

    def start_weight_update(self, _body: dict) -> dict:
        self.active = True
        return {}

    def finish_weight_update(self, body: dict) -> dict:
        if not self.active:
            raise RuntimeError("finish_weight_update after a failed update")
        digest = hashlib.sha256(json.dumps(self.tensors, sort_keys=True).encode()).hexdigest()
        with open(f"{args.ready}.taken", "a") as taken:
            taken.write(f"{body['weight_version']} {digest}\n")
        self.active, self.version = False, body["weight_version"]
        return {}

    def pause(self, _body: dict) -> dict:
        self.paused = True
        return {}

    def resume(self, _body: dict) -> dict:
        self.paused = False
        return {}

    def get(self, path: str) -> dict:
        return {
            "/health": {},
            "/get_world_size": {"world_size": 1},
            "/weight_info": {"weight_version": self.version},
            "/is_paused": {"is_paused": self.paused},
            "/tensors": self.tensors,
        }[path]


server = Server()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(200, server.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        try:
            self.reply(200, getattr(server, urlsplit(self.path).path.strip("/"))(body))
        except Exception as error:
            self.reply(500, {"error": str(error)})

    def reply(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        pass


def exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    http = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    args.ready.with_suffix(".part").write_text(f"http://127.0.0.1:{http.server_port}")
    args.ready.with_suffix(".part").rename(args.ready)
    http.serve_forever()
