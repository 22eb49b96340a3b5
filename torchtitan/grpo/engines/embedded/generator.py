"""Continuous batching over a transformers model: rows join and leave the batch between two forward passes."""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from torchtitan.grpo.data.samples import FinishReason
from torchtitan.grpo.engines.embedded.kv_cache import RowCache, cache_argument
from torchtitan.grpo.engines.embedded.model import logits_of
from torchtitan.grpo.engines.embedded.routing import RoutingRecorder
from torchtitan.grpo.engines.embedded.sampling import noise_key, sample
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.stop_strings import Decode, ends_in_stop

Mask: TypeAlias = torch.Tensor | dict[str, torch.Tensor]
"""Of all layers, or of each kind of layer."""
PREFILL_TOKENS = 16384
"""Most prompt tokens, padding included, in one forward pass."""


@dataclass(eq=False)
class Answer:
    """One answer that is being generated.

    Attributes:
        key: Key of its noise, see `sampling.uniform`.
        version_starts: (weight version, index of the first token that it sampled).
        routes: If the request asks for them: the experts of consecutive positions, [positions, layers, top_k] each.
        kept: If the request asks for them: the ids of the tokens that could be drawn in place of each, ascending.
        top_tokens: If the request asks for k of them: for each token the k most likely ones in its place, and their
            log-probabilities.
    """

    request: "Request"
    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[tuple[list[int], list[float]]] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    routes: list[np.ndarray] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)

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
    answers: list[Answer] = field(default_factory=list)
    unfinished: int = 0
    cancelled: bool = False
    error: str | None = None

    def __post_init__(self) -> None:
        seed = self.params.seed if self.params.seed is not None else random.SystemRandom().getrandbits(63)
        self.answers = [Answer(self, noise_key(seed, i)) for i in range(self.params.n)]
        self.unfinished = len(self.answers)


Branch = list[Answer]
"""Answers to one request whose tokens are equal so far: one row of the batch, computed once for all of them."""


class Generator:
    """Generates answers with continuous batching. Not thread-safe: one thread makes all calls.

    `step` generates one token for every running answer. Finished answers leave; waiting ones join, first come, first
    served. New prompts are computed in one batch. Answers to one prompt are one row of it, and of the cache, until
    their tokens differ: then the row branches.

    An answer's noise depends only on its request's seed and its own number. So its tokens do not depend on the rest of
    the batch, up to floating-point rounding of the logits: matrix multiplications may round differently at another
    batch size.

    Args:
        model: A causal language model of transformers with full attention in every layer.
        max_sequences: Most answers in the batch.
        max_model_len: Most tokens of prompt and answer together.
        end_token_ids: Tokens that end an answer unless its request sets `ignore_eos`.
        cache_bytes: Most memory for keys and values. An answer is admitted if it fits at its longest, and in a row of
            its own.
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
        config, sizes = model.config, model.config.to_dict()  # Gemma 4 has no one attribute for all layers
        head_dim = sizes.get("head_dim") or config.hidden_size // sizes["num_attention_heads"]
        kv_heads = sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
        token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
        self.cache_tokens = cache_bytes // token_bytes
        self.routing = RoutingRecorder(model)
        self._cache = RowCache(config.num_hidden_layers, self.cache_tokens)
        self._cached = {cache_argument(model.base_model): self._cache, "use_cache": True}
        self._running: list[Branch] = []  # running[r] is row r of the cache
        self._waiting: deque[Answer] = deque()
        self._complete: list[Request] = []  # since the last step that returned

    @property
    def running(self) -> int:
        """How many answers."""
        return sum(map(len, self._running))

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
            self._waiting.extend(request.answers)

    def preempt(self) -> None:
        """Discard the cache. Running answers return to the front of the queue and keep their tokens. They are computed
        again from the first token when they are admitted again, as in vLLM after a pause with `clear_cache`."""
        self._waiting.extendleft(reversed(self._unfinished()))
        self._running = []

    def drop_cache(self) -> None:
        """Free the memory of keys and values. No answer may be running."""
        self._cache.drop()

    def drop(self, error: str | None = None) -> list[Request]:
        """Abort every request now, with the tokens that it has, and return them, and those that a step completed that
        failed later."""
        answers = [answer for answer in (*self._unfinished(), *self._waiting) if answer.finish_reason is None]
        self._running, self._waiting = [], deque()
        self.drop_cache()  # memory that ran out is free again, and a cache that was being resized is whole
        for answer in answers:
            answer.request.error = error
            self._finish(answer, "abort")
        return self._take_complete()

    @torch.inference_mode()
    def step(self, admit: bool = True) -> list[Request]:
        """Sample one more token for every running answer (two for new ones) and return the complete requests.

        Args:
            admit: Whether waiting answers may join.

        Raises:
            FloatingPointError: The model's logits are NaN.
        """
        self._remove_cancelled()
        if admit:
            for batch in self._admissible():
                self._prefill(batch)
        if self._running:
            self._decode()
        return self._take_complete()

    def _take_complete(self) -> list[Request]:
        complete, self._complete = self._complete, []
        return complete

    def _unfinished(self) -> list[Answer]:
        """The running answers, row by row."""
        return [answer for branch in self._running for answer in branch]

    def _longest(self) -> int:
        """Tokens of the longest running answer."""
        return max(branch[0].tokens for branch in self._running)

    def _remove_cancelled(self) -> None:
        if any(branch[0].request.cancelled for branch in self._running):
            rows = enumerate(self._running)
            self._arrange([(row, branch) for row, branch in rows if not branch[0].request.cancelled])
        if any(answer.request.cancelled for answer in self._waiting):
            self._waiting = deque(answer for answer in self._waiting if not answer.request.cancelled)

    def _admissible(self) -> Iterator[list[Branch]]:
        """Take answers from the queue while they fit, and yield them as new rows of at most PREFILL_TOKENS together."""
        longest = max((answer.tokens_max for answer in self._unfinished()), default=0)
        running = self.running
        free = self.max_sequences - running
        batch: list[Branch] = []
        width, admitted = 0, 0
        while self._waiting and admitted < free:
            answer = self._waiting[0]
            longest = max(longest, answer.tokens_max)
            if (running + 1) * longest > self.cache_tokens and running:
                break
            joins = bool(batch) and _are_one_row(answer, batch[-1][0])
            if batch and not joins and (len(batch) + 1) * max(width, answer.tokens) > PREFILL_TOKENS:
                yield batch
                batch, width, running = [], 0, self.running
                continue  # answers of the yielded batch may have finished: check the limits again
            self._waiting.popleft()
            if joins:
                batch[-1].append(answer)
            else:
                batch.append([answer])
            width, running, admitted = max(width, answer.tokens), running + 1, admitted + 1
        if batch:
            yield batch

    def _prefill(self, batch: list[Branch]) -> None:
        """Compute the batch's tokens so far, append its rows to the running ones and sample a token for each answer."""
        inputs = [branch[0].request.prompt_ids + branch[0].token_ids for branch in batch]
        device = self.model.device
        width = max(len(tokens) for tokens in inputs)
        # Padding is on the right, where causal attention hides it from every real token.
        tokens = torch.tensor([t + [0] * (width - len(t)) for t in inputs], device=device)
        columns = torch.arange(width, device=device)
        last = torch.tensor([len(t) - 1 for t in inputs], device=device)
        first = len(self._running)
        self._running += batch  # first: if anything fails, they are dropped with the others
        self._cache.reserve(self.running, self._longest() + 1, keep=first > 0)
        self._cache.prefill(first, len(batch))
        mask = self._mask(columns[None, :], columns[:, None], (None, None))
        self.routing.begin(any(branch[0].request.routes for branch in batch))
        hidden = self._forward(tokens, columns.expand(len(inputs), -1), mask)  # [rows, width, D]
        if self.routing.wanted:
            for branch, chosen in zip(batch, self.routing.take(len(batch), width), strict=True):
                for answer in branch if branch[0].request.routes else []:
                    # Positions that older weights have computed keep their experts.
                    answer.routes.append(chosen[sum(map(len, answer.routes)) : answer.tokens])
        hidden = hidden[torch.arange(len(inputs), device=device), last]
        self._sample(logits_of(self.model, hidden), first)

    def _decode(self) -> None:
        """One token for every running answer."""
        device = self.model.device
        width = self._longest()
        self._cache.reserve(self.running, width, keep=True)
        # A row's newest token is the input. It is not in the cache yet, and its position is its column.
        newest = [(branch[0].token_ids[-1], branch[0].tokens - 1) for branch in self._running]
        inputs = torch.tensor(newest).to(device)
        tokens, positions = inputs[:, :1], inputs[:, 1:]
        self._cache.decode(positions.squeeze(1), width)
        columns = torch.arange(width, device=device)
        mask = self._mask(columns[None, :], positions, (slice(None), None, None))  # [R, 1, 1, width]
        self.routing.begin(any(branch[0].request.routes for branch in self._running))
        hidden = self._forward(tokens, positions, mask)  # [R, 1, D]
        if self.routing.wanted:
            for branch, chosen in zip(self._running, self.routing.take(len(self._running)), strict=True):
                for answer in branch if branch[0].request.routes else []:
                    answer.routes.append(chosen[None])
        self._sample(logits_of(self.model, hidden[:, 0]), 0)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        output = self.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            **self._cached,
        )
        return output.last_hidden_state

    def _mask(self, columns: torch.Tensor, positions: torch.Tensor, index: Any) -> Mask:
        """Additive attention masks in the model's dtype. transformers uses masks of four dimensions as they are.

        Args:
            columns, positions: Of keys and of queries; they broadcast to two dimensions.
            index: Makes four dimensions of these.
        """

        def additive(visible: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
            return zeros.masked_fill_(~visible, -math.inf)[index]

        visible, window = columns <= positions, getattr(self.model.config, "sliding_window", None)
        kinds = set(getattr(self.model.config, "layer_types", None) or ())
        if not window or kinds == {"full_attention"}:
            return additive(visible)
        slides = additive(visible & (columns > positions - window))
        if "full_attention" not in kinds:
            return slides
        return {"full_attention": additive(visible), "sliding_attention": slides}

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """Append a token to the answers of the rows from `first` on, given the rows' logits [R, V]. Rows whose answers
        now differ branch, and finished answers leave."""
        branches = self._running[first:]
        answers = [answer for branch in branches for answer in branch]
        if len(answers) > len(branches):
            sizes = torch.tensor([len(branch) for branch in branches], device=logits.device)
            logits = logits.repeat_interleave(sizes, 0, output_size=len(answers))
        noise = torch.tensor([(answer.key, len(answer.token_ids)) for answer in answers]).to(logits.device)
        temperatures = torch.tensor([answer.request.params.temperature for answer in answers]).to(logits.device)
        top = max(answer.request.top_logprobs for answer in answers)
        cuts = {i: answer.request.params for i, answer in enumerate(answers) if answer.request.params.cuts}
        tokens, logprobs, top_ids, top_values, kept = sample(logits, temperatures, noise[:, 0], noise[:, 1], top, cuts)
        best = list(zip(top_ids.tolist(), top_values.tolist(), strict=True))
        for i, (answer, token, logprob) in enumerate(zip(answers, tokens.tolist(), logprobs.tolist(), strict=True)):
            if logprob != logprob:
                raise FloatingPointError(f"the model's logits are NaN (weight version {self.version!r})")
            if not answer.version_starts or answer.version_starts[-1][0] != self.version:
                answer.version_starts.append((self.version, len(answer.token_ids)))
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
            if answer.request.params.kept:
                answer.kept.append(kept[i])
            if k := answer.request.top_logprobs:
                ids, values = best[i]
                answer.top_tokens.append((ids[:k], values[:k]))
            if self._stops(answer, token):
                self._finish(answer, "stop")
            elif len(answer.token_ids) >= answer.request.params.max_tokens:
                self._finish(answer, "length")
        self._arrange([(row, same) for row, branch in enumerate(self._running) for same in _branches(branch)])

    def _stops(self, answer: Answer, token: int) -> bool:
        """Whether the newest token ends the answer."""
        params, tokens = answer.request.params, answer.token_ids
        if token in params.stop_token_ids or (token in self.end_token_ids and not params.ignore_eos):
            return True
        return self.decode is not None and bool(params.stop) and ends_in_stop(tokens, params.stop, self.decode)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        answer.finish_reason = reason
        answer.request.unfinished -= 1
        if answer.request.unfinished == 0:
            self._complete.append(answer.request)

    def _arrange(self, branches: list[tuple[int, Branch]]) -> None:
        """Make these the running rows, without gaps. Each comes with the row that holds its tokens, and stays there if
        that is possible. Else it gets a copy in a free row.
        """
        rows: list[Branch] = [[] for _ in branches]
        copied: list[tuple[int, Branch]] = []
        for row, branch in branches:
            if row < len(rows) and not rows[row]:
                rows[row] = branch
            else:
                copied.append((row, branch))
        free = [row for row, branch in enumerate(rows) if not branch]
        for target, (_, branch) in zip(free, copied, strict=True):
            rows[target] = branch
        if copied:
            self._cache.copy([row for row, _ in copied], free, max(branch[0].tokens for _, branch in copied))
        self._running = rows


def _are_one_row(answer: Answer, other: Answer) -> bool:
    return answer.request is other.request and answer.token_ids == other.token_ids


def _branches(answers: Branch) -> list[Branch]:
    """Those that are not finished, by their newest token."""
    by_token: dict[int, Branch] = {}
    for answer in answers:
        if answer.finish_reason is None:
            by_token.setdefault(answer.token_ids[-1], []).append(answer)
    return list(by_token.values())
