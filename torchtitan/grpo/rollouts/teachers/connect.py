"""The start: find the teachers, and refuse what cannot teach this model."""

from __future__ import annotations

import asyncio
import logging
import os
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.config.urls import teachers_by_source
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.engines.vllm_control import served_identity
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.teachers.scorers import Scorer
from torchtitan.grpo.rollouts.teachers.teachers import Teachers, about_teachers
from torchtitan.grpo.weight_wire.model_identity import ModelIdentity

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 60.0
PROBED_TOKENS = 1024
"""Tokens of the vocabulary, evenly spaced, whose texts both tokenizers must encode alike."""
PROBE = 8
"""So many texts are one probe: it must not be longer than what a server takes."""


def connect_teachers(config: JobConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Teachers | None:
    """The teachers of `[distill]`, each of which can score this run's answers; None without any.

    Waits for their health, at most `[rollout] start_timeout_seconds` each.

    Args:
        vocab_size: Of the trained model.

    Raises:
        UserError: One is not healthy, takes too few tokens, does not tell `[distill] top_k` tokens, serves another
            model than the others of its list, or has another tokenizer than the trained model. The message names it
            and says what to change.
    """
    distill, rollout = config.distill, config.rollout
    if not distill.teacher_urls:
        return None
    key = os.environ.get(distill.api_key_env) if distill.api_key_env else None
    longest = config.data.max_prompt_tokens + rollout.max_answer_tokens + 1  # servers want room for a token of theirs
    probes = list(vocabulary_probes(tokenizer))
    engine = ENGINES[distill.engine]
    scorer: type[Scorer] = pkgutil.resolve_name(engine.scorer)
    scorers: dict[str, list[Scorer]] = {}
    models: dict[str, ModelIdentity] = {}
    known: dict[str, Scorer] = {}  # a server may teach several sources
    for source, urls in teachers_by_source(distill.teacher_urls).items():
        for url in urls:
            control = engine.control(url, key, CHECK_TIMEOUT_S)
            try:
                if url not in known:
                    control.wait_healthy(rollout.start_timeout_seconds)
                    name, models[url] = served_by(control, longest)
                    check_tokenizer(control, name, tokenizer, probes)
                    request_s = rollout.request_timeout_seconds / 2
                    options = rollout.temperature, distill.top_k, vocab_size
                    known[url] = scorer(url, key, name, request_s, *options)
                    if distill.top_k:
                        asyncio.run(check_top_k(scorer(url, key, name, request_s, *options)))
                    logger.info(f"{url} teaches{f' {source}' if source else ''}: {models[url].name}")
            except (UserError, EngineError) as error:
                raise UserError(about_teachers(str(error))) from error
            if differing := models[urls[0]].differing(models[url]):
                raise UserError(
                    f"[distill] teacher_urls: {url} serves {models[url].describe(differing)}, and {urls[0]}, of the "
                    f"same list, {models[urls[0]].describe(differing)}: one of them is asked for each group, so serve "
                    "the same model"
                )
        scorers[source] = [known[url] for url in urls]
    alone = distill.mode == "only" and not config.reward.functions
    return Teachers(scorers, rollout.request_timeout_seconds, alone)


def served_by(control: HttpControl, longest: int) -> tuple[str, ModelIdentity]:
    """Name and identity of the model that a server has."""
    models = control.models()
    if not models:
        raise UserError(f"{control.url}: /v1/models lists no model")
    served = models[0].get("max_model_len")
    if served is not None and served < longest:
        raise UserError(
            f"{control.url}: serves at most {served} tokens (--max-model-len or --context-length), and scoring takes "
            f"up to {longest}: [data] max_prompt_tokens + [rollout] max_answer_tokens + 1"
        )
    return str(models[0].get("id")), served_identity(models[0])


async def check_top_k(scorer: Scorer) -> None:
    """Refuse a server that tells fewer likeliest tokens than are asked for, as vLLM does by its --max-logprobs."""
    try:
        await scorer.score([([0], [0])], "try")
    except (UserError, EngineError) as error:
        raise UserError(
            f"[distill] top_k = {scorer.top_k}: {error}. Lower it, or start the server so that it tells as many "
            f"(vLLM: --max-logprobs {scorer.top_k})"
        ) from error
    finally:
        await scorer.close()


def vocabulary_probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Texts that hold tokens from all over the vocabulary, special ones too."""
    size = len(tokenizer)
    ids = range(0, size, max(1, size // PROBED_TOKENS))
    texts = [tokenizer.decode([token]) for token in ids]
    texts = [text for text in texts if text and "\N{REPLACEMENT CHARACTER}" not in text]  # a part of a character
    for i in range(0, len(texts), PROBE):
        yield "".join(texts[i : i + PROBE])


def check_tokenizer(control: HttpControl, model: str, tokenizer: PreTrainedTokenizerBase, probes: list[str]) -> None:
    """Refuse a server that reads texts as other token ids than the trained model.

    Names and folders tell nothing: models of one family may differ in their vocabularies, and a server may be on
    another machine. So its own tokenizer is asked, over its route /tokenize.
    """
    for text in probes:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        theirs = control.tokenize(body)
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            raise UserError(
                f"{control.url} serves {model}, whose tokenizer is not that of the trained model, "
                f"{tokenizer.name_or_path}: it reads {text[:60]!r} as {theirs[:8]}, and the trained model as "
                f"{ours[:8]}. A teacher must have the same vocabulary: serve another, or train another [model] "
                "hf_assets_path"
            )
