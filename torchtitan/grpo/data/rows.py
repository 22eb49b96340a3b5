"""The rows of every `[data] source`, split into training and held-out rows.

A row is a dict of columns. The seed decides neither which rows exist nor which are held out, so runs with different
seeds train and validate on the same questions. It only orders them, see `prompts.PromptSource`.
"""

import json
import logging
from collections.abc import Sequence, Set
from dataclasses import replace

from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.sources.rows import DatasetRow, DatasetRows, Key
from torchtitan.grpo.sources.table import SOURCES, Wanted

logger = logging.getLogger(__name__)


def load_rows(
    data: Data,
    held_out: bool,
    validation_prompts: int,
    asked: Set[str] = frozenset(),
    of_environment: Sequence[DatasetRow] | None = None,
) -> DatasetRows:
    """Load the rows to train on, or the held-out ones.

    Held-out rows are those of `validation_path` or `validation_split`. If neither is set, they are the last
    `validation_prompts` rows of the training data. Training rows that ask the same are then left out, see `key_of`.

    Args:
        validation_prompts: `[validation] prompts`; 0 holds nothing out of the training data.
        asked: Keys (`row_keys`) of other held-out rows, which are left out of the training rows too.
        of_environment: The rows of `[data] source = "environment"`.

    Raises:
        UserError: The data is missing, empty or unreadable. The message names file and key.
    """
    separate = bool(data.validation_path or data.validation_split)
    wanted = Wanted(data.path, data.subset, data.split, "path", data.prompt_column, data.answer_column)
    if held_out and separate:
        if data.validation_path:
            wanted = replace(wanted, path=data.validation_path, path_key="validation_path")
        return _load(data, replace(wanted, split=data.validation_split or data.split))
    kept_back = 0 if separate else validation_prompts
    rows = _load(data, replace(wanted, extra=kept_back, of_environment=of_environment))
    count = len(rows.rows)
    kept = range(max(0, count - kept_back), count)
    key = key_of(rows.rows, data, kept, asked)
    if key is None:
        if held_out:
            return replace(rows, positions=kept)
        if kept_back or asked:
            logger.warning(
                "%s: every row is like a held-out one, so training has those of the held-out sets, too: held-out "
                "rewards tell of new episodes only if the environment begins each one differently",
                rows.name,
            )
        return rows
    if kept_back >= count:
        raise UserError(
            f"{rows.name} has {count} rows, and {kept_back} are held out, which leaves no row to train on: lower "
            "[validation] prompts, or those of its sets, or add data"
        )
    if held_out:
        return replace(rows, positions=kept)
    rows = replace(rows, positions=range(count - kept_back), key=key)
    asked = asked | {key(rows.rows[i]) for i in kept}
    return _without_repeats(rows, asked, key) if asked else rows


def _load(data: Data, wanted: Wanted) -> DatasetRows:
    rows = SOURCES[data.source].load(wanted, **data.source_args)
    if not rows.positions:
        raise UserError(f"{rows.name} has no rows: give a dataset with at least one question")
    return rows


def _without_repeats(rows: DatasetRows, asked: Set[str], key: Key) -> DatasetRows:
    """Leave out rows that ask what a held-out one asks, because generators and datasets repeat themselves."""
    positions = [i for i in rows.positions if key(rows.rows[i]) not in asked]
    if not positions:
        raise UserError(
            f"Every training row of {rows.name} repeats a held-out question: add more varied data. An environment "
            "whose episodes differ by themselves may list each row several times"
        )
    return replace(rows, positions=positions)


def key_of(rows: Sequence[DatasetRow], data: Data, kept: range, asked: Set[str]) -> Key | None:
    """What tells one row of a source from another: its question.

    In a game all rows may ask the same, and another column says which episode it is: then the whole row. An environment
    may also list whole rows several times, or have a single one. If no row to train on is then unlike those held out,
    nothing in a row tells its episodes apart: None.

    Args:
        kept: Positions of the last rows, which are held out.
        asked: As for `load_rows`.
    """
    question = _question(data.question_column)
    if data.source != "environment":
        return question
    for key in (question, _whole):
        of_rows = [key(row) for row in rows]
        if len(set(of_rows)) > 1 and not set(of_rows[: kept.start]) <= asked | set(of_rows[kept.start :]):
            return key
    return _whole if 1 < len(set(of_rows)) == len(rows) else None


def row_keys(row: DatasetRow, column: str) -> set[str]:
    """All that `key_of` may compare a row by, with `column` for its question."""
    return {_question(column)(row), _whole(row)}


def _question(column: str) -> Key:
    return lambda row: json.dumps(row.get(column), default=str)


def _whole(row: DatasetRow) -> str:
    return json.dumps(row, default=str)
