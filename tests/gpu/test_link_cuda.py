"""NCCL's set-up has no time limit: a trainer must not be in it when a server refuses."""

import threading
import time

import pytest
import torch

from tests.helpers.embedded_servers import ServerThread
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.link import GroupLink, Pause


def test_refused_connections_leave_no_thread_in_nccl():
    server = ServerThread(0)
    control = VllmControl(server.url, None, 60.0)
    link = GroupLink(control, "nccl", torch.device("cuda:0"), 60.0, Pause(), lambda: None, lambda: None, lambda: 0)
    info = {"protocol": 0, "run": "r", "num_buffers": 1, "plan": []}
    try:
        for _ in range(10):
            with pytest.raises(UserError, match="weight transfer protocol 0 from the trainer"):
                link.connect(info)
        deadline = time.monotonic() + 5
        while any(thread.name == "weight-sync-join" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "a thread waits for the server"
            time.sleep(0.05)
    finally:
        server.close()
