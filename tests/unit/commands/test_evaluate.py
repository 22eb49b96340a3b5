"""`torchtitan-grpo evaluate` where it has no result. tests/integration/test_train.py has one that has."""

import contextlib
import http.server
import threading

import pytest

from tests.helpers import ROOT, TINY_QWEN3
from torchtitan.grpo.commands import console, evaluate
from torchtitan.grpo.errors import PlainError, UserError


class NotAnEngine(http.server.BaseHTTPRequestHandler):
    """Healthy, and fails on each other route."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_evaluation_whose_server_fails_at_once_names_no_answers_and_leaves_no_folder(tmp_path):
    with contextlib.ExitStack() as resources:
        server = resources.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotAnEngine))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        resources.callback(server.shutdown)
        parser, _ = console.all_commands()
        words = ["evaluate", str(TINY_QWEN3), "--url", f"http://127.0.0.1:{server.server_port}"]
        arguments = parser.parse_args([*words, "--out", str(tmp_path / "out")])
        arguments.flags = ["--job.config_file", str(ROOT / "train_configs" / "quickstart.toml")]
        with pytest.raises(PlainError, match="HTTP 500 on /get_world_size") as refused:
            evaluate.evaluate(arguments, resources)
    assert "answers.jsonl" not in str(refused.value) and not (tmp_path / "out").exists()


def test_a_folder_without_weights_is_not_evaluated_as_a_random_model(tmp_path):
    parser, _ = console.all_commands()
    arguments = parser.parse_args(["evaluate", str(TINY_QWEN3), "--out", str(tmp_path / "out")])
    arguments.flags = ["--job.config_file", str(ROOT / "train_configs" / "quickstart.toml")]
    with contextlib.ExitStack() as resources, pytest.raises(UserError, match=r"has neither model\.safetensors nor "):
        evaluate.evaluate(arguments, resources)
    assert not (tmp_path / "out").exists()
