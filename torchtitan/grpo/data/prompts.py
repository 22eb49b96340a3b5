"""Prompts: rows of a dataset, rendered, in an order that a resumed run continues exactly."""

import hashlib
import itertools
import logging
import random
import re
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.chat import joined_text, rendered
from torchtitan.grpo.data.rows import load_rows
from torchtitan.grpo.data.samples import ANY_VOCAB, Document, Prompt
from torchtitan.grpo.data.tokenizer import check_embeddings, check_text
from torchtitan.grpo.errors import UserError, did_you_mean, renamed, said, shown
from torchtitan.grpo.process.import_path import is_async, load_function, source
from torchtitan.grpo.sources.rows import DatasetRow, as_json
from torchtitan.grpo.sources.table import SOURCES

logger = logging.getLogger(__name__)

RENDER_BATCH = 1024
"""Rows that are rendered and tokenized at once."""


class NothingToAsk(UserError):
    """The curriculum refuses every prompt of a source."""


class PromptSource:
    """Endless training prompts from `[data]`, or its held-out ones.

    All rows are read and rendered at construction, so that bad data stops a run at its start. Only the rows' positions
    are kept; prompts are rendered again when they are taken.

    `[data] curriculum` is a hook `function(prompt, pass_rate) -> bool` that says whether to ask a training prompt now.
    `pass_rate` is the prompt's last mean reward from `record`, or None. A refused prompt is skipped, and offered
    again in the next epoch. `torchtitan.grpo.data.curricula` has a ready-made hook.

    Args:
        seed: `debug.seed`. It orders the rows, differently in each epoch. It does not decide which rows there are.
        held_out: Serve the held-out rows instead of the training rows.
        validation_prompts: `[validation] prompts`. Give both sources the same number: if the held-out rows come from
            the training data, both then split it at the same row.
        asked: What other held-out sets ask (`sources.row_keys`). It is not trained on.
        functions: `[reward] functions`, which `[data] reward_column` chooses from.
        of_environment: The rows of `[data] source = "environment"`.
        vocab_size: The model's, which all token ids must be under.

    Raises:
        UserError: The data is missing, malformed or too long. The message names the file and row, or the key.
    """

    NOUN = "prompt"

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        *,
        held_out: bool = False,
        validation_prompts: int = 0,
        asked: Set[str] = frozenset(),
        functions: Sequence[str] = (),
        of_environment: Sequence[DatasetRow] | None = None,
        vocab_size: int = ANY_VOCAB,
    ):
        self._data = data
        self._tokenizer = tokenizer
        self._seed = seed
        self._functions = functions
        self._vocab_size = vocab_size
        self._answer_regex = re.compile(data.answer_pattern) if data.answer_pattern else None
        self._curriculum = None
        if data.curriculum and not held_out:
            self._curriculum = load_function("[data] curriculum", data.curriculum, "prompt", "pass_rate")
            if is_async(self._curriculum):
                raise UserError(
                    f'[data] curriculum: "{data.curriculum}" ({source(self._curriculum)}) gives a coroutine: write it '
                    "as `def`"
                )
        self._pass_rates: dict[int, float] = {}
        if data.chat_template and not tokenizer.chat_template:
            raise UserError(
                f"[data] chat_template = true, but the tokenizer in {tokenizer.name_or_path} has no chat template: set "
                "[data] chat_template = false to send plain text, or give a template by [data] chat_template_file"
            )
        for name in data.chat_template_kwargs:
            if not re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
                raise UserError(
                    f"[data] chat_template_kwargs names {name!r}, which the chat template of {tokenizer.name_or_path} "
                    "does not read: leave it out"
                )
        self._kept_back = 0 if data.validation_path or data.validation_split else validation_prompts
        self._rows = load_rows(data, held_out, validation_prompts, asked, of_environment)
        self._check_optional_columns()
        self._positions, self._fingerprint, self._tokens = self._check_rows()
        self._epoch = 0
        self._taken = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def rows(self) -> int:
        """Number of rows of the whole dataset. Every `Prompt.index` is below it."""
        return len(self._rows.rows)

    def counts(self) -> list[str]:
        """How many rows there are, and what becomes of them, as a line of text for each source."""
        read, candidates = self.rows, len(self._rows.positions)
        held_out = min(self._kept_back, read - candidates)
        key, limit = self._limit()
        return [
            f"{self._rows.name}: {read:,} rows read, {held_out:,} held out, {read - candidates - held_out:,} with a "
            f"held-out question, {candidates - len(self):,} too long (over {key} = {limit}), {len(self):,} to train on"
        ]

    def keys(self) -> set[str]:
        """What its prompts ask, as one of `sources.row_keys`. Empty if nothing tells episodes apart."""
        key = self._rows.key
        return {key(self._rows.rows[i]) for i in self._positions} if key else set()

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts that the curriculum accepts. A new epoch begins at the end of the data.

        Raises:
            NothingToAsk: The curriculum refuses every prompt of the data.
            UserError: It fails.
        """
        accepted: list[Prompt] = []
        refused: set[int] = set()  # since the last accepted prompt
        while len(accepted) < n:
            for prompt in self._prompts(self._take(n - len(accepted))):
                if self._asks(prompt):
                    accepted.append(prompt)
                    refused.clear()
                else:
                    refused.add(prompt.index)
            if len(refused) == len(self):
                raise NothingToAsk(
                    f'[data] curriculum = "{self._data.curriculum}" refuses every one of the {len(self)} prompts of '
                    f"{self._rows.name}: nothing is left to ask. Let it accept some, or use other data"
                )
        return accepted

    def epochs(self) -> dict[str, float]:
        """Passes over the data so far, as a metric."""
        return {"data/epoch": self._epoch + self._taken / len(self)}

    def at(self, indices: list[int]) -> list[Prompt]:
        """The prompts with these `Prompt.index`, in this order. The position in the data does not change."""
        return self._prompts(indices)

    def record(self, index: int, mean_reward: float) -> None:
        """Record the mean reward of a prompt's group; the curriculum gets it with the prompt next time."""
        if self._curriculum is not None:
            self._pass_rates[index] = mean_reward

    def first(self, n: int) -> list[Prompt]:
        """The first `n` prompts in the data's order, or all if there are fewer. They are the same every time."""
        return self._prompts(self._positions[:n])

    def state_dict(self) -> dict[str, Any]:
        """Position in the data and the curriculum's mean rewards, as JSON values."""
        state = {"seed": self._seed, "epoch": self._epoch, "taken": self._taken, "fingerprint": self._fingerprint}
        state["tokens"] = self._tokens
        if self._curriculum is not None:
            state["pass_rates"] = {str(index): rate for index, rate in self._pass_rates.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, in the order of its seed.

        Raises:
            UserError: The prompts differ from those of the checkpoint.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise UserError(
                f"The prompts of {self._rows.name} are not those that the checkpoint was trained on: restore the data, "
                "the [data] keys, [validation] prompts and sets and the chat template, or start in another [job] "
                "dump_folder, and from the trained weights with the checkpoint's folder hf as [model] hf_assets_path"
            )
        if state["tokens"] != self._tokens:
            raise UserError(
                f"The tokenizer of {self._tokenizer.name_or_path} gives the prompts of {self._rows.name} other tokens "
                "than the checkpoint was trained on: restore the files of [model] hf_assets_path"
            )
        self._seed, self._epoch, self._taken = state["seed"], state["epoch"], state["taken"]
        self._order = self._epoch_order()
        if self._curriculum is not None:  # the checkpoint may be of a run without one
            self._pass_rates = {int(index): rate for index, rate in state.get("pass_rates", {}).items()}

    def _take(self, n: int) -> list[int]:
        """The next 1 to `n` positions of this epoch, or of a new one."""
        if self._taken == len(self._order):
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._epoch_order()
        block = self._order[self._taken : self._taken + n]
        self._taken += len(block)
        return block

    def _asks(self, prompt: Prompt) -> bool:
        """Whether the curriculum accepts the prompt."""
        if self._curriculum is None:
            return True
        key = f'[data] curriculum = "{self._data.curriculum}"'
        try:
            answer = self._curriculum(prompt, self._pass_rates.get(prompt.index))
            is_known = answer in (True, False)  # which an array cannot say
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"{key} failed on prompt {prompt.index}: {type(error).__name__}: {said(error)}") from error
        if not is_known:
            raise UserError(f"{key} returned {shown(answer)} for prompt {prompt.index}: return True or False")
        return bool(answer)

    def _epoch_order(self) -> list[int]:
        order = list(self._positions)
        if self._data.shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def _limit(self) -> tuple[str, int]:
        """The key that limits a row's tokens, and its value."""
        return "[data] max_prompt_tokens", self._data.max_prompt_tokens

    def _check_rows(self) -> tuple[list[int], str, str]:
        """Positions of the rows within the limit, and fingerprints of their rendered text and of their tokens."""
        key, limit = self._limit()
        kept, texts, ids, unknown, blank, first = [], hashlib.sha256(), hashlib.sha256(), 0, 0, ""
        name, positions, unk = self._rows.name, self._rows.positions, self._tokenizer.unk_token_id
        batches = (positions[start : start + RENDER_BATCH] for start in range(0, len(positions), RENDER_BATCH))
        for prompt in itertools.chain.from_iterable(map(self._prompts, batches)):
            tokens = len(prompt.token_ids)
            if tokens > limit:
                first = first or f"{self._rows.place(prompt.index)} with {tokens} tokens"
                continue
            self._check_embeddings(prompt)
            kept.append(prompt.index)
            texts.update(f"{prompt.index}\0{prompt.text}\0{prompt.answer}\0".encode())
            ids.update(f"{prompt.token_ids}".encode())
            blank += not prompt.answer
            unknown += unk is not None and unk in prompt.token_ids
        if not kept:
            raise UserError(f"Every {self.NOUN} of {name} is over {key} = {limit}: raise it")
        if len(kept) < len(positions):
            counts = f"{len(positions) - len(kept)} of {len(positions)} {self.NOUN}s"
            logger.warning(f"{name}: {counts} are over {key} = {limit} and are left out, as {first}")
        if unknown:
            logger.warning(f"{name}: {unknown} {self.NOUN}s hold characters that the tokenizer does not know")
        if blank and self._data.answer_column and SOURCES[self._data.source].path:
            logger.warning(f"{name}: the answer of {blank} {self.NOUN}s is null, NaN or empty text")
        return kept, texts.hexdigest(), ids.hexdigest()

    def _check_optional_columns(self) -> None:
        """Refuse the name of a column that no row has. One row may leave it out."""
        rows = self._rows
        for key in ("reward_column", "tools_column"):
            column = getattr(self._data, key)
            if column and not any(column in row for row in rows.rows):
                columns = list(rows.rows[0])
                raise UserError(f"{rows.name} has no column {column!r}: set [data] {key} to one of {columns}")

    def _check_embeddings(self, prompt: Prompt) -> None:
        check_embeddings(prompt.token_ids, self._rows.place(prompt.index), self._tokenizer, self._vocab_size)

    def _prompts(self, positions: Sequence[int]) -> list[Prompt]:
        rows = [self._rows.rows[position] for position in positions]
        places = [self._rows.place(position) for position in positions]
        texts = [self._render(row, place) for row, place in zip(rows, places, strict=True)]
        answers = [self._answer(row, place) for row, place in zip(rows, places, strict=True)]
        for text, answer, place in zip(texts, answers, places, strict=True):
            check_text(text + answer, place)
        # A chat template writes its own begin token; plain text gets the tokenizer's.
        special = not self._data.chat_template
        # verbose: it warns of rows beyond the model's positions, and those over the limit are left out.
        token_ids = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []
        return [
            Prompt(
                position,
                ids,
                text,
                answer=answer,
                columns=as_json(row, place),
                source=row["task"] if self._data.tasks else "",
                functions=self._reward_functions(row, place),
            )
            for position, row, place, text, answer, ids in zip(
                positions, rows, places, texts, answers, token_ids, strict=True
            )
        ]

    def _reward_functions(self, row: DatasetRow, place: str) -> tuple[str, ...]:
        """The functions that the row names in `[data] reward_column`."""
        column = self._data.reward_column
        value = (column and row.get(column)) or []  # a row that names none may leave the column out
        named = value if isinstance(value, list) else [value]
        for name in named:
            if name not in self._functions:
                raise UserError(
                    f"{place}: column {column!r} names {shown(name)}, which is not in [reward] functions = "
                    f"{list(self._functions)}{did_you_mean(str(name), self._functions)}: list it there"
                )
        return tuple(named)

    def _render(self, row: DatasetRow, place: str) -> str:
        column = self._data.prompt_column
        if column not in row:
            raise UserError(f"{place} has no column {column!r}: set [data] prompt_column to one of {list(row)}")
        messages = chat_messages(row[column], self._data, place)
        if not self._data.chat_template:
            return messages[0]["content"]
        how = {"tokenize": False, "add_generation_prompt": True}
        with renamed("the chat template", self._data.chat_template_file or "the tokenizer's chat template"):
            return rendered(self._tokenizer, place, messages, **how, **self._data.chat_template_kwargs)

    def _answer(self, row: DatasetRow, place: str) -> str:
        column = self._data.answer_column
        if not column or (self._data.source == "environment" and column not in row):
            return ""
        answer = _text(row, column, place, "[data] answer_column", 'or to "" if there is no reference answer')
        if self._answer_regex is None:
            return answer
        match = self._answer_regex.search(answer)
        if match is None:
            pattern = self._data.answer_pattern
            raise UserError(f"{place}: [data] answer_pattern = {pattern!r} does not match the answer {answer[-80:]!r}")
        return (match.group(1) or "").strip()


def sft_pairs(
    prompts: list[Prompt],
    data: Data,
    target_column: str,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int = ANY_VOCAB,
    longest: int | None = None,
) -> list[Document]:
    """Each prompt with its target, which is trained and ends with the tokenizer's end token.

    Args:
        target_column: `[sft] target_column`. "" is all of `[data] answer_column`, without `answer_pattern`.
        vocab_size: The model's, which all token ids must be under.
        longest: `[training] seq_len`, which a prompt and its target may have. None: no limit.

    Raises:
        UserError: A row lacks the column, is too long, or has a token without an embedding. The tokenizer has no end
            token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("Supervised targets need an end token: set eos_token in the model's tokenizer_config.json")
    key = "[sft] target_column" if target_column else "[data] answer_column"
    own_columns = {source.name: source.data.answer_column for source in data.mixture}
    texts = []
    for prompt in prompts:
        column = target_column or own_columns.get(prompt.source, data.answer_column)
        texts.append(_text(prompt.columns, column, f"Prompt {prompt.index}", key, "with the text to learn"))
        check_text(texts[-1], f"The target of prompt {prompt.index}")
    targets = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    documents = []
    for prompt, target in zip(prompts, targets, strict=True):
        check_embeddings(target, f"The target of prompt {prompt.index}", tokenizer, vocab_size)
        ids = np.array([*prompt.token_ids, *target, tokenizer.eos_token_id], np.int32)
        if longest is not None and len(ids) > longest:
            raise UserError(
                f"Prompt {prompt.index} and its target of the warm start have {len(ids)} tokens, over "
                f"[training] seq_len = {longest}: raise it, or leave the row out"
            )
        documents.append(Document(ids, np.arange(len(ids)) >= len(prompt.token_ids)))
    return documents


def chat_messages(question: Any, data: Data, place: str) -> list[dict[str, str]]:
    """Chat messages of one question. `prompt_template` goes around the last one, which is the user's."""
    column = f"column {data.prompt_column!r}"
    if question is None:
        raise UserError(f"{place}: {column} is null: write a question, or leave the row out")
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    elif isinstance(question, list) and not data.chat_template:
        raise UserError(f"{place}: {column} is not text: set [data] chat_template = true for lists of chat messages")
    if not isinstance(question, list) or not question:
        raise UserError(f"{place}: {column} must be text or a list of chat messages, not {shown(question)}")
    messages = []
    for message in question:
        said = message if isinstance(message, dict) else {}
        role, content = said.get("role"), joined_text(said.get("content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(
                f'{place}: {column} must hold {{"role": text, "content": text}} messages, not {shown(message)}'
            )
        messages.append({"role": role, "content": content})
    last = messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise UserError(f"{place}: {column} must end with what a user asks, not with {shown(last)}")
    last["content"] = data.prompt_template.replace("{prompt}", last["content"])
    if data.system_prompt:
        if messages[0]["role"] == "system":
            raise UserError(f"{place}: {column} has a system message of its own: empty [data] system_prompt")
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _text(row: DatasetRow, column: str, place: str, key: str, otherwise: str) -> str:
    if column not in row:
        raise UserError(f"{place} has no column {column!r}: set {key} to one of {list(row)}, {otherwise}")
    value = row[column]
    if value is not None and not isinstance(value, str | int | float):
        raise UserError(f"{place}: column {column!r} must be text or a number, not {shown(value)}: change it, or {key}")
    return plain(value)


def plain(value: Any) -> str:
    """A cell as text: "" for null and NaN. A whole float is an integer: with a null, CSV's integers come as floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return "" if value is None or value != value else str(value)
