"""What a model call may ask for, and replies in the form of OpenAI.

The run decides how tokens are sampled: log-probabilities are compared with the trainer's at its temperature. So a field
that would change the distribution is refused, unless it has the run's own value. So is one that nobody knows.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from torchtitan.grpo.engines.protocol import Completion, SamplingParams

T = TypeVar("T")

CHAT = ("messages", "tools")
COMPLETIONS = ("prompt",)

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_FIELD = re.compile(r"`\$\.(\w+)")
"""Where msgspec says what is wrong."""
_BRACKETS_MAX = 2**18
"""Of a body. Lists and objects take most of the time of its parsing, in which no other thread runs."""
_LIMITS = (
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "logprobs",
    "stream",
    "return_token_ids",
)
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "stream_options", "service_tier", "prompt_cache_key", "safety_identifier"),
    *("parallel_tool_calls", "request_id", "priority", "cache_salt", "skip_special_tokens", "detokenize"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "routed_experts_prompt_start", "output_kind"),
}
"""They change neither what is sampled nor what is recorded."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
}
"""Fields with the values that change nothing."""


class BadRequest(Exception):
    """A call that is refused. It costs that call alone.

    Attributes:
        field: Of the request.
        status: Of HTTP.
    """

    status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class TooLong(BadRequest):
    """It has more text than the run has tokens for."""

    status = 413


class Call(msgspec.Struct, frozen=True):
    """A checked request. Servers look through all that may stop an answer after each token.

    Attributes:
        n: At most as many as OpenAI allows.
        max_tokens: None: as many as are left.
        stop, stop_token_ids: Besides the run's own. SGLang takes 32 texts for one request.
        logprobs, return_token_ids: The reply has them.
        stream: The reply is one server-sent event.
        tools: Of a chat request; None if there are none.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    stop: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[_Token, ...], msgspec.Meta(max_length=2**14)] = ()
    logprobs: bool = False
    return_token_ids: bool = False
    stream: bool = False
    tools: list[Any] | None = None
    model: str = ""


@dataclass(frozen=True)
class Asked:
    """A model call that was read.

    Attributes:
        token_ids: What the model is to continue.
        key: The digest of its messages, its text, or its own id: by route.
    """

    call: Call
    token_ids: list[int]
    key: str


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        BadRequest: It is something else, or has half of a surrogate pair, which no tokenizer and no server takes.
        TooLong: It may have too many lists and objects.
    """
    if raw.count(b"[") + raw.count(b"{") > _BRACKETS_MAX:
        raise TooLong("body", f"has over {_BRACKETS_MAX} opening brackets")
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", f"is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("body", "is not a JSON object")
    return body


def parse(body: Mapping[str, Any], own: Sequence[str], params: SamplingParams) -> Call:
    """Check the fields of a request.

    Args:
        own: The fields of its route, CHAT or COMPLETIONS.
        params: The group's, whose distribution holds.

    Raises:
        BadRequest: Names the field, and what to do.
    """
    for name, value in body.items():
        if value is None or name in own or name in _LIMITS or name in _WITHOUT_EFFECT:
            continue
        if name == "seed":
            raise BadRequest(name, "the run seeds each call from [debug] seed: leave it out")
        if name in ("temperature", "top_p") or (name in ("top_k", "min_p") and getattr(params, name)):
            wanted: tuple[Any, ...] = (getattr(params, name),)
        elif name in _NEUTRAL:
            wanted = _NEUTRAL[name]
        else:
            raise BadRequest(name, "this endpoint does not know the field: leave it out")
        if value not in wanted:
            raise BadRequest(
                name,
                f"{repr(value)[:100]} would change what the run samples or trains on, and it has "
                f"{' or '.join(map(repr, wanted))}: leave it out",
            )
    stop, logprobs = body.get("stop") or (), body.get("logprobs")
    if not isinstance(logprobs, bool) and logprobs not in (None, 0, 1):
        raise BadRequest("logprobs", "only the sampled token's log-probability is there: ask for 1 at most")
    limits = [limit for name in ("max_completion_tokens", "max_tokens") if (limit := body.get(name)) is not None]
    given = {name: body.get(name) for name in Call.__struct_fields__} | {
        "max_tokens": next(iter(limits), None),
        "stop": (stop,) if isinstance(stop, str) else stop,
        "logprobs": logprobs is not None and logprobs is not False,
        "tools": body.get("tools") or None,
    }
    return converted("body", {name: value for name, value in given.items() if value is not None}, Call)


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """The token ids of a request.

    Raises:
        BadRequest: They are none, or not the tokenizer's.
    """
    if not value:
        raise BadRequest(name, "is empty: give the conversation so far")
    ids = converted(name, value, list[_Token])
    if max(ids) >= vocab_size:
        raise BadRequest(name, f"has {max(ids)}, and the tokenizer has ids under {vocab_size}")
    return ids


def converted(name: str, value: Any, kind: type[T]) -> T:
    """What a client has sent, as this type.

    Raises:
        BadRequest: It is something else, or beyond its limits. The field is the one that msgspec names, or `name`.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise BadRequest(field[1] if field else name, str(error)[:300]) from error


def cut_text(text: str, stop: Sequence[str]) -> str:
    """The text before the first of these stop texts, as OpenAI returns it."""
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    answer = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": answer, "total_tokens": prompt_tokens + answer}


def reply(kind: str, id: str, model: str, choices: list[dict[str, Any]], counts: dict[str, int]) -> dict[str, Any]:
    """The envelope of `/v1/chat/completions` and `/v1/completions`."""
    created = int(time.time())
    return {"id": id, "object": kind, "created": created, "model": model, "choices": choices, "usage": counts}


def chunk(whole: dict[str, Any]) -> dict[str, Any]:
    """A whole reply as the only event of a stream."""
    is_chat = whole["object"] == "chat.completion"
    choices = whole["choices"]
    if is_chat:
        choices = [
            {name: value for name, value in c.items() if name != "message"} | {"delta": _delta(c)} for c in choices
        ]
    return whole | {"object": "chat.completion.chunk" if is_chat else whole["object"], "choices": choices}


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls", []))]
    return message | ({"tool_calls": calls} if calls else {})


def chat_logprobs(tokens: Sequence[str], completion: Completion) -> dict[str, Any]:
    """Of the chat route."""
    pairs = zip(tokens, completion.logprobs, strict=True)
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def completion_logprobs(tokens: Sequence[str], completion: Completion) -> dict[str, Any]:
    return {"tokens": list(tokens), "token_logprobs": completion.logprobs, "top_logprobs": None, "text_offset": []}
