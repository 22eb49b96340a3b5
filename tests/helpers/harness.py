"""`scripts/play_episodes.py` with a reward that differs between answers: their length."""

import sys

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import play_episodes


def play(episode: dict) -> dict:
    said = play_episodes.post(f"{episode['base_url']}/v1/completions", {"prompt": episode["prompt"]})
    characters = len(said["choices"][0]["text"])
    return {"reward": characters / 16, "rewards": {"characters": characters}}


if __name__ == "__main__":
    play_episodes.play = play
    play_episodes.main()
