"""A real SGLang server on CPU: tokens in, tokens and their log-probabilities out; and nothing of a server is left."""

import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from conftest import RunningServer, group_members, serve
from served_logprobs import PROMPT, answer_logprobs
from transformers import AutoModelForCausalLM


def generate(server: RunningServer, **sampling: Any) -> list[dict[str, Any]]:
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    reply = requests.post(server.url + "/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.sglang
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_sampled_distribution(sglang_server: RunningServer, temperature: float) -> None:
    reference = AutoModelForCausalLM.from_pretrained(sglang_server.model_dir, dtype=torch.float32).eval()
    choices = generate(sglang_server, n=3, max_new_tokens=12, temperature=temperature, ignore_eos=True)
    assert len({tuple(choice["output_ids"]) for choice in choices}) == 3
    for choice in choices:
        served, tokens, _ = zip(*choice["meta_info"]["output_token_logprobs"], strict=True)
        assert list(tokens) == choice["output_ids"]
        assert choice["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        expected = answer_logprobs(reference, PROMPT, choice["output_ids"], temperature)
        torch.testing.assert_close(torch.tensor(served), expected, atol=1e-4, rtol=0)


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
    (tmp_path / "serve.sh").write_text(f'exec "{sys.executable}" "{tmp_path}/server.py" "$4"\n')
    with serve(tmp_path / "serve.sh", tmp_path, tmp_path / "model") as server:
        assert len(group_members(server.process.pid)) == 2
    assert group_members(server.process.pid) == []
