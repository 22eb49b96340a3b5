"""Part 3: one of two servers answers nonsense, each kind in turn, while a trainer trains in flight.

The run goes on. It names the server, asks another one, and trains on nothing of the nonsense.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos.faults import Fault, Kind, Member
from chaos.fleet import Fleet
from chaos.in_flight import REQUEST_S
from chaos.processes import until
from chaos.proxy import GENERATE, Reply
from chaos.report import Row, row

NAMED_S = REQUEST_S + 3.0
"""From the nonsense until the trainer says which server it came from."""
SECONDS = 3600.0
"""In which all kinds must have had their turn."""

Change = Callable[[dict[str, Any], random.Random], None]
"""Spoils a decoded reply in place."""


def first(reply: dict[str, Any]) -> dict[str, Any]:
    """The first answer that has tokens."""
    return next(choice for choice in reply["choices"] if choice["token_ids"])


def put(key: str, value: Any) -> Change:
    """One entry of a list of an answer is this value."""

    def change(reply: dict[str, Any], draw: random.Random) -> None:
        values = first(reply)[key]
        values[draw.randrange(len(values))] = value

    return change


def span(**changes: Any) -> Change:
    """The first span of weight versions of an answer says this."""

    def change(reply: dict[str, Any], _: random.Random) -> None:
        first(reply)["weight_versions"][0].update(changes)

    return change


def version(number: int) -> Change:
    """The first span is of this version of the same run; see `torchtitan.grpo.weight_wire.version_names`."""

    def change(reply: dict[str, Any], _: random.Random) -> None:
        own = first(reply)["weight_versions"][0]
        own["version"] = re.sub(r"^\d+", str(number), own["version"])

    return change


def drop_answer(reply: dict[str, Any], _: random.Random) -> None:
    del reply["choices"][-1]


def no_answers(reply: dict[str, Any], _: random.Random) -> None:
    reply["choices"] = []


def another_answer(reply: dict[str, Any], _: random.Random) -> None:
    reply["choices"].append(dict(reply["choices"][0], index=len(reply["choices"])))


def same_index(reply: dict[str, Any], _: random.Random) -> None:
    for choice in reply["choices"]:
        choice["index"] = 0


def one_logprob_less(reply: dict[str, Any], _: random.Random) -> None:
    del first(reply)["token_logprobs"][-1]


def one_token_more(reply: dict[str, Any], _: random.Random) -> None:
    first(reply)["token_ids"].append(5)


def too_long(reply: dict[str, Any], _: random.Random) -> None:
    """More tokens than were allowed, consistently."""
    choice = first(reply)
    choice["token_ids"] += [5] * 100
    choice["token_logprobs"] += [-1.0] * 100
    choice["weight_versions"][-1]["end"] = len(choice["token_ids"])


def aborted(reply: dict[str, Any], _: random.Random) -> None:
    first(reply)["finish_reason"] = "abort"


SPOILED: dict[str, Change] = {
    "no answers": no_answers,
    "an answer too few": drop_answer,
    "an answer too many": another_answer,
    "answers with one index": same_index,
    "a log-probability too few": one_logprob_less,
    "a token too many": one_token_more,
    "more tokens than asked": too_long,
    "token -1": put("token_ids", -1),
    "token 2^70": put("token_ids", 2**70),
    "token 10^6": put("token_ids", 10**6),
    "a token that is a text": put("token_ids", "the"),
    "log-probability NaN": put("token_logprobs", float("nan")),
    "log-probability -Infinity": put("token_logprobs", float("-inf")),
    "log-probability 1e300": put("token_logprobs", 1e300),
    "log-probability +50": put("token_logprobs", 50.0),
    "a log-probability that is null": put("token_logprobs", None),
    "a version that was never sent": version(999999),
    "a version that is negative": version(-3),
    "a version from before the request": version(0),
    "weights of another run": span(version="3@elsewhere-1-1"),
    "weights with another name": span(version="default"),
    "a span past the end": span(end=10**6),
    "a span before the beginning": span(start=-2),
    "an answer that was aborted": aborted,
}
"""Replies that parse, or nearly. Each must be refused."""


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


WHOLE: dict[str, Callable[[Reply], Reply]] = {
    "not JSON": lambda reply: Reply(200, b"<html><body>504 Gateway Time-out</body></html>"),
    "half of the JSON": lambda reply: Reply(200, reply.body[: len(reply.body) // 2]),
    "an empty body": lambda reply: Reply(200, b""),
    "random bytes": lambda reply: Reply(200, random.Random(0).randbytes(2000)),
    "a list": lambda reply: Reply(200, b"[1, 2, 3]"),
    "JSON 10,000 deep": lambda reply: Reply(200, b"[" * 10_000 + b"]" * 10_000),
    "HTTP 400": lambda reply: Reply(400, as_json({"error": {"message": "bad request"}})),
    "HTTP 429": lambda reply: Reply(429, b"slow down"),
    "HTTP 500": lambda reply: Reply(500, as_json({"error": {"message": "CUDA error"}})),
    "HTTP 503": lambda reply: Reply(503, b""),
    "a cut connection": lambda reply: Reply(200, reply.body, cut=True),
    "a drip": lambda reply: Reply(200, reply.body, drip_s=0.5),
}
"""Replies that are none."""
KINDS = [*WHOLE, *SPOILED]


def spoiled(name: str, draw: random.Random) -> Fault:
    """The fault that spoils the next reply to a prompt."""

    def fault(member: Member) -> Iterator[float | None]:
        fell: list[float] = []

        def change(route: str, request: bytes, reply: Reply) -> Reply:
            # The check before a server is taken up has no request id.
            if route not in GENERATE or reply.status != 200 or fell or b'"request_id"' not in request:
                return reply
            if name in WHOLE:
                changed = WHOLE[name](reply)
            else:
                content = json.loads(reply.body)
                if not any(choice["token_ids"] for choice in content["choices"]):
                    return reply
                SPOILED[name](content, draw)
                changed = Reply(200, as_json(content))
            fell.append(time.time())
            return changed

        member.proxy.change = change
        until(f"a request at {member.url}, to spoil it with {name!r}", lambda: fell, 20.0)
        yield fell[0]
        member.proxy.pass_on()

    return fault


class Garbage(Fleet):
    """A trainer with a good server and one whose replies are spoiled, each kind `rounds` times."""

    def __init__(self, folder: Path, seed: int, rounds: int = 1, **how: Any) -> None:
        super().__init__(folder, "embedded", 2, SECONDS, seed, faults=rounds * len(KINDS), **how)
        self.pause_s = (0.0, 0.3)  # a spoiled reply leaves nothing to recover from
        draw = random.Random(seed)
        self.kinds = [Kind(name, spoiled(name, draw), NAMED_S, (0.0, 0.0), by_proxy=True) for name in KINDS]

    def hit(self, members: list[Member]) -> list[Member]:
        return [member for member in members if member.proxy]

    def rows(self) -> list[Row]:
        rows = []
        for name, kinds in {"replies that are none": WHOLE, "replies with wrong content": SPOILED}.items():
            own = [injection for injection in self.injections if injection.kind.name in kinds]
            if own:
                detect_s = [injection.out_at - injection.at for injection in own if injection.out_at]
                label = f"{name}, {len({injection.kind.name for injection in own})} kinds"
                survived = sum(not injection.wrong for injection in own)
                rows.append(row("garbage, 2 embedded", label, len(own), survived, detect_s, lost="no group"))
        return rows

    def check(self) -> None:
        """What was spoiled was asked again, and no group was given up for it."""
        super().check()
        last = self.watch.steps[-1][1]
        retried, spoilt = last["rollout/retried"], sum(not injection.wrong for injection in self.injections)
        if retried < spoilt:
            self.wrong.append(f"{spoilt} replies were spoiled, only {retried:g} requests were sent again")
        if last["rollout/groups_timed_out"] or last["rollout/groups_late"]:
            self.wrong.append("groups were given up")
