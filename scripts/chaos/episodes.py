"""The environment and the reward of a run that gets foreign data: models, tools and clients that write what they like.

The folder CHAOS_FOREIGN has one fault at a time, the file `fault`. Whoever it is for renames it to `fallen-NUMBER`,
which is the witness, and does it. `heartbeat` has the longest gap of a thread of the rollout process, in
seconds.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp

from chaos.rewards import paced
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.rollouts.environment import RolloutClient

FOLDER = Path(os.environ.get("CHAOS_FOREIGN", "."))
BEAT_S = 0.02
LONG_TOKENS = 1500
"""Of an answer that the proxy writes."""
MARKS = {"an unclosed tool call and white space": "wwww", "tool calls that never close": "tttt"}
"""What the model writes, and by which words in the prompt the proxy knows the request."""
CALLS: dict[str, dict[str, Any]] = {
    "a tool result of 1 MB": {"content": "9" * 10**6},
    "a tool result of 16 MB": {"content": "1 " * (8 * 10**6)},
    "n = 65537": {"n": 65537},
    "a lone surrogate in stop": {"stop": ["\ud800"]},
    "a lone surrogate in a message": {"content": "\udfff"},
    "tools that are no tools": {"tools": [{"type": "function"}, 7, None]},
}
"""What a client sends: each must be refused, or answered."""
RETURNS = ("NaN as the reward", "NaN as a metric", "no samples", "None", "an error", "an exit", "an error with NUL")
JUDGES = ("a judge that exits", "a judge that returns NaN", "a judge that prints 1 MB", "a judge that leaves a child")
OUTAGE = "a tool server that is away"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

_away_until = 0.0


def claim(*kinds: str) -> dict[str, Any] | None:
    """The fault that is to fall now, if it is of these kinds. Only one caller gets it."""
    path = FOLDER / "fault"
    try:
        fault = json.loads(path.read_text())
        if fault["kind"] not in kinds:
            return None
        path.rename(FOLDER / f"fallen-{fault['number']}")
    except (OSError, ValueError):  # there is none, or another caller was faster
        return None
    return fault


def beat() -> None:
    """In a thread of the rollout process: the longest time that it did not run, since the file was last removed."""
    file, worst, last = FOLDER / "heartbeat", 0.0, time.monotonic()
    while True:
        time.sleep(BEAT_S)
        now = time.monotonic()
        is_new = not file.exists()
        if is_new or now - last - BEAT_S > worst:
            worst = now - last - BEAT_S
            (FOLDER / "beat").write_text(f"{worst:.3f}")
            (FOLDER / "beat").rename(file)
        last = now


def start_beat() -> None:
    if not any(thread.name == "heartbeat" for thread in threading.enumerate()):
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()


async def play(client: RolloutClient, prompt: Prompt) -> list[Sample]:
    """One chat of one turn, as a harness would hold it. Faults fall in training alone."""
    global _away_until
    start_beat()
    if time.monotonic() < _away_until:
        raise ConnectionError("the tool server is away")
    training = client.params.temperature > 0
    if training and (fault := claim(OUTAGE)):
        _away_until = time.monotonic() + fault["seconds"]
        raise ConnectionError("the tool server is away")
    async with client.endpoint.session(client, prompt) as session:
        if training and (fault := claim(*MARKS, *CALLS)):
            kind = fault["kind"]
            body = {"content": MARKS[kind], "max_tokens": LONG_TOKENS} if kind in MARKS else CALLS[kind]
            await ask(session.base_url, body)
            raise RuntimeError(f"not for training: {kind}")
        await ask(session.base_url, {"content": prompt.text, "max_tokens": 4})
        samples = session.samples()
    if training and (fault := claim(*RETURNS)):
        return returned(fault["kind"], samples)
    return samples


def returned(kind: str, samples: list[Sample]) -> Any:
    """What an episode gives back that has gone wrong."""
    if kind == "an exit":
        sys.exit("an episode")
    if kind.startswith("an error"):
        raise RuntimeError("an episode" + "\0\ud800" * kind.endswith("NUL"))
    if kind == "NaN as the reward":
        samples[0].reward = math.nan
    elif kind == "NaN as a metric":
        samples[0].rewards = {"tests": math.nan}
    return {"no samples": [], "None": None}.get(kind, samples)


async def ask(base_url: str, body: dict[str, Any]) -> None:
    """One call. Whatever the reply is, the harness goes on."""
    body = dict(body)
    message = {"role": "user", "content": body.pop("content", "1+1=")}
    text = json.dumps({"messages": [message], "tools": TOOLS, "model": "any"} | body)
    url, headers = f"{base_url}/v1/chat/completions", {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as http, http.post(url, data=text.encode(), headers=headers) as reply:
        await reply.read()


def score(answer: str, prompt: Prompt) -> float:
    """In a reward worker."""
    if fault := claim(*JUDGES):
        kind = fault["kind"]
        if kind.endswith("exits"):
            os._exit(7)
        if kind.endswith("NaN"):
            return math.nan
        if kind.endswith("1 MB"):
            print("x" * 10**6, flush=True)
        if kind.endswith("child"):
            subprocess.Popen(["sleep", "600"])
            os._exit(7)
    return paced(answer, prompt) + len(answer) / 16
