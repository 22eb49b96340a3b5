"""A benchmark's server without a model (`weight_sync_bench.receivers`) that records what it receives.

    python receiver_process.py READY_FILE [--port PORT] [--fault KIND VERSION SECONDS] [--bucket-s S] [--jitter-s S]

Writes its address into READY_FILE. KIND acts while the second bucket of VERSION is loaded: `sleep` for SECONDS, `die`
by SIGKILL, or `stop` by SIGSTOP. Loading a bucket takes `--bucket-s` seconds and a random share of `--jitter-s` more.

`GET /tensors` answers {name: [dtype, shape, sha256 of the bytes]} of the last tensors received. Each version taken into
service adds a line to READY_FILE.taken: the version, and the sha256 of that answer.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from weight_sync_bench.receivers import FakeServer, Listener

parser = argparse.ArgumentParser()
parser.add_argument("ready", type=Path)
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--fault", nargs=3, default=["", "0", "0"])
parser.add_argument("--bucket-s", type=float, default=0.0)
parser.add_argument("--jitter-s", type=float, default=0.0)
args = parser.parse_args()
fault, fault_version, fault_s = args.fault[0], int(args.fault[1]), float(args.fault[2])


class WritingServer(FakeServer):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.tensors: dict[str, list] = {}

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

    def finish_weight_update(self, body: dict) -> dict:
        reply = super().finish_weight_update(body)
        digest = hashlib.sha256(json.dumps(self.tensors, sort_keys=True).encode()).hexdigest()
        with open(f"{args.ready}.taken", "a") as taken:
            taken.write(f"{body['weight_version'].partition('@')[0]} {digest}\n")
        return reply

    def get(self, path: str) -> dict:
        return self.tensors if path == "/tensors" else super().get(path)


if __name__ == "__main__":
    listener = Listener("127.0.0.1", args.port, WritingServer())
    args.ready.with_suffix(".part").write_text(f"http://127.0.0.1:{listener.server_port}")
    args.ready.with_suffix(".part").rename(args.ready)
    listener.serve_forever()
