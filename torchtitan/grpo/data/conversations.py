"""Conversations to learn from: the rows of `[data]` for supervised fine-tuning."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.config.job_config import Data, Sft
from torchtitan.grpo.data.chat import ChatRenderer, conversation, tools_of
from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.load import Prompts, load_held_out, load_training
from torchtitan.grpo.data.prompts import PromptSource, plain, sft_pairs
from torchtitan.grpo.data.samples import Conversation, Document, Prompt
from torchtitan.grpo.data.tokenizer import check_embeddings, check_text
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.sources.rows import DatasetRow
from torchtitan.grpo.sources.table import SOURCES

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)


def load_conversations(
    config: "JobConfig", tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: list[int]
) -> tuple[Prompts, list[HeldOut]]:
    """What `sft_train.py` trains on, and the held-out sets; none if the run does not validate.

    Raises:
        UserError: See `PromptSource`; the message names the table.
    """
    own = {"sft": config.sft, "seq_len": config.training.seq_len, "end_ids": end_ids, "vocab_size": vocab_size}
    make = partial(ConversationSource, **own)
    held_out = load_held_out(config, tokenizer, make) if config.validation.enable else []
    return load_training(config, tokenizer, held_out, make), held_out


class ConversationSource(PromptSource):
    """Endless conversations in the order in which `PromptSource` gives prompts, and resumed as exactly.

    A row is a conversation (`[data] messages_column`), or a pair of prompt and answer as in the warm start. All rows
    are rendered once, at construction, and their tokens are kept: 5 bytes each. So a step only has to pack them.

    Args:
        sft: Says which turns and which column are learned.
        seq_len: `[training] seq_len`, the longest document.
        end_ids: From `end_token_ids`.
        others: See `PromptSource`.

    Raises:
        UserError: As `PromptSource`.
    """

    NOUN = "conversation"

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        *,
        sft: Sft,
        seq_len: int,
        end_ids: list[int],
        **others: Any,
    ) -> None:
        self._sft, self._seq_len, self._end_ids = sft, seq_len, end_ids
        self._chat = ChatRenderer(tokenizer, end_ids, sft.train_on == "last", data.chat_template_kwargs)
        self._documents: dict[int, tuple[Document, ...]] = {}
        super().__init__(data, tokenizer, seed, **others)
        self._documents = {position: self._documents[position] for position in self._positions}
        self._report()

    def _report(self) -> None:
        """Log what a user may not expect of the template."""
        every = self._documents.values()
        if split := sum(len(documents) > 1 for documents in every):
            logger.warning(
                f"{self._rows.name}: the chat template renders earlier turns differently once others follow, so "
                f"{split} of {len(every)} conversations are trained as one document for each turn of the assistant"
            )
        last = np.array([document.token_ids[document.trained][-1] for documents in every for document in documents])
        if endless := int((~np.isin(last, self._end_ids)).sum()):
            logger.warning(
                f"{self._rows.name}: {endless} of {len(last)} documents end without one of the model's end tokens "
                f"{self._end_ids}, so the model does not learn to stop: see the chat template"
            )

    def first(self, n: int) -> list[Prompt]:
        """The first `n` conversations in the data's order, with their columns."""
        return list(self._conversations(self._positions[:n]))

    def _limit(self) -> tuple[str, int]:
        return "[training] seq_len", self._seq_len

    def _check_embeddings(self, prompt: Prompt) -> None:
        for document in self._documents[prompt.index]:
            place = self._rows.place(prompt.index)
            check_embeddings([int(document.token_ids.max())], place, self._tokenizer, self._vocab_size)

    def _prompts(self, positions: Sequence[int]) -> list[Prompt]:
        if all(position in self._documents for position in positions):
            return [Conversation(position, [], "", documents=self._documents[position]) for position in positions]
        conversations = self._conversations(positions)
        self._documents |= {each.index: each.documents for each in conversations}
        return list(conversations)

    def _conversations(self, positions: Sequence[int]) -> list[Conversation]:
        """Render rows."""
        if self._data.messages_column:
            return [self._messages(position) for position in positions]
        prompts = super()._prompts(positions)
        pairs = sft_pairs(prompts, self._data, self._sft.target_column, self._tokenizer)
        return [_conversation(prompt, (pair,)) for prompt, pair in zip(prompts, pairs, strict=True)]

    def _messages(self, position: int) -> Conversation:
        row, place, data = self._rows.rows[position], self._rows.place(position), self._data
        column = data.messages_column
        if column not in row:
            raise UserError(f"{place} has no column {column!r}: set [data] messages_column to one of {list(row)}")
        said = f"{place}: column {column!r}"
        messages = conversation(row[data.messages_column], data.system_prompt, SOURCES[data.source].fills_columns, said)
        written = row.get(data.tools_column) if data.tools_column else None  # a column may have no name
        tools = tools_of(written, f"{place}: column {data.tools_column!r}")
        check_text(json.dumps([messages, tools], ensure_ascii=False, default=str), place)
        documents, text = self._chat.documents(messages, tools, place)
        return _conversation(Prompt(position, [], text, self._sft.train_on, dict(row)), tuple(documents))

    def _answer(self, row: DatasetRow, place: str) -> str:
        """What is learned is not the reference answer, which a row need not have."""
        column = self._sft.target_column or self._data.answer_column
        return plain(row.get(column))


def _conversation(prompt: Prompt, documents: tuple[Document, ...]) -> Conversation:
    """Just rendered: with the tokens that the limit is about."""
    longest = max((document.token_ids for document in documents), key=len)
    return Conversation(prompt.index, longest.tolist(), prompt.text, prompt.answer, prompt.columns, documents=documents)
