"""Continuous batching over a transformers model: rows join and leave the batch between two forward passes."""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from torchtitan.grpo.data.samples import FinishReason
from torchtitan.grpo.engines.embedded.kv_cache import RowCache
from torchtitan.grpo.engines.embedded.routing import RoutingRecorder
from torchtitan.grpo.engines.embedded.sampling import noise_key, sample
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.stop_strings import Decode, ends_in_stop

PREFILL_TOKENS = 16384
"""Most prompt tokens, padding included, in one forward pass."""


@dataclass(eq=False)
class AnswerRow:
    """One answer that is being generated: a row of the batch.

    Attributes:
        key: Key of the row's noise, see `sampling.uniform`.
        version_starts: (weight version, index of the first token that it sampled).
        routes: If the request asks for them: the experts of consecutive positions, [positions, layers, top_k] each.
        top_logprobs: If the request asks for k of them: k (token, log-probability) pairs for each token, the sampled
            token first, then the most likely others.
    """

    request: "Request"
    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    routes: list[np.ndarray] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def tokens_max(self) -> int:
        return len(self.request.prompt_ids) + self.request.params.max_tokens


@dataclass(eq=False)
class Request:
    """One prompt and its `params.n` answers. Any thread may set `cancelled`, to drop it at the next step.

    Attributes:
        top_logprobs: How many of the most likely tokens to return with each sampled token.
        flat_logprobs: Return the sampled tokens' log-probabilities as one list.
        routes: Return the experts of its tokens.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    top_logprobs: int = 0
    flat_logprobs: bool = False
    routes: bool = False
    rows: list[AnswerRow] = field(default_factory=list)
    unfinished: int = 0
    cancelled: bool = False
    error: str | None = None

    def __post_init__(self) -> None:
        seed = self.params.seed if self.params.seed is not None else random.SystemRandom().getrandbits(63)
        self.rows = [AnswerRow(self, noise_key(seed, i)) for i in range(self.params.n)]
        self.unfinished = len(self.rows)


class Generator:
    """Generates answers with continuous batching. Not thread-safe: one thread makes all calls.

    `step` generates one token for every running row. Finished rows leave; waiting rows join, first come, first served.
    New prompts are computed in one batch, and answers to one prompt share its computation.

    A row's noise depends only on its request's seed and its own number. So its tokens do not depend on the rest of the
    batch, up to floating-point rounding of the logits: matrix multiplications may round differently at another batch
    size.

    Args:
        model: A causal language model of transformers with full attention in every layer.
        max_sequences: Most rows in the batch.
        max_model_len: Most tokens of prompt and answer together.
        end_token_ids: Tokens that end an answer unless its request sets `ignore_eos`.
        cache_bytes: Most memory for keys and values. A row is admitted if its longest possible answer fits.
        decode: Token ids -> text. None: no request may have stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sequences: int,
        max_model_len: int,
        end_token_ids: tuple[int, ...] = (),
        cache_bytes: int = 4 << 30,
        decode: Decode | None = None,
    ) -> None:
        self.model = model.eval()
        self.max_sequences = max_sequences
        self.max_model_len = max_model_len
        self.end_token_ids = frozenset(end_token_ids)
        self.decode = decode
        self.version = "default"
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
        self.cache_tokens = cache_bytes // token_bytes
        self.routing = RoutingRecorder(model)
        self._cache = RowCache(config.num_hidden_layers)
        self._running: list[AnswerRow] = []  # running[r] is row r of the cache
        self._waiting: deque[AnswerRow] = deque()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError if such a request can never be served."""
        limit = f"--max-model-len is {self.max_model_len}"
        if prompt_tokens >= self.max_model_len:
            raise ValueError(f"the prompt has {prompt_tokens} tokens, {limit}: no room for an answer")
        if prompt_tokens + max_tokens > self.max_model_len:
            raise ValueError(f"prompt and max_tokens are {prompt_tokens} + {max_tokens} tokens, {limit}")
        if prompt_tokens + max_tokens > self.cache_tokens:
            raise ValueError(
                f"prompt and max_tokens are {prompt_tokens} + {max_tokens} tokens, memory holds {self.cache_tokens}"
            )

    def add(self, requests: list[Request]) -> None:
        """Queue requests, in this order."""
        for request in requests:
            self.check(len(request.prompt_ids), request.params.max_tokens)
            self._waiting.extend(request.rows)

    def preempt(self) -> None:
        """Discard the cache. Running rows return to the front of the queue and keep their tokens. They are computed
        again from the first token when they are admitted again, as in vLLM after a pause with `clear_cache`."""
        self._waiting.extendleft(reversed(self._running))
        self._running = []

    def drop_cache(self) -> None:
        """Free the memory of keys and values. No row may be running."""
        self._cache.drop()

    def drop(self, finish_reason: FinishReason = "abort", error: str | None = None) -> list[Request]:
        """End every request now, with the tokens that it has, and return them."""
        rows = [*self._running, *self._waiting]
        self._running, self._waiting = [], deque()
        finished = []
        for row in rows:
            row.request.error = error
            finished += self._finish(row, finish_reason)
        return finished

    @torch.inference_mode()
    def step(self, admit: bool = True) -> list[Request]:
        """Sample one more token for every running row (two for new rows) and return the complete requests.

        Args:
            admit: Whether waiting rows may join.

        Raises:
            FloatingPointError: The model's logits are NaN.
        """
        self._remove_cancelled()
        finished: list[Request] = []
        if admit:
            for batch in self._admissible():
                finished += self._prefill(batch)
        if self._running:
            finished += self._decode()
        return finished

    def _remove_cancelled(self) -> None:
        if any(row.request.cancelled for row in self._running):
            self._keep([not row.request.cancelled for row in self._running])
        if any(row.request.cancelled for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.request.cancelled)

    def _admissible(self) -> Iterator[list[AnswerRow]]:
        """Take rows from the queue while they fit, and yield them in batches of at most PREFILL_TOKENS."""
        longest = max((row.tokens_max for row in self._running), default=0)
        free = self.max_sequences - len(self._running)
        batch: list[AnswerRow] = []
        prompts, width, admitted = 0, 0, 0
        while self._waiting and admitted < free:
            row = self._waiting[0]
            longest = max(longest, row.tokens_max)
            if (len(self._running) + len(batch) + 1) * longest > self.cache_tokens and (self._running or batch):
                break
            shares = bool(batch) and _shares_prompt(row, batch[-1])
            if batch and not shares and (prompts + 1) * max(width, row.tokens) > PREFILL_TOKENS:
                yield batch
                batch, prompts, width = [], 0, 0
                continue  # rows of the yielded batch may have finished: check the limits again
            batch.append(self._waiting.popleft())
            admitted += 1
            prompts, width = prompts + (not shares), max(width, row.tokens)
        if batch:
            yield batch

    def _prefill(self, batch: list[AnswerRow]) -> list[Request]:
        """Compute the batch's tokens so far, append its rows to the running rows and sample a token for each."""
        inputs: list[list[int]] = []
        sources: list[int] = []
        for i, row in enumerate(batch):
            if i == 0 or not _shares_prompt(row, batch[i - 1]):
                inputs.append(row.request.prompt_ids + row.token_ids)
            sources.append(len(inputs) - 1)
        device = self.model.device
        width = max(len(tokens) for tokens in inputs)
        # Padding is on the right, where causal attention hides it from every real token.
        tokens = torch.tensor([t + [0] * (width - len(t)) for t in inputs], device=device)
        columns = torch.arange(width, device=device)
        last = torch.tensor([len(t) - 1 for t in inputs], device=device)
        source_rows = torch.tensor(sources, device=device)
        self._cache.reserve(len(self._running) + len(batch), width + 1, keep=bool(self._running))
        self._cache.prefill(len(self._running), source_rows)
        mask = self._mask(columns[None, :] <= columns[:, None])[None, None]
        self.routing.wanted = any(row.request.routes for row in batch)
        hidden = self._forward(tokens, columns.expand(len(inputs), -1), mask)  # [prompts, width, D]
        if self.routing.wanted:
            chosen = self.routing.take(len(inputs), width)
            for row, source in zip(batch, sources, strict=True):
                if not row.request.routes:
                    continue
                # Positions that older weights have computed keep their experts.
                row.routes.append(chosen[source, sum(map(len, row.routes)) : row.tokens])
        hidden = hidden[torch.arange(len(inputs), device=device), last]
        logits = self.model.get_output_embeddings()(hidden)[source_rows]  # [rows, V]
        first = len(self._running)
        self._running += batch
        return self._sample(logits, first)

    def _decode(self) -> list[Request]:
        """One token for every running row."""
        device = self.model.device
        width = max(row.tokens for row in self._running)
        self._cache.reserve(len(self._running), width, keep=True)
        # A row's newest token is the input. It is not in the cache yet, and its position is its column.
        inputs = torch.tensor([(row.token_ids[-1], row.tokens - 1) for row in self._running]).to(device)
        tokens, positions = inputs[:, :1], inputs[:, 1:]
        self._cache.decode(positions.squeeze(1), width)
        columns = torch.arange(width, device=device)
        mask = self._mask(columns[None, :] <= positions)[:, None, None]  # [R, 1, 1, width]
        self.routing.wanted = any(row.request.routes for row in self._running)
        hidden = self._forward(tokens, positions, mask)  # [R, 1, D]
        if self.routing.wanted:
            for row, chosen in zip(self._running, self.routing.take(len(self._running)), strict=True):
                if row.request.routes:
                    row.routes.append(chosen[None])
        return self._sample(self.model.get_output_embeddings()(hidden[:, 0]), 0)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = self.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """Additive attention mask in the model's dtype. transformers uses a mask of four dimensions as it is."""
        return torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device).masked_fill_(
            ~visible, -math.inf
        )

    def _sample(self, logits: torch.Tensor, first: int) -> list[Request]:
        """Append a token to the running rows from `first` on, given their logits [R, V]. Return finished requests."""
        rows = self._running[first:]
        noise = torch.tensor([(row.key, len(row.token_ids)) for row in rows]).to(logits.device)
        temperatures = torch.tensor([row.request.params.temperature for row in rows]).to(logits.device)
        top = max(row.request.top_logprobs for row in rows)
        cuts = {i: row.request.params.top_p for i, row in enumerate(rows) if row.request.params.top_p != 1}
        tokens, logprobs, top_ids, top_values = sample(logits, temperatures, noise[:, 0], noise[:, 1], top, cuts)
        best = list(zip(top_ids.tolist(), top_values.tolist(), strict=True)) if top else []
        finished: list[Request] = []
        ended = False
        for i, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if logprob != logprob:
                raise FloatingPointError(f"the model's logits are NaN (weight version {self.version!r})")
            if not row.version_starts or row.version_starts[-1][0] != self.version:
                row.version_starts.append((self.version, len(row.token_ids)))
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            params = row.request.params
            if row.request.top_logprobs:
                others = [pair for pair in zip(*best[i], strict=True) if pair[0] != token]
                row.top_logprobs.append([(token, logprob), *others][: row.request.top_logprobs])
            if self._stops(row, token):
                finished += self._finish(row, "stop")
                ended = True
            elif len(row.token_ids) >= params.max_tokens:
                finished += self._finish(row, "length")
                ended = True
        if ended:
            self._keep([row.finish_reason is None for row in self._running])
        return finished

    def _stops(self, row: AnswerRow, token: int) -> bool:
        """Whether the row's newest token ends its answer."""
        params = row.request.params
        if token in params.stop_token_ids or (token in self.end_token_ids and not params.ignore_eos):
            return True
        return self.decode is not None and bool(params.stop) and ends_in_stop(row.token_ids, params.stop, self.decode)

    def _finish(self, row: AnswerRow, reason: FinishReason) -> list[Request]:
        row.finish_reason = reason
        row.request.unfinished -= 1
        return [row.request] if row.request.unfinished == 0 else []

    def _keep(self, keep: list[bool]) -> None:
        """Drop running rows and close the gaps: rows from the end move into the free places."""
        count = sum(keep)
        holes = [i for i in range(count) if not keep[i]]
        movers = [i for i in range(count, len(keep)) if keep[i]]
        if holes:
            self._cache.move(movers, holes, max(self._running[i].tokens for i in movers))
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole] = self._running[mover]
        del self._running[count:]


def _shares_prompt(row: AnswerRow, previous: AnswerRow) -> bool:
    return row.request is previous.request and not row.token_ids and not previous.token_ids
