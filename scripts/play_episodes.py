#!/usr/bin/env python3
"""A harness of its own process: it plays the episodes of a run and posts their rewards. docs/endpoint.md explains it.

    python grpo_train.py --job.config_file train_configs/quickstart.toml --rollout.serve_port 8100 \
        --rollout.environment endpoint --reward.functions ""
    python scripts/play_episodes.py http://127.0.0.1:8100

It asks the model for one answer, and rewards the right one. Yours may do anything between the first and the last model
call: any OpenAI client works with base_url = episode["base_url"] + "/v1".
"""

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

EPISODES_AT_ONCE = 16
START_TIMEOUT_S = 300.0  # until the run listens
KEY = os.environ.get("SERVE_KEY", "")  # what [rollout] serve_key_env holds


def post(url: str, body: dict) -> dict | None:
    """The reply as an object; None if it is empty."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read() or "null")


def play(episode: dict) -> dict:
    """One episode; returns its outcome."""
    said = post(f"{episode['base_url']}/v1/completions", {"prompt": episode["prompt"]})
    right = said["choices"][0]["text"].strip() == episode["answer"]
    return {"reward": float(right), "rewards": {"right": float(right)}}


def work(server: str) -> int:
    """Play until the run has ended; the number of episodes."""
    played, deadline = 0, time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            episode = post(f"{server}/episodes/next", {"wait_seconds": 30})
            if episode is None:
                continue
            deadline = 0.0
            post(f"{server}/episodes/{episode['id']}", play(episode))
            played += 1
        except urllib.error.HTTPError as error:
            if error.code != 410:  # this episode is not wanted any more, or the run has ended
                raise
            time.sleep(0.1)
        except (OSError, http.client.HTTPException):
            if time.monotonic() > deadline:
                return played
            time.sleep(0.5)


def main() -> None:
    server = sys.argv[1].rstrip("/")
    with ThreadPoolExecutor(EPISODES_AT_ONCE) as threads:
        played = sum(threads.map(work, [server] * EPISODES_AT_ONCE))
    print(f"The run has ended. Episodes played: {played}")


if __name__ == "__main__":
    main()
