"""Servers that tests start: nothing of them is left."""

import sys
from pathlib import Path

import pytest
from process_group import free_port

from tests.helpers.servers import serve_command

# A server whose worker outlives it: each asks not to be ended, the worker even after its parent is gone.
STUBBORN = """
import http.server, signal, subprocess, sys
if sys.argv[1] == "worker":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
subprocess.Popen([sys.executable, __file__, "worker"])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_stopped_server_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(STUBBORN)
    port = free_port()
    command = [sys.executable, tmp_path / "server.py", port]
    with serve_command(command, tmp_path, tmp_path / "model", port) as server:
        assert len(server.process.running()) == 2
    assert server.process.running() == []
