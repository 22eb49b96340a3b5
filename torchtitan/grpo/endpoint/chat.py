"""Messages and texts to token ids, in which what the session sampled keeps its token ids; tool calls in what it says.

Rendering a whole conversation again may give a turn other tokens than the sampled ones, and the sampler's
log-probabilities would not belong to them. So only what is new behind the last sampled turn is rendered and tokenized.
verifiers and prime-rl call this token-in, token-out. Their package `renderers` does it model by model. Here the run's
own chat template does it: a marker stands for the turn, and what the template writes behind the marker is new.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.chat import joined_text
from torchtitan.grpo.endpoint.requests import BadRequest
from torchtitan.grpo.endpoint.sessions import Place, Session

Message = dict[str, Any]

_MARKER = "sampled-turn-7f3a9c"
"""Stands for a sampled turn while the messages behind it are rendered."""
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")
"""Fields of a message by which a turn is known again."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """A conversation's token ids, and the digest of its messages."""

    token_ids: list[int]
    digest: str


class Chat:
    """Renders conversations with the run's chat template.

    Args:
        arguments: `[data] chat_template_kwargs` by name.
        plain_text: `[data] chat_template = false`: prompts get the tokenizer's begin token.

    Attributes:
        vocab_size: Every token id is under it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        plain_text: bool = False,
    ) -> None:
        self._tokenizer, self._arguments, self._plain_text = tokenizer, arguments, plain_text
        self.vocab_size = len(tokenizer)

    def messages(self, session: Session, messages: list[Message], tools: list[Any] | None) -> Rendered:
        """The token ids of a conversation that the model is to continue.

        Raises:
            BadRequest: There is no chat template, or it refuses the messages.
        """
        messages = [_normalised(message) for message in messages]
        digests = _digests(messages, tools)
        for turn in reversed(range(len(messages))):
            place = session.said.get(digests[turn])
            if place is not None and (new := self._behind(messages, turn, tools, place)) is not None:
                return Rendered(place.token_ids + new, digests[-1])
        text = self.render(messages, tools)
        same = not tools and text == session.prompt.text
        return Rendered(session.prompt.token_ids if same else self._tokens(text), digests[-1])

    def text(self, session: Session, text: str) -> list[int]:
        """The token ids of a text that the model is to continue."""
        known = max((each for each in session.texts if text.startswith(each)), key=len, default=None)
        if known is not None:
            return session.texts[known].token_ids + self._tokens(text[len(known) :])
        prompt = session.prompt
        if text.startswith(prompt.text):
            return prompt.token_ids + self._tokens(text[len(prompt.text) :])
        return self._tokenizer(text, add_special_tokens=self._plain_text)["input_ids"]

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _behind(self, messages: list[Message], turn: int, tools: list[Any] | None, place: Place) -> list[int] | None:
        """The tokens behind a sampled turn, up to what the model says next. None if the template hides their beginning.

        Templates end a turn with an end token and white space. What of this the model has sampled is not repeated.
        """
        marked = [*messages[:turn], {"role": "assistant", "content": _MARKER}, *messages[turn + 1 :]]
        try:
            text = self.render(marked, tools)
            closing = self.render([{"role": "user", "content": "a"}, marked[turn]], None, prompt=False)
        except BadRequest:
            return None
        if text.count(_MARKER) != 1:
            return None
        new = text.partition(_MARKER)[2]
        end = self._tokenizer.decode(place.token_ids[-1:])
        if end and closing.partition(_MARKER)[2].startswith(end) and new.startswith(end):
            new = new[len(end) :]
        return self._tokens(new)

    def render(self, messages: list[Message], tools: list[Any] | None = None, prompt: bool = True) -> str:
        """The text of a conversation; `prompt`: with the beginning of the assistant's next turn.

        Raises:
            BadRequest: There is no chat template, or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise BadRequest("messages", "this run's tokenizer has no chat template: use /v1/completions")
        own = self._arguments
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **own
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest("messages", f"the run's chat template refuses these messages: {error}") from error


def reply_message(text: str, tools: list[Any] | None) -> Message:
    """What the assistant said, in OpenAI's form, with its calls if the request had tools.

    Calls are in the form of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If one of them
    is malformed, all stay text.
    """
    calls = [_call(found) for found in _TOOL_CALL.findall(text)] if tools else []
    if not calls or None in calls:
        return {"role": "assistant", "content": text}
    content = text[: text.index("<tool_call>")].rstrip()
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = json.dumps(call.get("arguments") or {})
    name = {"name": call["name"], "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": name}


def digest_with(digest: str, message: Message) -> str:
    """The digest of a conversation that goes on with this message."""
    said = json.dumps({key: value for key, value in _normalised(message).items() if key in _COMPARED}, sort_keys=True)
    return hashlib.blake2b(f"{digest}\0{said}".encode(), digest_size=16).hexdigest()


def _digests(messages: list[Message], tools: list[Any] | None) -> list[str]:
    """The digest of the conversation up to each message."""
    digest, digests = json.dumps(tools, sort_keys=True), []
    for message in messages:
        digest = digest_with(digest, message)
        digests.append(digest)
    return digests


def _normalised(message: Any) -> Message:
    """A message as templates read it: content as text, arguments of calls as objects, and no empty fields.

    Clients send back what they were given in forms that differ in these only.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("messages", f'a message is {{"role": text, "content": text}}, not {repr(message)[:100]}')
    kept = {key: value for key, value in message.items() if value not in (None, [], {})}
    content = joined_text(message.get("content"))
    if not isinstance(content, str | None):
        raise BadRequest("messages", f"content is text, or a list of text parts, not {repr(content)[:100]}")
    kept["content"] = content or ""
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_normalised_call(call) for call in calls]
    return kept


def _normalised_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest("messages", f"a tool call names a function, not {repr(call)[:100]}")
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):  # a model may write what is no JSON: templates get the text
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    own = {"id": call["id"]} if call.get("id") else {}
    return own | {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}
