"""vLLM's engine core sends a request's tokens in bundles, not one by one.

After each step vLLM's engine core sends its API server one entry for every running request: one token, and its
log-probability in three arrays. One thread of the API server unpacks them. For a small model that takes as long as the
GPU's step, or longer (docs/benchmarks.md), so entries pile up, and a pause for new weights waits behind them. `install`
keeps a request's tokens back until there are `tokens_per_entry` of them or the answer ends, and then sends one entry.
vLLM accepts several tokens in an entry, as speculative decoding makes them.

Only requests that are read when they are complete are bundled: output kind FINAL_ONLY and no detokenization, as our
trainer's are. (So they have no stop strings, which the API server would look for.) Nothing is kept back across a change
of weight version, so counts of tokens by version do not change. Engines with data parallelism run another loop and are
left alone.

With routing replay each entry also has the token's experts. They are kept back until the answer ends, or a pause aborts
it: nobody reads them before. A reply to vLLM's own route /abort_requests has none.

BUNDLE_TOKENS in a server's environment sets `tokens_per_entry`; 1 leaves vLLM as it is.
"""

import functools
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan.grpo.inside_vllm.whole_update import TAKE

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

VARIABLE = "BUNDLE_TOKENS"
DEFAULT = 32
"""Unpacking is cheap from here on. Sending what was kept back when weights change takes a few milliseconds."""

INLINE_BYTES = 256
"""No array of a bundle becomes as large as this. vLLM sends larger arrays as separate parts of a message. vLLM before
0.32 takes the departure of the last part for that of all parts, and may then overwrite a first part that is still being
sent. That happens to a large first part, such as everything that was kept back."""

LARGE_PER_MESSAGE = 16
"""Entries with larger arrays, which are experts, leave in messages of so few that the first part is small: pyzmq copies
a part below 64 KiB, and an entry without its large arrays has about 1 KiB."""

_MASK = "new_sampling_mask"
"""The field with the tokens that the sampler kept, from vLLM 0.32 on: vLLM's `SamplingMaskLists`."""
_MAY_WAIT = ("request_id", "new_token_ids", "new_logprobs", _MASK)
"""Fields of an entry that may wait. An entry with a value in any other field is sent at once."""
_EXPERTS = "routed_experts"
"""The field with the experts of tokens: an array of which each row is a position's."""


class Step:
    """A step's log-probabilities, of one token each: plain numbers in place of vLLM's `LogprobsLists`. vLLM makes three
    arrays for each request, which takes longer than all that is done with them here."""

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.ids, self.values, self.ranks = (part.ravel().tolist() for part in lists[:3])

    def slice_request(self, row: int, count: int) -> "_Row":
        """vLLM's name, and its arguments."""
        return _Row(self, row, count)


@dataclass(slots=True)
class _Row:
    """What a request's entry has in place of its arrays until `pass_through`."""

    step: Step
    number: int
    count: int

    def arrays(self) -> Any:
        return self.step.lists.slice_request(self.number, self.count)


@dataclass
class _Bundle:
    """A request's tokens that wait, and the columns of their log-probabilities.

    Plain numbers, since the engine does this for each token that it samples: an array of one row costs more.

    Attributes:
        like: The first of its log-probabilities, vLLM's `LogprobsLists`, with the columns' types.
        width: Log-probabilities of each token: as many as the narrowest entry has. vLLM gives every request of a step
            as many as the greediest of them asks for, so no entry has fewer than its own request needs.
        masks: The tokens that were kept, of one entry after the other.
        room: How many entries of one token may still join without a look at their arrays.
    """

    client: int
    token_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    like: Any = None
    width: int = 0
    room: int = 0

    def keep(self, entry: Any, tokens_max: int) -> bool:
        """Add an entry, unless it completes the bundle."""
        if self.token_ids and not self.room:
            return False
        own, tokens = _array_bytes(entry), len(entry.new_token_ids)
        left = tokens_max - 1 - tokens - len(self.token_ids)
        kept = len(self.ids) * self.like[0].itemsize if self.ids else 0
        # Twice: the entry that completes the bundle must fit too.
        if left < 0 or kept + 2 * own >= INLINE_BYTES:
            return False
        self.add(entry)
        row_bytes = -(-own // tokens)
        self.room = min(left, max(0, (INLINE_BYTES - 1 - kept - own) // row_bytes - 1)) if row_bytes else left
        return True

    def add(self, entry: Any) -> None:
        self.token_ids += entry.new_token_ids
        if (mask := getattr(entry, _MASK, None)) is not None:
            self.masks.append(mask)
        logprobs = entry.new_logprobs
        if logprobs is None:
            return
        if type(logprobs) is _Row:
            if self.width > 1:
                self._narrow(1)
            step, row = logprobs.step, logprobs.number
            self.ids.append(step.ids[row])
            self.values.append(step.values[row])
            self.ranks.append(step.ranks[row])
            return
        ids, values, ranks, *_ = logprobs
        if self.like is None:
            self.like, self.width = logprobs, ids.shape[1]
        if ids.size == self.width == 1:
            self.ids.append(ids.item())
            self.values.append(values.item())
            self.ranks.append(ranks.item())
            return
        if ids.shape[1] < self.width:
            self._narrow(ids.shape[1])
        self.ids += ids[:, : self.width].ravel().tolist()
        self.values += values[:, : self.width].ravel().tolist()
        self.ranks += ranks.tolist()

    def _narrow(self, width: int) -> None:
        self.ids = [value for i, value in enumerate(self.ids) if i % self.width < width]
        self.values = [value for i, value in enumerate(self.values) if i % self.width < width]
        self.width = width

    def into(self, entry: Any) -> Any:
        """The entry, with the kept-back tokens before its own. The fourth field of one request's `LogprobsLists` is
        None."""
        self.add(entry)
        entry.new_token_ids = self.token_ids
        if self.masks:
            setattr(entry, _MASK, _joined(self.masks))
        if self.like is not None:
            columns = zip((self.ids, self.values, self.ranks), self.like[:3], strict=True)
            ids, values, ranks = (np.array(column, part.dtype) for column, part in columns)
            rows = -1, self.width
            entry.new_logprobs = type(self.like)(ids.reshape(rows), values.reshape(rows), ranks, None)
        return entry


class _Experts:
    """Experts of a request's positions so far, as bytes: a row's view would keep the array of its whole step."""

    def __init__(self, client: int, like: np.ndarray) -> None:
        self.client = client
        self._bytes, self._dtype, self._of_row = bytearray(), like.dtype, like.shape[1:]

    def add(self, rows: np.ndarray) -> None:
        self._bytes += rows.tobytes()

    def rows(self) -> np.ndarray:
        return np.frombuffer(self._bytes, self._dtype).reshape(-1, *self._of_row)


class Bundles:
    """Tokens, and experts of tokens, that have not been sent yet, by request.

    Args:
        tokens: Tokens per bundle.
        entry_class: vLLM's `EngineCoreOutput`, a msgspec Struct.
        may_wait: Whether a request's tokens may be kept back. Called once per bundle, with the request's name.
    """

    def __init__(self, tokens: int, entry_class: Any, may_wait: Callable[[str], bool]) -> None:
        self._tokens, self._entry_class, self._may_wait = tokens, entry_class, may_wait
        self._others = operator.attrgetter(*(set(entry_class.__struct_fields__) - set(_MAY_WAIT)))
        self._nothing = self._others(entry_class(request_id="", new_token_ids=[]))
        self._bundles: dict[str, _Bundle] = {}
        self._experts: dict[str, _Experts] = {}

    def pass_through(self, client: int, entries: Iterable[Any]) -> list[Any]:
        """Those of one step's entries that are to be sent now."""
        sent, bundles, plain = [], self._bundles, self._plain
        for entry in entries:  # the engine's one thread does this for each token that it samples
            bundle = bundles.get(entry.request_id)
            if bundle is not None and bundle.room and len(entry.new_token_ids) == 1 and plain(entry):
                bundle.room -= 1  # `like` is set: another entry came first
                bundle.add(entry)
                continue
            if type(row := entry.new_logprobs) is _Row:
                entry.new_logprobs = row.arrays()
            if (now := self._entry(client, entry)) is not None:
                sent.append(now)
        return sent

    def take(self, experts: bool = False) -> dict[int, list[Any]]:
        """All tokens that were kept back, as entries by client; with `experts` those too."""
        made: dict[str, tuple[int, Any]] = {}
        for request, bundle in self._bundles.items():
            made[request] = bundle.client, bundle.into(self._entry_class(request_id=request, new_token_ids=[]))
        self._bundles = {}
        for request, known in self._experts.items() if experts else ():
            empty = self._entry_class(request_id=request, new_token_ids=[])
            setattr(made.setdefault(request, (known.client, empty))[1], _EXPERTS, known.rows())
        if experts:
            self._experts = {}
        taken: dict[int, list[Any]] = {}
        for client, entry in made.values():
            taken.setdefault(client, []).append(entry)
        return taken

    def keep_only(self, requests: Collection[str]) -> None:
        """Forget all other requests: they were aborted."""
        self._bundles = {request: bundle for request, bundle in self._bundles.items() if request in requests}
        self._experts = {request: known for request, known in self._experts.items() if request in requests}

    def _keep_experts(self, client: int, entry: Any) -> None:
        """Take the experts out of an entry, and put all of the request's into its last one."""
        request, rows = entry.request_id, getattr(entry, _EXPERTS, None)
        known, ended = self._experts.get(request), entry.finish_reason is not None
        if known is None:
            if rows is None or ended or not self._may_wait(request):
                return
            known = self._experts[request] = _Experts(client, rows)
        if rows is not None:
            known.add(rows)
        setattr(entry, _EXPERTS, known.rows() if ended else None)
        if ended:
            del self._experts[request]

    def _entry(self, client: int, entry: Any) -> Any | None:
        self._keep_experts(client, entry)
        request = entry.request_id
        bundle = self._bundles.get(request)
        if not entry.new_token_ids or not self._plain(entry):
            if bundle is not None:
                del self._bundles[request]
                return bundle.into(entry)
            return entry
        if bundle is None:
            if not self._may_wait(request):
                return entry
            bundle = self._bundles[request] = _Bundle(client)
        if bundle.keep(entry, self._tokens):
            return None
        del self._bundles[request]
        return bundle.into(entry) if bundle.token_ids else entry

    def _plain(self, entry: Any) -> bool:
        try:
            return self._others(entry) == self._nothing
        except (ValueError, RuntimeError):  # an array, which is not simply equal to None
            return False


def _joined(masks: list[Any]) -> Any:
    """`SamplingMaskLists` of positions in a row. One of a single position has no offsets."""
    lengths = [[len(mask.token_ids)] if mask.offsets is None else np.diff(mask.offsets) for mask in masks]
    ids = np.concatenate([mask.token_ids for mask in masks])
    return type(masks[0])(ids, np.concatenate([[0], *lengths]).cumsum())


def _array_bytes(entry: Any) -> int:
    """Bytes of the entry's token-id array, the largest of its log-probability arrays."""
    return 0 if entry.new_logprobs is None else entry.new_logprobs[0].nbytes


def messages(entries: list[Any]) -> list[list[Any]]:
    """Entries as messages. Those with experts are few to each. Those without come last, in one that may be empty."""
    large = [entry for entry in entries if getattr(entry, _EXPERTS, None) is not None]
    if not large:
        return [entries]
    small = [entry for entry in entries if getattr(entry, _EXPERTS, None) is None]
    return [large[i : i + LARGE_PER_MESSAGE] for i in range(0, len(large), LARGE_PER_MESSAGE)] + [small]


def install(engine: Any) -> None:
    """Bundle the outputs of one `EngineCoreProc` with `set_weight_version`: wrap what it does with them. All of it runs
    in its one thread."""
    if (tokens := tokens_per_entry()) == 1:
        return
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    scheduler, requests = engine.scheduler, engine.scheduler.requests
    update, finish, call_workers = scheduler.update_from_output, scheduler.finish_requests, engine.collective_rpc
    pause, set_version = engine.pause_scheduler, engine.set_weight_version
    attach_version = getattr(engine, "_attach_weight_version", lambda outputs: None)

    def may_wait(request_id: str) -> bool:
        request = requests.get(request_id)
        params = request and request.sampling_params
        if not params or getattr(request, "resumable", False):
            return False
        return params.output_kind == RequestOutputKind.FINAL_ONLY and not params.detokenize

    bundles = Bundles(tokens, EngineCoreOutput, may_wait)

    updating = False

    @functools.wraps(update)
    def update_and_bundle(scheduled: Any, sampled: Any) -> dict[int, Any]:
        nonlocal updating
        logprobs = sampled.logprobs
        if logprobs is not None and logprobs[0].shape[1] == 1 and logprobs[3] is None:
            sampled.logprobs = Step(logprobs)
        updating = True
        try:
            by_client = update(scheduled, sampled)
        finally:
            updating = False
        for client, outputs in by_client.items():
            *first, outputs.outputs = messages(bundles.pass_through(client, outputs.outputs))
            send(client, first)
        return by_client

    def send(client: int, parts: list[list[Any]]) -> None:
        for entries in parts:
            outputs = {client: EngineCoreOutputs(outputs=entries)}
            attach_version(outputs)
            engine.output_queue.put_nowait((client, outputs[client]))

    def send_all(experts: bool = False) -> None:
        for client, entries in bundles.take(experts).items():
            send(client, [part for part in messages(entries) if part])

    @functools.wraps(finish)
    def finish_and_forget(*args: Any, **kwargs: Any) -> Any:
        result = finish(*args, **kwargs)
        if not updating:  # else answers have ended whose last entries are still to come
            bundles.keep_only(requests)
        return result

    @functools.wraps(call_workers)
    def send_before_new_weights(method: Any, *args: Any, **kwargs: Any) -> Any:
        # The server is paused. Later tokens are sampled by the new weights. The API server reads while weights come.
        if method == TAKE:
            send_all()
        return call_workers(method, *args, **kwargs)

    @functools.wraps(pause)
    def send_before_abort(mode: str = "abort", *args: Any, **kwargs: Any) -> Any:
        if mode == "abort":  # clients get what their requests have so far
            send_all(experts=True)
        return pause(mode, *args, **kwargs)

    @functools.wraps(set_version)
    def send_before_new_version(weight_version: str) -> None:
        send_all()
        set_version(weight_version)

    scheduler.update_from_output, scheduler.finish_requests = update_and_bundle, finish_and_forget
    engine.collective_rpc, engine.pause_scheduler = send_before_new_weights, send_before_abort
    engine.set_weight_version = send_before_new_version
    logger.info("Answers that are read when complete leave the engine %d tokens at a time.", tokens)


def tokens_per_entry() -> int:
    """BUNDLE_TOKENS, or its default. ValueError unless it is a positive integer."""
    text = os.environ.get(VARIABLE, str(DEFAULT))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE} = {text!r}: set the number of tokens per bundle, at least 1 (1 turns it off)")
    return int(text)
