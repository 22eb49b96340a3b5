"""What a server under suspicion is asked, see `diagnosis`: a few answers, and its own scores of them."""

import asyncio
import pkgutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.teachers.scorers import Scorer

ASKED_S = 30.0
"""For all questions together."""
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS = 4, 4096, 64, 2
Asked = list[Any]
"""[document, prompt tokens, log-probabilities of its answer, scores of all its tokens but the first, or none, and what
could be drawn in place of the answer's tokens: counts and ids of `KeptTokens`, or none]."""


def recorded_prompts(groups: Iterable[Group]) -> dict[str, list[list[int]]]:
    """A few of the prompts that each server has answered."""
    found: dict[str, list[list[int]]] = {}
    for sample in (group[0] for group in groups if group):
        for _, server in sample.servers[:1]:
            prompts = found.setdefault(server, [])
            if len(prompts) < PROMPTS:
                prompts.append(sample.prompt.token_ids)
    return found


def read_otherwise(server: Server, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> str:
    """What the server's tokenizer makes of the prompts' text, if that is not what the trainer's does; "" if it does not
    tell. Requests are token ids, so it shapes no answer, but for stop strings."""
    for text in (tokenizer.decode(list(prompt[:ANSWER_TOKENS])) for prompt in prompts[:1]):
        ours = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        try:
            name = str(server.control.models()[0].get("id"))
            theirs = server.control.tokenize({"model": name, "prompt": text, "add_special_tokens": False})
        except (EngineError, UserError, LookupError):
            continue
        if theirs != ours:
            return f"it reads {text[:30]!r} as {theirs[:6]}, and the trainer as {ours[:6]}"
    return ""


def ask(
    server: Server, version: int, prompts: Sequence[Sequence[int]], params: SamplingParams, api_key: str | None
) -> list[Asked]:
    """Have the server answer the prompts as in rollouts, and score its answers with nothing cached.

    Args:
        server: With a client and an engine, and not used elsewhere.
        version: Which it has. An answer of another one is an error.

    Raises:
        EngineError, UserError: It did not answer, or not in time, or the answer cannot be.
    """
    server.version = version
    params = replace(params, n=ANSWERS, max_tokens=min(params.max_tokens, ANSWER_TOKENS), routes=None, top_tokens=0)
    begins = [list(prompt[:PROMPT_TOKENS]) for prompt in prompts[:PROMPTS]]
    try:
        return asyncio.run(asyncio.wait_for(_ask(server, version, begins, params, api_key), ASKED_S))
    except TimeoutError as error:
        raise EngineError(f"{server.url}: no answer to the questions within {ASKED_S:g} s") from error


async def _ask(
    server: Server, version: int, prompts: Sequence[list[int]], params: SamplingParams, api_key: str | None
) -> list[Asked]:
    client = server.client
    assert client is not None
    try:
        # One after another: the second finds what the first has cached.
        answers = [await client.generate(prompt, params, f"probe-{i}") for i, prompt in enumerate(prompts)]
        found = [(prompt, answer) for prompt, own in zip(prompts, answers, strict=True) for answer in own]
        if others := {token for _, answer in found for token in answer.versions} - {version}:
            raise EngineError(f"{server.url}: weights of version {others.pop()} answer, in place of {version}")
        documents = [prompt + answer.token_ids for prompt, answer in found]
        try:
            scores = await _scores(server, documents, client.weights(version), params, api_key)
        except (EngineError, UserError):  # its answers say something, too
            scores = [[] for _ in documents]
    finally:
        await client.close()
    return [
        [document, len(prompt), answer.logprobs, score, _listed(answer.kept)]
        for document, (prompt, answer), score in zip(documents, found, scores, strict=True)
    ]


def _listed(kept: KeptTokens | None) -> list[list[int]]:
    return [] if kept is None else [kept.counts.tolist(), kept.ids.tolist()]


async def _scores(
    server: Server, documents: Sequence[list[int]], weights: dict[str, Any], params: SamplingParams, api_key: str | None
) -> list[list[float]]:
    """Of all tokens but the first of each; none of each if the server cannot score."""
    if not server.engine.scorer:
        return [[] for _ in documents]
    models = await asyncio.to_thread(server.control.models)
    scorer_type: type[Scorer] = pkgutil.resolve_name(server.engine.scorer)
    scorer = scorer_type(server.url, api_key, str(models[0].get("id")) if models else "", ASKED_S)
    scorer.cut = params.top_k
    scorer.extra = weights | {"extra_key": f"probe-{uuid.uuid4().hex}"}
    try:
        scores = await scorer.score([(document[:1], document[1:]) for document in documents], "probe")
    finally:
        await scorer.close()
    return [score.logprobs for score in scores]
