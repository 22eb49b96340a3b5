"""The rows of every `[data] source`, split into training and held-out rows.

A row is a dict of columns. The seed decides neither which rows exist nor which are held out, so runs with different
seeds train and validate on the same questions. It only orders them, see `prompts.PromptSource`.
"""

import ast
import codecs
import gzip
import importlib.util
import json
import operator
import os
import random
import zlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.tools.logging import logger

DatasetRow = dict[str, Any]
"""Column name -> value."""
Key = Callable[[DatasetRow], str]
"""What a row is compared by."""
OTHER_FILES = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet", ".arrow": "Arrow"}
"""Files of rows that `source = "hf"` reads, by the ends of their names."""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass
class DatasetRows:
    """The training or the held-out rows of one dataset.

    Attributes:
        rows: The whole dataset. Lazy, if its source can read lazily.
        positions: Which of `rows` are selected.
        name: The dataset's file, folder or source, for messages.
        lines: Line number of each of `rows` in a JSONL file, else None.
        key: What tells a row from others, see `key_of`. None if nothing does.
    """

    rows: Sequence[DatasetRow]
    positions: Sequence[int]
    name: str
    lines: Sequence[int] | None = None
    key: Key | None = None

    def place(self, position: int) -> str:
        """A row's name in messages."""
        return f"{self.name}:{self.lines[position]}" if self.lines else f"{self.name}, row {position}"


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
    if held_out and separate:
        return _load(data, data.validation_path or data.path, data.validation_split or data.split, "validation_path", 0)
    kept_back = 0 if separate else validation_prompts
    if data.source == "environment":
        rows = _of_environment(of_environment)
    else:
        rows = _load(data, data.path, data.split, "path", kept_back)
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
            f"{rows.name} has {count} rows and [validation] prompts = {kept_back}, which leaves no row to train on: "
            "lower [validation] prompts or add data"
        )
    if held_out:
        return replace(rows, positions=kept)
    rows = replace(rows, positions=range(count - kept_back), key=key)
    asked = asked | {key(rows.rows[i]) for i in kept}
    return _without_repeats(rows, asked, key) if asked else rows


def _load(data: Data, path: str, split: str, key: str, extra: int) -> DatasetRows:
    """All rows of a source. A generator makes `extra` held-out rows in addition to `[data] size`."""
    if data.source == "arithmetic":
        return _arithmetic(data, extra)
    if data.source == "reasoning_gym":
        return _reasoning_gym(data, extra)
    rows = _jsonl(path, key) if data.source == "jsonl" else _hugging_face(path, data.subset, split, key)
    if not rows.positions:
        raise UserError(f"{rows.name} has no rows: give a dataset with at least one question")
    return rows


def _of_environment(rows: Sequence[DatasetRow] | None) -> DatasetRows:
    name = '[data] source = "environment"'
    if not rows:
        what = "brings no rows" if rows is None else "brings an empty list of rows"
        raise UserError(f"{name}: [rollout] environment {what}: name another source, or give the environment `rows`")
    return DatasetRows(rows, range(len(rows)), name)


def _without_repeats(rows: DatasetRows, asked: Set[str], key: Key) -> DatasetRows:
    """Leave out rows that ask what a held-out one asks, because generators and datasets repeat themselves."""
    positions = [i for i in rows.positions if key(rows.rows[i]) not in asked]
    repeats = len(rows.positions) - len(positions)
    if not positions:
        raise UserError(
            f"Every training row of {rows.name} repeats a held-out question: add more varied data. An environment "
            "whose episodes differ by themselves may list each row several times"
        )
    if repeats:
        logger.info("%s: %d training rows repeat a held-out question and are left out", rows.name, repeats)
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


def _arithmetic(data: Data, extra: int) -> DatasetRows:
    """Distinct problems as `arithmetic_question` asks them, with operands up to `arithmetic_max`.

    There are `size` of them in a fixed random order, or all.

    Column `calculation` is a target for `[sft] target_column`. In every third row it calls `environments.calculator`;
    in the others it is the answer alone. So a warm start learns the call without a preference for it.
    """
    operands = data.arithmetic_max + 1
    problems = len(data.arithmetic_operators) * operands**2
    rows: list[DatasetRow] = []
    for problem in random.Random(0).sample(range(problems), min(problems, data.size + extra)):
        rest, right = divmod(problem, operands)
        which, left = divmod(rest, operands)
        sign = data.arithmetic_operators[which]
        answer = str(OPERATORS[sign](left, right))
        text = data.arithmetic_question.replace("{left}", str(left)).replace("{right}", str(right))
        question = {data.prompt_column: text.replace("{operator}", sign), data.answer_column or "answer": answer}
        calculation = answer if len(rows) % 3 else f"<{left}{sign}{right}>{answer}\n{answer}"
        rows.append({"calculation": calculation} | question)
    return DatasetRows(rows, range(len(rows)), f'[data] source = "arithmetic" (arithmetic_max = {data.arithmetic_max})')


def _reasoning_gym(data: Data, extra: int) -> DatasetRows:
    """`[data] size` questions of each task, interleaved (https://github.com/open-thought/reasoning-gym).

    A task's scorer needs the entry that the task made, with its tuples and integer keys. JSON would lose those, so
    the row holds the entry as a Python literal.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError('[data] source = "reasoning_gym" needs the package: pip install reasoning-gym')
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = sorted(set(DATASETS) - {"composite"})  # a mixture of others, which needs its own configuration
    for task in data.tasks:
        if task not in known:
            raise UserError(f'[data] tasks: reasoning-gym has no task "{task}"{did_you_mean(task, known)}')
    per_task = data.size + -(-extra // len(data.tasks))
    generators = [reasoning_gym.create_dataset(task, size=per_task, seed=0) for task in data.tasks]
    rows = []
    for i in range(per_task):
        for task, generator in zip(data.tasks, generators, strict=True):
            entry = generator[i]
            answer = "" if entry["answer"] is None else entry["answer"]
            row = {data.prompt_column: entry["question"], data.answer_column or "answer": answer}
            rows.append(row | {"task": task, "entry": _literal(entry)})
    return DatasetRows(rows, range(len(rows)), f'[data] source = "reasoning_gym" ({", ".join(data.tasks)})')


def _literal(entry: DatasetRow) -> str:
    text = repr(entry)
    try:
        ast.literal_eval(text)
    except ValueError:  # an object of the task's own: the scorer gets what JSON keeps
        text = repr(json.loads(json.dumps(entry, default=str)))
    return text


def _jsonl(path: str, key: str) -> DatasetRows:
    if not os.path.isfile(path):
        raise UserError(f"[data] {key} = {path!r} is not a file: give a JSONL file, or set [data] source")
    if not os.access(path, os.R_OK):
        raise UserError(f"[data] {key} = {path!r} cannot be read: permission denied")
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    rows: list[DatasetRow] = []
    lines: list[int] = []
    try:
        with gzip.open(path) if packed else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not lines and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                    rows = _parsed(line + file.read(), path, number)
                    break
                if line.strip():
                    rows.append(_parsed(line, path, number))
                    lines.append(number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"[data] {key} = {path!r} is a torn gzip file ({error}): copy or pack it again") from error
    found = DatasetRows(rows, range(len(rows)), path, lines)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{found.place(i)} is a {type(row).__name__}: {_instead(path)}")
    return found


def _parsed(text: bytes, path: str, line: int) -> Any:
    """The JSON value that begins in this line."""
    try:
        return json.loads(text.rstrip())
    except (ValueError, RecursionError) as error:
        line += getattr(error, "lineno", 1) - 1
        raise UserError(f"{path}:{line} is not JSON ({error}): {_instead(path)}") from error


def _instead(path: str) -> str:
    """What to do about a file that is not JSON lines."""
    kind = OTHER_FILES.get(os.path.splitext(path.removesuffix(".gz"))[1].lower())
    if kind is None:
        return "write one JSON object per line, or one list of them"
    return f'it is {kind}: put it into a folder of its own, set [data] source = "hf" and give that folder\'s path'


def _hugging_face(path: str, subset: str, split: str, key: str) -> DatasetRows:
    """Rows of a folder from the Hub, or of one that `Dataset.save_to_disk` wrote."""
    import datasets

    if not os.path.isdir(path):
        raise UserError(
            f"[data] {key} = {path!r} is not a folder: download the dataset first "
            "(hf download NAME --repo-type dataset --local-dir FOLDER)"
        )
    saved = [name for name in ("dataset_dict.json", "state.json") if os.path.exists(os.path.join(path, name))]
    try:
        if saved:
            loaded = datasets.load_from_disk(path)
            splits = list(loaded) if isinstance(loaded, datasets.DatasetDict) else [split]
            configuration = None
        else:
            path, configuration = _configuration(path, subset, key)
            splits = datasets.get_dataset_split_names(path, configuration)
        if split not in splits:
            raise UserError(f"{path} has no split {split!r}: set [data] split or validation_split to one of {splits}")
        if saved:
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(path, configuration, split=split)
    except UserError:
        raise
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"[data] {key} = {path!r} cannot be read as a dataset: {error}") from error
    return DatasetRows(rows, range(len(rows)), f"{path} (split {split})")


def _configuration(path: str, subset: str, key: str) -> tuple[str, str | None]:
    """Folder and configuration name of `[data] subset`: one that README.md declares, or a folder of its own."""
    import datasets

    if subset and os.path.isdir(os.path.join(path, subset)) and not _declares(path):
        return os.path.join(path, subset), None
    names = datasets.get_dataset_config_names(path)
    if subset and subset not in names:
        raise UserError(
            f"{path} has no subset {subset!r}: set [data] subset to one of {names}{did_you_mean(subset, names)}"
        )
    if not subset and len(names) > 1:
        raise UserError(f"[data] {key} = {path!r} holds several subsets: set [data] subset to one of {names}")
    return path, subset or names[0]


def _declares(path: str) -> bool:
    readme = os.path.join(path, "README.md")
    if not os.path.isfile(readme):
        return False
    from huggingface_hub import DatasetCard

    return bool(DatasetCard.load(readme).data.to_dict().get("configs"))
