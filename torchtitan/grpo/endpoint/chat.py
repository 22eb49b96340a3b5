"""Messages and texts to token ids, in which what the session sampled keeps its token ids; tool calls in what it says.

Rendering a whole conversation again may give a turn other tokens than the sampled ones, and the sampler's
log-probabilities would not belong to them. So only what is new behind the last sampled turn is rendered and tokenized.
verifiers and prime-rl call this token-in, token-out. Their package `renderers` does it model by model. Here the run's
own chat template does it: a marker stands for the turn, and what the template writes behind the marker is new.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.chat import joined_text, rendered
from torchtitan.grpo.endpoint.requests import CHAT, Asked, BadRequest, TooLong, cut_text, parse
from torchtitan.grpo.endpoint.sessions import Place, Session
from torchtitan.grpo.engines.protocol import Completion
from torchtitan.grpo.errors import UserError

Message = dict[str, Any]
T = TypeVar("T")

CHARS_PER_TOKEN = 32
"""More than any text has that is not mostly white space."""
_FREE_CHARS = 2**16
"""A text of up to so many characters is always tokenized: if it does not fit, the reply is empty and says "length"."""
_LOOP_CHARS = 2**14
"""What is longer is rendered and tokenized in a thread: it would hold the event loop up for over 10 ms."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="endpoint")

_MARKER = "sampled-turn-7f3a9c"
"""Stands for a sampled turn while the messages behind it are rendered."""
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")
"""Fields of a message by which a turn is known again."""


class Chat:
    """Renders conversations with the run's chat template.

    Args:
        arguments: `[data] chat_template_kwargs`.
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

    def asked(self, session: Session, body: Mapping[str, Any]) -> Asked:
        """A request in the form of `/v1/chat/completions`, with the token ids of the conversation to continue.

        Raises:
            BadRequest: See `requests.parse`. Or there is no chat template, or it refuses the messages.
            TooLong: See `_tokens`.
        """
        call = parse(body, CHAT, session.client.params)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("messages", "must be a list of one message or more")
        messages = [_normalised(message) for message in body["messages"]]
        digests = _digests(messages, call.tools)
        return Asked(call, self._conversation(session, messages, call.tools, digests), digests[-1])

    def choice(
        self, session: Session, asked: Asked, number: int, completion: Completion, place: Place | None
    ) -> dict[str, Any]:
        """What the reply to such a request has of one completion, by which its session knows the turn again."""
        text = cut_text(self.decode(completion.token_ids), asked.call.stop)
        message = reply_message(text, asked.call.tools, asked.key)
        if place is not None:
            session.said[digest_with(asked.key, message)] = place
        called = completion.finish_reason == "stop" and "tool_calls" in message
        finish_reason = "tool_calls" if called else completion.finish_reason
        return {"index": number, "message": message, "finish_reason": finish_reason}

    def _conversation(
        self, session: Session, messages: list[Message], tools: list[Any] | None, digests: list[str]
    ) -> list[int]:
        """The token ids of a conversation, of which there is a digest up to each message."""
        for turn in reversed(range(len(messages))):
            if (place := session.said.get(digests[turn])) is None:
                continue
            if (new := self._behind(messages, turn, tools, place)) is None:
                break  # it hides earlier turns too
            return place.token_ids + self._tokens(session, new)
        text = self.render(messages, tools)
        same = not tools and text == session.prompt.text
        return session.prompt.token_ids if same else self._tokens(session, text)

    def text(self, session: Session, text: str) -> list[int]:
        """The token ids of a text that the model is to continue.

        Raises:
            TooLong: See `_tokens`.
        """
        known, place = session.texts.longest(text)
        if place is not None:
            return place.token_ids + self._tokens(session, text[known:])
        prompt = session.prompt
        if text.startswith(prompt.text):
            return prompt.token_ids + self._tokens(session, text[len(prompt.text) :])
        return self._tokens(session, text, self._plain_text)

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _tokens(self, session: Session, text: str, special: bool = False) -> list[int]:
        """The token ids of new text.

        Raises:
            TooLong: It has more characters than the session has tokens for, so it is not tokenized.
        """
        longest = _FREE_CHARS + CHARS_PER_TOKEN * session.longest_tokens
        if len(text) > longest:
            raise TooLong(
                "messages or prompt",
                f"{len(text)} new characters are over the maximum context length: {longest} may come with the "
                f"{session.longest_tokens} tokens of the row's prompt and [rollout] max_answer_tokens",
            )
        return self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] if text else []

    def _behind(self, messages: list[Message], turn: int, tools: list[Any] | None, place: Place) -> str | None:
        """The text behind a sampled turn, up to what the model says next. None if the template hides its beginning.

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
        return new

    def render(self, messages: list[Message], tools: list[Any] | None = None, prompt: bool = True) -> str:
        """The text of a conversation; `prompt`: with the beginning of the assistant's next turn.

        Raises:
            BadRequest: There is no chat template, or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise BadRequest("messages", "this run's tokenizer has no chat template: use /v1/completions")
        how = {"tokenize": False, "add_generation_prompt": prompt}
        try:
            return rendered(self._tokenizer, "this run", messages, tools, **how, **self._arguments)
        except UserError as error:
            raise BadRequest("messages", str(error)) from error


async def off_loop(characters: int, work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)`, in a thread if it reads so many characters that the event loop would stand still."""
    if characters <= _LOOP_CHARS:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


def characters(messages: list[Any]) -> int:
    """About how many characters a conversation has."""
    return sum(len(str(message.get("content"))) for message in messages if isinstance(message, dict))


def reply_message(text: str, tools: list[Any] | None, asked: str) -> Message:
    """What the assistant said, in OpenAI's form, with its calls if the request had tools.

    Calls are in the form of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If one of them
    is malformed, all stay text.

    Args:
        asked: The digest of the conversation before. Ids of calls follow from it: some templates write them, and a
            run that is repeated must ask the same.
    """
    calls = [_call(found, f"{asked}\0{number}") for number, found in enumerate(calls_in(text))] if tools else []
    if not calls or None in calls:
        return {"role": "assistant", "content": text}
    content = text.partition("<tool_call>")[0].rstrip()
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def calls_in(text: str) -> list[str]:
    """What stands in each `<tool_call>...</tool_call>`. Takes linear time, whatever the model wrote."""
    parts = (part.partition("<tool_call>") for part in text.split("</tool_call>")[:-1])
    return [call.strip() for _, begun, call in parts if begun]


def _call(text: str, place: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = json.dumps(call.get("arguments") or {})
    except (ValueError, RecursionError):
        return None
    name = {"name": call["name"], "arguments": arguments}
    id = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
    return {"id": f"call_{id}", "type": "function", "function": name}


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
    if not isinstance(message.get("tool_calls"), list | None):
        raise BadRequest("messages", f"tool_calls is a list, not {repr(message['tool_calls'])[:100]}")
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_normalised_call(call) for call in calls]
    return kept


def _normalised_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest("messages", f"a tool call names a function, not {repr(call)[:100]}")
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):  # a model may write what is no JSON: templates get the text
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    own = {"id": call["id"]} if call.get("id") else {}
    return own | {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}
