"""The process of a reward worker. It imports what the reward functions need, and no torch, so it starts quickly.

runner.RewardWorker  ---- lists of Call ---->  serve
                     <--- one Score each -----
"""

import contextlib
import importlib
import os
import re
import signal
from multiprocessing.connection import Connection
from typing import NamedTuple

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.rewards.functions import BUILT_IN, PACKAGES, RewardFunction, checked, resolve


class Call(NamedTuple):
    """One score to compute: the index of the function, the answer's text and its prompt."""

    function: int
    text: str
    prompt: Prompt


class Score(NamedTuple):
    """A score, or 0 and why it failed."""

    value: float
    failure: str = ""


SECRET = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?:_|$)", re.IGNORECASE)
"""Names of environment variables with secrets: HF_TOKEN, AWS_ACCESS_KEY_ID, PGPASSWORD; not TOKENIZERS_PARALLELISM."""


def serve(connection: Connection, names: list[str], pattern: str, hidden: list[str]) -> None:
    """Run a worker process: receive lists of calls and send each score by itself, until the pipe ends.

    Args:
        hidden: Environment variables that are removed before a reward function is imported.
    """
    for name in hidden:
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    functions = [resolve(name) for name in names]
    regexes = [re.compile(pattern) if pattern and name in BUILT_IN else None for name in names]
    for name in names:
        if name in PACKAGES:
            importlib.import_module(name)  # outside the time limit of the first score
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send("ready")
        while True:
            for call in connection.recv():
                connection.send(_score(functions[call.function], regexes[call.function], call))


def _score(function: RewardFunction, regex: re.Pattern[str] | None, call: Call) -> Score:
    try:
        text = call.text
        if regex is not None:
            matches = list(regex.finditer(text))
            if not matches:
                return Score(0.0)  # no final answer
            text = matches[-1].group(1) or ""
        return Score(checked(function(text, call.prompt)))
    except BaseException as error:  # SystemExit and the timeouts of libraries are failures too
        return Score(0.0, f"{type(error).__name__}: {error}"[:500])
