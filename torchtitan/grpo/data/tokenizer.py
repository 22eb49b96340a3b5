"""The tokenizer of a model's folder: loaded, with the ids that end an answer, and against the model's embeddings."""

import json
import logging
import os
from collections.abc import Iterable

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchtitan.grpo.data.chat import rendered
from torchtitan.grpo.data.samples import ANY_VOCAB
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)


def load_tokenizer(folder: str, chat_template_file: str = "", vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder.

    Args:
        chat_template_file: `[data] chat_template_file`, which replaces its chat template.
        vocab_size: The model's. A warning says if the tokenizer has more. None: not compared.

    Raises:
        UserError: The folder or its tokenizer.json is missing or broken, or the file cannot be read.
    """
    if not os.path.isdir(folder):
        raise UserError(
            f"[model] hf_assets_path = {folder!r} is not a folder: give one with config.json and tokenizer.json"
        )
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise UserError(
            f"[model] hf_assets_path = {folder!r} has no tokenizer.json: copy the model's tokenizer files there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself for a file that it cannot parse
        raise UserError(
            f"[model] hf_assets_path = {folder!r}: the tokenizer cannot be loaded ({_one_line(error)}): download the "
            "tokenizer files again"
        ) from error
    last = max(tokenizer.get_vocab().values())
    if vocab_size is not None and last >= vocab_size:
        logger.warning(
            f"[model] hf_assets_path = {folder!r}: the tokenizer has ids up to {last}, and the model embeddings for "
            f"{vocab_size} (vocab_size of config.json): a text with one of the others is refused"
        )
    if chat_template_file:
        try:
            with open(chat_template_file, encoding="utf-8") as file:
                tokenizer.chat_template = file.read()
        except (OSError, ValueError) as error:
            raise UserError(f"[data] chat_template_file = {chat_template_file!r} cannot be read: {error}") from error
    return tokenizer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def check_text(text: str, where: str) -> None:
    """Refuse a text that is no Unicode, which no tokenizer takes.

    Raises:
        UserError: It has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds half of a surrogate pair, as of a cut emoji: write the character whole"
        ) from error


def check_embeddings(ids: Iterable[int], where: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse tokens that the model has no embedding for, as after `add_tokens` alone.

    Args:
        where: What has these ids, for the message.
        vocab_size: The model's.

    Raises:
        UserError: An id is not under `vocab_size`.
    """
    last = max(ids, default=0)
    if last >= vocab_size:
        highest = max(last, *tokenizer.get_vocab().values())
        raise UserError(
            f"{where} has id {last} ({tokenizer.convert_ids_to_tokens(last)!r}): the tokenizer has ids up to "
            f"{highest}, and the model embeddings for {vocab_size} (vocab_size of config.json). Save the model after "
            f"resize_token_embeddings({highest + 1}) in transformers, or remove the tokens that were added"
        )


class _GenerationConfig(msgspec.Struct):
    """What is read of generation_config.json."""

    eos_token_id: int | list[int] | None = None


def end_token_ids(tokenizer: PreTrainedTokenizerBase, folder: str, vocab_size: int = ANY_VOCAB) -> list[int]:
    """Ids of the tokens that end an answer: the tokenizer's end token, then those of generation_config.json.

    Raises:
        UserError: There is none, or one that is not under `vocab_size`. generation_config.json is broken.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    path = os.path.join(folder, "generation_config.json")
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                listed = msgspec.convert(json.load(file), _GenerationConfig).eos_token_id
        except (ValueError, msgspec.ValidationError) as error:
            raise UserError(f"{path} is no generation config ({error}): download it again") from error
        listed = [] if listed is None else [listed] if isinstance(listed, int) else listed
        ids += [token for token in listed if token not in ids]
    if not ids:
        raise UserError(
            f"{folder} names no end token: set eos_token in its tokenizer_config.json "
            "or eos_token_id in its generation_config.json"
        )
    check_embeddings(ids, f"{folder}: an end token", tokenizer, vocab_size)
    turn_end = _turn_end(tokenizer)
    if turn_end not in (None, *ids):
        logger.warning(
            f"The chat template of {folder} ends a turn with {tokenizer.convert_ids_to_tokens(turn_end)}, which is "
            f"none of the model's end tokens {tokenizer.convert_ids_to_tokens(ids)}, as in base models. Answers go on "
            f"behind it unless [rollout] stop_token_ids has {turn_end}"
        )
    return ids


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes right behind what the assistant says; None if there is none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = rendered(tokenizer, "", messages, tokenize=False)
    except UserError:  # it wants other messages
        return None
    behind = tokenizer(text.rpartition("b")[2], add_special_tokens=False)["input_ids"][:1]
    added = tokenizer.added_tokens_decoder
    return behind[0] if behind and behind[0] in added and added[behind[0]].special else None
