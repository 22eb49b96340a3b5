"""vLLM's engine hands over an answer's tokens some at a time, where nobody looks at them before the answer is complete.

With each step vLLM's engine process sends its API server one entry for every running request: one token, and its
log-probability in three arrays. Unpacking the entries takes one thread of the API server about as long as a small
model's step takes the GPU, or longer (docs/benchmarks.md), and what waits for that thread, a pause for new weights too,
waits for all that has piled up. `install` has the engine keep a request's tokens back until there are `tokens` of them,
or the answer ends, and send them as one entry. vLLM takes several tokens in an entry (speculative decoding makes them).

Only requests of which nothing is read before the end are bundled: output kind FINAL_ONLY and no detokenization, as
ours are, and so no stop strings, which the API server looks for. Nothing is kept back across a change of the weights'
version, so that whoever counts tokens by version (vLLM 0.32, and `token_versions` before it) counts the same. Engines
with data parallelism have a loop of their own and are left alone.

BUNDLE_TOKENS in a server's environment sets `tokens`; 1 leaves vLLM as it is.
"""

import functools
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

VARIABLE = "BUNDLE_TOKENS"
DEFAULT = 32
"""Unpacking costs little from here on, and what is kept back when weights change is sent in a few milliseconds."""

INLINE_BYTES = 256
"""Arrays from here on travel as parts of their own behind a message's first part. vLLM before 0.32 then takes the last
part's departure for all parts', and may write its next message over a first part that is still being sent: one that is
large, as when everything that was kept back is sent at once. So no bundle's array becomes as large."""

_MAY_WAIT = ("request_id", "new_token_ids", "new_logprobs")
"""Fields of an entry that may wait. One with anything in another field is sent at once."""


@dataclass
class _Bundle:
    client: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    array_bytes: int = 0

    def add(self, entry: Any) -> None:
        self.token_ids += entry.new_token_ids
        if entry.new_logprobs is not None:
            self.logprobs.append(entry.new_logprobs)
            self.array_bytes += _array_bytes(entry)

    def into(self, entry: Any) -> Any:
        """The entry, with all that was kept back before its own tokens. Log-probabilities join along their first
        dimension, the tokens; the fourth of a `LogprobsLists` is None in one request's."""
        self.add(entry)
        entry.new_token_ids = self.token_ids
        if len(self.logprobs) > 1:
            columns = zip(*(part[:3] for part in self.logprobs), strict=True)
            entry.new_logprobs = type(self.logprobs[0])(*(np.concatenate(column) for column in columns), None)
        elif self.logprobs:
            entry.new_logprobs = self.logprobs[0]
        return entry


class Bundles:
    """Tokens that have not been sent, by request.

    Args:
        tokens: So many are sent together.
        entry_class: vLLM's `EngineCoreOutput`, a msgspec Struct.
        may_wait: Whether a request's tokens may be kept back. Asked at its first token that could be.
    """

    def __init__(self, tokens: int, entry_class: type, may_wait: Callable[[str], bool]) -> None:
        self._tokens, self._entry_class, self._may_wait = tokens, entry_class, may_wait
        self._others = operator.attrgetter(*(set(entry_class.__struct_fields__) - set(_MAY_WAIT)))
        self._nothing = self._others(entry_class(request_id="", new_token_ids=[]))
        self._bundles: dict[str, _Bundle] = {}

    def pass_through(self, client: int, entries: Iterable[Any]) -> list[Any]:
        """What of one step's entries is to be sent now."""
        return [sent for entry in entries if (sent := self._entry(client, entry)) is not None]

    def take(self) -> dict[int, list[Any]]:
        """All that is kept back, as entries for each client."""
        taken: dict[int, list[Any]] = {}
        for request, bundle in self._bundles.items():
            empty = self._entry_class(request_id=request, new_token_ids=[])
            taken.setdefault(bundle.client, []).append(bundle.into(empty))
        self._bundles = {}
        return taken

    def keep_only(self, requests: Collection[str]) -> None:
        """Forget those that have been aborted."""
        for request in [request for request in self._bundles if request not in requests]:
            del self._bundles[request]

    def _entry(self, client: int, entry: Any) -> Any | None:
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
        # Twice: there must be room for one more entry, with which the bundle is sent.
        small = bundle.array_bytes + 2 * _array_bytes(entry) < INLINE_BYTES
        if small and len(bundle.token_ids) + len(entry.new_token_ids) < self._tokens:
            bundle.add(entry)
            return None
        del self._bundles[request]
        return bundle.into(entry)

    def _plain(self, entry: Any) -> bool:
        try:
            return self._others(entry) == self._nothing
        except (ValueError, RuntimeError):  # an array, which is not simply equal to None
            return False


def _array_bytes(entry: Any) -> int:
    """Of the token ids that its log-probabilities belong to: the other arrays are no larger."""
    return 0 if entry.new_logprobs is None else entry.new_logprobs[0].nbytes


def install() -> None:
    """Have engines of this process, or of processes forked from it, bundle. One whose parts are elsewhere stays as it
    is, and the log says so."""
    tokens = _tokens()
    if tokens <= 1:
        return
    try:
        from vllm.v1.engine.core import EngineCoreProc

        run = EngineCoreProc.run_busy_loop
    except (ImportError, AttributeError) as error:
        _say_unknown(error)
        return
    if getattr(run, "bundles", False):
        return

    @functools.wraps(run)
    def run_bundled(self: Any) -> None:
        try:
            bundle_outputs(self, tokens)
        except (ImportError, AttributeError) as error:
            _say_unknown(error)
        run(self)

    run_bundled.bundles = True
    EngineCoreProc.run_busy_loop = run_bundled


def bundle_outputs(engine: Any, tokens: int) -> None:
    """Wrap what one `EngineCoreProc` does with outputs; all of it runs in its one thread."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    scheduler, requests = engine.scheduler, engine.scheduler.requests
    update, finish, call_workers = scheduler.update_from_output, scheduler.finish_requests, engine.collective_rpc
    pause, set_version = engine.pause_scheduler, getattr(engine, "set_weight_version", None)
    attach_version = getattr(engine, "_attach_weight_version", lambda outputs: None)

    def may_wait(request_id: str) -> bool:
        request = requests.get(request_id)
        params = request and request.sampling_params
        if not params or getattr(request, "resumable", False):
            return False
        return params.output_kind == RequestOutputKind.FINAL_ONLY and not params.detokenize

    bundles = Bundles(tokens, EngineCoreOutput, may_wait)

    @functools.wraps(update)
    def update_and_bundle(*args: Any, **kwargs: Any) -> dict[int, Any]:
        by_client = update(*args, **kwargs)
        for client, outputs in by_client.items():
            outputs.outputs = bundles.pass_through(client, outputs.outputs)
        return by_client

    def send_all() -> None:
        outputs = {client: EngineCoreOutputs(outputs=entries) for client, entries in bundles.take().items()}
        attach_version(outputs)
        for item in outputs.items():
            engine.output_queue.put_nowait(item)

    @functools.wraps(finish)
    def finish_and_forget(*args: Any, **kwargs: Any) -> Any:
        result = finish(*args, **kwargs)
        bundles.keep_only(requests)
        return result

    @functools.wraps(call_workers)
    def send_before_new_weights(method: Any, *args: Any, **kwargs: Any) -> Any:
        # The server is paused: what comes later was sampled by the new weights.
        if method == "finish_weight_update":
            send_all()
        return call_workers(method, *args, **kwargs)

    @functools.wraps(pause)
    def send_before_abort(mode: str = "abort", *args: Any, **kwargs: Any) -> Any:
        if mode == "abort":  # what these requests have so far is what their clients get
            send_all()
        return pause(mode, *args, **kwargs)

    scheduler.update_from_output, scheduler.finish_requests = update_and_bundle, finish_and_forget
    engine.collective_rpc, engine.pause_scheduler = send_before_new_weights, send_before_abort
    if set_version is not None:

        @functools.wraps(set_version)
        def send_before_new_version(weight_version: str) -> None:
            send_all()
            set_version(weight_version)

        engine.set_weight_version = send_before_new_version
    logger.info("answers that are read when they are complete leave the engine %d tokens at a time", tokens)


def _tokens() -> int:
    text = os.environ.get(VARIABLE, str(DEFAULT))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE} = {text!r}: the number of tokens that are sent together, at least 1 (1: off)")
    return int(text)


def _say_unknown(error: Exception) -> None:
    logger.warning("this vLLM's engine is unknown (%s): it sends its API server each token by itself", error)
