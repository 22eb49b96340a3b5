"""Part 3: one of two servers answers nonsense, each kind in turn, while a trainer trains in flight.

The run goes on. It names the server, asks another one, and trains on nothing of the nonsense.
"""

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.in_flight import FLAGS, REQUEST_S, sound
from chaos.processes import Broken, Server, Trainer
from chaos.proxy import GENERATE, Proxy, Reply
from chaos.report import Row, row
from chaos.watch import Watch

NAMED_S = REQUEST_S + 3.0
"""From the nonsense until the trainer says which server it came from."""
BACK_S = 15.0

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


@dataclass
class Spoiled:
    """One reply that was spoiled. Times are those of `time.time()`.

    Attributes:
        named_at: When the trainer said that the server is out of traffic; 0 if it never did.
        wrong: What the trainer did in place of asking again, "" if it asked again.
    """

    kind: str
    at: float
    named_at: float = 0.0
    wrong: str = ""


@dataclass
class Garbage:
    """A trainer with a good server and one whose replies are spoiled, each kind `rounds` times.

    If a kind ends the run, another run goes on with the next kind.

    Attributes:
        wrong: What did not hold.
    """

    folder: Path
    seed: int
    rounds: int = 1
    kinds: tuple[str, ...] = tuple(KINDS)
    spoiled: list[Spoiled] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> list[Row]:
        self.random = random.Random(self.seed)
        order = list(self.kinds) * self.rounds
        self.random.shuffle(order)
        with ExitStack() as stack:
            good, bad = (stack.enter_context(Server("embedded", self.folder, name)) for name in ("good", "bad"))
            for server in (good, bad):
                server.wait_healthy()
            proxy = stack.enter_context(Proxy(bad.url))
            while order:
                self._one_run(order, good, proxy)
        return self.rows()

    def rows(self) -> list[Row]:
        groups = {"replies that are none": WHOLE, "replies with wrong content": SPOILED}
        rows = []
        for name, kinds in groups.items():
            own = [spoiled for spoiled in self.spoiled if spoiled.kind in kinds]
            if own:
                detect_s = [spoiled.named_at - spoiled.at for spoiled in own if spoiled.named_at]
                label = f"{name}, {len({spoiled.kind for spoiled in own})} kinds"
                survived = sum(not spoiled.wrong for spoiled in own)
                rows.append(row("garbage, 2 embedded", label, len(own), survived, detect_s, lost="no group"))
        return rows

    def details(self) -> list[str]:
        """What became of each reply."""
        return [
            f"{one.kind}: {one.wrong or f'named after {one.named_at - one.at:.2f} s, asked again'}"
            for one in self.spoiled
        ]

    def _one_run(self, order: list[str], good: Server, proxy: Proxy) -> None:
        """Spoil replies until `order` is empty, or the run has ended."""
        proxy.pass_on()
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        flags = FLAGS | {"--rollout.urls": f"{good.url},{proxy.url}"}
        first_of_run = len(self.spoiled)
        with Trainer(self.folder / "run", flags, self.folder / "scratch") as trainer:
            watch = Watch(trainer)
            watch.wait_for("five steps", lambda: len(watch.steps) >= 5, 120.0)  # version 0 is too old by then
            try:
                while order:
                    self._spoil(order.pop(), proxy, watch)
                wanted = len(watch.steps) + 3
                watch.wait_for("three more steps", lambda: len(watch.steps) >= wanted, 30.0)
            except Broken:
                if trainer.poll() is None:
                    raise
                last = self.spoiled[-1]
                reason = [line for line in trainer.log.splitlines() if "rror: " in line or "rror:" in line][-1:]
                last.wrong = f"it ended the run: {''.join(reason)[:300]}"
                self.wrong.append(f"{last.kind!r}: {last.wrong}")
                return
            finally:
                watch.end()
            trainer.stop()
            trainer.wait(30.0)
            self._check(watch, self.spoiled[first_of_run:])

    def _spoil(self, kind: str, proxy: Proxy, watch: Watch) -> None:
        """Spoil the next reply to a prompt, and wait until the trainer has named the server."""
        watch.wait_for("the bad server in traffic", lambda: watch.is_in(proxy.url), BACK_S)
        done: list[Spoiled] = []

        def change(route: str, request: bytes, reply: Reply) -> Reply:
            # The check before a server is taken up has no request id.
            if route not in GENERATE or reply.status != 200 or done or b'"request_id"' not in request:
                return reply
            if kind in WHOLE:
                changed = WHOLE[kind](reply)
            else:
                content = json.loads(reply.body)
                if not any(choice["token_ids"] for choice in content["choices"]):
                    return reply
                SPOILED[kind](content, self.random)
                changed = Reply(200, as_json(content))
            done.append(Spoiled(kind, time.time()))
            self.spoiled.append(done[0])
            return changed

        proxy.change = change
        watch.wait_for(f"a request at the bad server, to spoil it with {kind!r}", lambda: done, 20.0)
        (spoiled,) = done
        given_up = time.time() + NAMED_S
        watch.wait_for(
            "the bad server out of traffic",
            lambda: watch.first(proxy.url, False, spoiled.at) or time.time() > given_up,
            2 * NAMED_S,
        )
        proxy.pass_on()
        if left := watch.first(proxy.url, False, spoiled.at):
            spoiled.named_at = left.time
        else:
            spoiled.wrong = f"it was not named within {NAMED_S:g} s"
            self.wrong.append(f"{kind!r}: {spoiled.wrong}")

    def _check(self, watch: Watch, spoiled: list[Spoiled]) -> None:
        """Of a run that went on: what was spoiled was asked again, and nothing of it was trained on."""
        lines = [line for _, line in watch.steps]
        retried, last = lines[-1]["rollout/retried"], lines[-1]
        if retried < sum(not one.wrong for one in spoiled):
            self.wrong.append(f"{len(spoiled)} replies were spoiled, only {retried:g} requests were sent again")
        if last["rollout/groups_timed_out"] or last["rollout/groups_late"]:
            self.wrong.append("groups were given up")
        self.wrong += sound(lines)
