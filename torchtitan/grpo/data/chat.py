"""Conversations rendered by any chat template, with the exact places of what the assistant says."""

import datetime
import functools
import json
import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.samples import Document
from torchtitan.grpo.errors import UserError, said, shown

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Span = tuple[int, int]
"""[first, end) in characters."""

TEMPLATE_DATE = datetime.date(2024, 7, 26)
"""What templates get that write today's date: the day that Llama 3's own takes where it finds no clock."""
_TODAY = re.compile(r"""strftime_now\s*\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatRenderer:
    """Turns a conversation into documents whose trained tokens are the assistant's turns, each with its end token.

    A template that marks the turns by `{% generation %}` says itself which tokens these are. For others, a turn is what
    the rendered text gains by its message, after the generation prompt. The end of line that many templates write
    behind the end token is not trained, since no server samples it. An end token that comes with the next message is.

    Some templates render a turn differently once others follow: Qwen3's removes the thinking. Then each turn is a
    document of its own, with the history as the template renders it when that turn is next.

    Args:
        end_ids: Tokens that end a turn, from `end_token_ids`.
        last_only: Train the last turn of the assistant only.
        arguments: `[data] chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: list[int],
        last_only: bool,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer, self._end_ids, self._last_only, self._arguments = tokenizer, end_ids, last_only, arguments
        template = tokenizer.chat_template
        self._special = [*end_ids, *tokenizer.all_special_ids]
        self.marked = isinstance(template, str) and bool(_GENERATION.search(template))

    def documents(self, messages: list[Message], tools: list[Any] | None, place: str) -> tuple[list[Document], str]:
        """The documents, and their rendered text.

        Args:
            messages, tools: From `conversation` and `tools_of`.
            place: The row's name in errors.

        Raises:
            UserError: The template refuses the messages, or does not show where a turn is.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: turns[-1] + 1]  # what comes after the last turn teaches nothing
        if self.marked:
            documents, text = [self._by_marks(messages, tools, place)], json.dumps(messages, default=str)
        else:
            rendered = self._rendered(messages, turns[-1:] if self._last_only else turns, tools, place)
            documents = [self._document(text, spans) for text, spans in rendered]
            text = "\0".join(text for text, _ in rendered)
        documents = [document for document in documents if document.trained.any()]
        if not documents:
            raise UserError(f"{place}: the chat template shows nothing of what the assistant says: leave the row out")
        return documents, text

    def _by_marks(self, messages: list[Message], tools: list[Any] | None, place: str) -> Document:
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._apply(messages, tools, place, **how)
        ids = np.array(encoded["input_ids"], np.int32)
        trained: np.ndarray = np.array(encoded["assistant_masks"], bool)
        trained = self._with_end_tokens(ids, trained)
        if self._last_only and trained.any():
            last = int(trained.nonzero()[0][-1])
            others = (~trained[:last]).nonzero()[0]
            trained[: int(others[-1]) + 1 if len(others) else 0] = False
        return Document(ids, trained)

    def _rendered(
        self, messages: list[Message], turns: list[int], tools: list[Any] | None, place: str
    ) -> list[tuple[str, list[Span]]]:
        """The text of each document, and the spans of its trained turns."""

        def render(end: int, prompt: bool) -> str:
            return self._apply(messages[:end], tools, place, tokenize=False, add_generation_prompt=prompt)

        texts = []
        for turn in turns:
            before, after = render(turn, True), render(turn + 1, False)
            if not after.startswith(before):
                raise UserError(
                    f"{place}: the chat template renders message {turn} otherwise than its generation prompt begins "
                    "it, so its tokens cannot be told from the prompt's: give a template with {% generation %} around "
                    "the assistant's turns by [data] chat_template_file"
                )
            texts.append((after, (len(before), len(after))))
        whole = texts[-1][0]
        if all(whole.startswith(text) for text, _ in texts):
            return [(whole, [span for _, span in texts])]
        return [(text, [span]) for text, span in texts]

    def _document(self, text: str, spans: list[Span]) -> Document:
        """A token is trained if it begins in one of the spans, less white space behind the last special token."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = np.array(encoded["input_ids"], np.int32), encoded["offset_mapping"]
        starts = np.array([start for start, _ in offsets], np.int64)
        trained: np.ndarray = np.zeros(len(starts), bool)
        for first, end in spans:
            own = ((starts >= first) & (starts < end)).nonzero()[0]
            special = own[np.isin(ids[own], self._special)]
            if len(special) and not text[offsets[special[-1]][1] : end].strip():
                own = own[own <= special[-1]]
            trained[own] = True
        return Document(ids, self._with_end_tokens(ids, trained))

    def _with_end_tokens(self, ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
        """Train an end token right behind a turn, too."""
        behind = np.append(False, trained[:-1]) & ~trained
        return trained | (behind & np.isin(ids, self._end_ids))

    def _apply(self, messages: list[Message], tools: list[Any] | None, place: str, **how: Any) -> Any:
        return rendered(self._tokenizer, place, messages, tools, **self._arguments, **how)


def rendered(
    tokenizer: PreTrainedTokenizerBase, place: str, messages: Any, tools: list[Any] | None = None, /, **how: Any
) -> Any:
    """`apply_chat_template`, with TEMPLATE_DATE as today. Else the prompts of a run would change at midnight, and it
    could not be resumed on another day.

    Args:
        place: Whose messages they are, for the error.

    Raises:
        UserError: The template refuses the messages.
    """
    try:
        if "strftime_now" in str(tokenizer.chat_template):
            how = {"chat_template": _dated(tokenizer.get_chat_template(tools=tools)), **how}
        return tokenizer.apply_chat_template(messages, tools=tools, **how)
    except Exception as error:  # a template is code, which may raise anything
        raise UserError(f"{place}: the chat template refuses these messages: {said(error)}") from error


@functools.cache
def _dated(template: str) -> str:
    dated = _TODAY.sub(lambda call: f"{call[1]}{TEMPLATE_DATE.strftime(call[2])}{call[1]}", template)
    if re.search(r"strftime_now\s*\(", dated):
        logger.warning(
            "The chat template writes today's date, so prompts change at midnight, and the run cannot be resumed on "
            "another day: give one with a fixed date by [data] chat_template_file"
        )
    return dated


def joined_text(content: Any) -> Any:
    """A message's content with its text parts, `[{"type": "text", "text": ...}]`, joined; any other as it is."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else content


def conversation(value: Any, system_prompt: str, drop_nulls: bool, place: str) -> list[Message]:
    """Check the messages of a row. Tool calls, and whatever else a template reads, are kept.

    Args:
        system_prompt: `[data] system_prompt`, put before messages that have none.
        drop_nulls: Leave out fields that are null: datasets in Arrow's format have every field in every message.

    Raises:
        UserError: They are no conversation in which the assistant answers.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{place} must hold a list of chat messages, not {shown(value)}")
    messages: list[Message] = []
    for message in value:
        content = joined_text(message.get("content")) if isinstance(message, dict) else 0
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'{place} must hold {{"role": text, "content": text}} messages, not {shown(message)}')
        if not isinstance(content, str | None):
            raise UserError(f"{place}: the content of a message must be text, not {shown(content)}")
        others = any(value for field, value in message.items() if field not in ("role", "content"))
        if message["role"] == "assistant" and content is None and not others:
            raise UserError(
                f"{place}: a message of the assistant has neither content nor tool_calls: write what it says, or leave "
                "the row out"
            )
        messages.append((_without_nulls(message) if drop_nulls else message) | {"content": content or ""})
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{place} has no message of the assistant: there is nothing to learn, so leave the row out")
    if messages[0]["role"] == "assistant":
        raise UserError(f"{place} begins with the assistant: a message that it answers must come before")
    if system_prompt:
        if messages[0]["role"] == "system":
            raise UserError(f"{place} has a system message of its own: empty [data] system_prompt")
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def tools_of(value: Any, place: str) -> list[Any] | None:
    """The tools of a row: a list, or its JSON text. None if there are none.

    Raises:
        UserError: It is neither.
    """
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}): write a list of tools") from error
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{place} must be a list of tools, not {shown(tools)}")
    return tools or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
