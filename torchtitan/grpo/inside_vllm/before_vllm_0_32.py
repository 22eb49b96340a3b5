"""What only vLLM before 0.32 needs: names as 0.32 has them, and which weights sampled which token.

**Remove when the oldest vLLM in `plugin.TESTED` is 0.32.** This module then goes, with its tests, their plug-in
`tests/helpers/counted_versions.py` and `test_our_count_is_vllms`. With it go the few lines that stand where they act:

    process/server_commands/vllm.py     the search for --enable-scale-out, which is then always a flag; `engine_folder`
                                        of command.py need return nothing
    engines/vllm.py, vllm_control.py    a token's version by its start; no /weight_info
    inside_vllm/transfer_engine.py      `trainer_send_weights` and `_vllm_config`
    inside_vllm/plugin.py, whole_update.py    the marks; the look for `set_weight_version`

vLLM 0.32 returns `weight_versions` with each choice of its generate route: spans [{"version", "start", "end"}] over the
answer's tokens. An older vLLM returns the same by bookkeeping in its API server:

- The engine core puts a mark among its outputs when a version is taken into service (`mark_versions`): an entry of a
  request that nobody made. Outputs stay in order up to their processing, so the mark divides the tokens exactly.
- Where the mark is reached, the API server knows how many tokens each answer has (`install`).

It costs nothing per token, and one pass over the running requests per update.

It is exact only for updates during which the server is paused, which weight sync's always are, and only with one API
server and one engine. With data parallelism, several API servers or unknown vLLM internals, replies stay vLLM's own,
and the client labels an answer with the version of its start.
"""

import functools
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from torchtitan.grpo.inside_vllm.replies import with_field

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

KEY = "weight_versions"
"""vLLM 0.32's name for the spans, in a choice of the reply and in `CompletionOutput`."""
FIRST = "default"
"""vLLM 0.32's name for the weights that a server starts with."""

OTHERWISE = "answers that run across a weight update carry the version of their start"
"""What becomes of a vLLM whose internals are others."""

_MARK = "torchtitan-grpo weights "
"""How the request of a mark begins; then comes the version's name."""

Span = dict[str, Any]


class VersionLedger:
    """Versions of the tokens of running requests: call `serve` at each update and `take` when a request is finished."""

    def __init__(self) -> None:
        self._version = FIRST
        self._starts: dict[str, list[tuple[str, int]]] = {}

    def serve(self, version: str, num_tokens: Mapping[str, int]) -> None:
        """From now on `version` samples.

        Args:
            num_tokens: How many tokens the answer of every running request has so far, by the request's name.
        """
        # Requests that no longer run, because they were aborted, are forgotten here.
        self._starts = {
            request: [*self._starts.get(request, [(self._version, 0)]), (version, tokens)]
            for request, tokens in num_tokens.items()
        }
        self._version = version

    def take(self, request: str, num_tokens: int) -> list[Span]:
        """Spans that cover the `num_tokens` tokens of a finished request, which is then forgotten."""
        starts = self._starts.pop(request, [(self._version, 0)])
        ends = [start for _, start in starts[1:]] + [num_tokens]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(starts, ends, strict=True)
            if end > start
        ]


def reported_by_vllm() -> bool:
    """Whether this vLLM returns the spans itself."""
    from vllm.outputs import CompletionOutput

    return hasattr(CompletionOutput, KEY)


def loaded_name(name: str) -> str:
    """A parameter's name as vLLM's `load_weights` returns it: 0.25 calls experts by the module that loads them, and not
    by the one inside it that holds them. Of a name that is one already, the same."""
    return name.replace(".experts.routed_experts.", ".experts.")


def token_of(entry: dict[str, Any]) -> int:
    """The token of a log-probability in a reply: vLLM 0.32 has `token_id`, 0.25 has `token` as "token_id:123"."""
    return int(entry["token_id"] if "token_id" in entry else str(entry["token"]).rpartition(":")[2])


def mark_versions() -> None:
    """Have this process's engine core mark where a version begins. Versions that vLLM reports stay so."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore

    own = getattr(EngineCore, "set_weight_version", lambda core, version: None)

    @functools.wraps(own)
    def set_weight_version(self: Any, weight_version: str) -> None:
        mark = EngineCoreOutputs(outputs=[EngineCoreOutput(_MARK + weight_version, [])])
        self.output_queue.put_nowait((0, mark))
        own(self, weight_version)

    EngineCore.set_weight_version = set_weight_version


def install(key: str = KEY) -> None:
    """Have this process's vLLM return spans as `key` of each choice. Its engine core has `mark_versions`."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    process_outputs = OutputProcessor.process_outputs
    new_completion_output = RequestState._new_completion_output
    full_generator = ServingTokens.serve_tokens_full_generator

    ledger: VersionLedger | None = VersionLedger()

    def give_up(error: Exception) -> None:
        nonlocal ledger
        if ledger is not None:
            logger.warning("This vLLM is not as expected (%s): %s.", error, OTHERWISE)
        ledger = None

    @functools.wraps(process_outputs)
    def heed_marks(self: OutputProcessor, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        if ledger is not None and outputs and outputs[0].request_id.startswith(_MARK):  # it comes alone
            try:
                states = self.request_states.items()
                counted = {name: state.detokenizer.num_output_tokens() for name, state in states}
                ledger.serve(outputs[0].request_id.removeprefix(_MARK), counted)
            except AttributeError as error:
                give_up(error)
        return process_outputs(self, outputs, *args, **kwargs)  # vLLM passes over requests that it does not know

    @functools.wraps(new_completion_output)
    def completion_with_spans(
        self: RequestState, token_ids: list[int], finish_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = new_completion_output(self, token_ids, finish_reason, *args, **kwargs)
        if ledger is not None and finish_reason is not None:
            setattr(output, key, ledger.take(self.request_id, self.detokenizer.num_output_tokens()))
        return output

    @functools.wraps(full_generator)
    async def reply_with_spans(
        self: ServingTokens, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        last = None

        async def kept() -> AsyncIterator[Any]:
            nonlocal last
            async for last in results:
                yield last

        reply = await full_generator(self, request, kept(), *args, **kwargs)
        if ledger is None or last is None or not hasattr(reply, "choices") or not _one_engine(self.engine_client):
            return reply
        spans = {output.index: getattr(output, key, None) for output in last.outputs}
        return with_field(reply, key, spans)

    OutputProcessor.process_outputs = heed_marks
    RequestState._new_completion_output = completion_with_spans
    ServingTokens.serve_tokens_full_generator = reply_with_spans


def _one_engine(engine_client: Any) -> bool:
    one_api_server = getattr(engine_client.engine_core, "client_count", 1) == 1
    return one_api_server and engine_client.vllm_config.parallel_config.data_parallel_size == 1
