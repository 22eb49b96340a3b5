"""The sources of rows, one row of `SOURCES` each: `[data] source`."""

import ast
import codecs
import gzip
import importlib.util
import inspect
import json
import operator
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.errors import UserError, did_you_mean, in_words, shown
from torchtitan.grpo.sources.rows import DatasetRow, DatasetRows, as_json, whole

OTHER_FILES = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet", ".arrow": "Arrow"}
"""Files of rows that `source = "hf"` reads, by the ends of their names."""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_OF_FILES = ("path", "validation_path", "messages_column", "tools_column")


@dataclass(frozen=True)
class Wanted:
    """What a source is asked for.

    Attributes:
        path, subset, split: As [data] has them, or `validation_path` and `validation_split`.
        path_key: Which of the two keys the path is of, for messages.
        prompt_column, answer_column: Columns that a generated row has.
        extra: Rows that a generator makes for held-out sets, on top of its size.
        of_environment: The rows that the run's environment brings; None if it brings none.
    """

    path: str = ""
    subset: str = ""
    split: str = ""
    path_key: str = "path"
    prompt_column: str = "question"
    answer_column: str = "answer"
    extra: int = 0
    of_environment: Sequence[DatasetRow] | None = None


def _anything(**arguments: Any) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Source:
    """A row of `SOURCES`.

    Attributes:
        load: Gets a `Wanted` and returns all rows. Its keyword arguments are those of `[data] source_args`, with their
            types and defaults. One that is named `tasks` splits the metrics: each row then has a column `task`.
        path: What `[data] path` names, "a file" or "a folder". The columns of such rows are the user's.
        reads: Further keys of [data] that other sources do not read.
        check: Gets all arguments of `load`, of the right types. Yields what is wrong with them, beginning with a name.
        fills_columns: A row has each column that any row has, with None for a missing value, in messages too.
    """

    load: Callable[..., DatasetRows]
    path: str = ""
    reads: tuple[str, ...] = ()
    check: Callable[..., Iterator[str]] = _anything
    fills_columns: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of [data] that this source reads and not every source does."""
        return (_OF_FILES if self.path else ()) + self.reads + (("source_args",) if self.arguments else ())

    @property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """What `[data] source_args` may hold, by name."""
        parameters = inspect.signature(self.load).parameters
        return {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}


def _arithmetic(
    wanted: Wanted,
    *,
    size: int = 10000,
    max: int = 99,
    operators: list[str] = ["+"],  # noqa: B006
    question: str = "{left}{operator}{right}=",
) -> DatasetRows:
    """Distinct problems as `question` asks them, with operands up to `max`: `size` in a fixed random order, or all.

    Column `calculation` is a target for `[sft] target_column`. In every third row it calls `environments.calculator`;
    in the others it is the answer alone. So a warm start learns the call without a preference for it.
    """
    operands = max + 1
    problems = range(len(operators) * operands**2)
    rows: list[DatasetRow] = []
    for problem in random.Random(0).sample(problems, min(len(problems), size + wanted.extra)):
        rest, right = divmod(problem, operands)
        which, left = divmod(rest, operands)
        sign = operators[which]
        answer = str(OPERATORS[sign](left, right))
        text = question.replace("{left}", str(left)).replace("{right}", str(right)).replace("{operator}", sign)
        calculation = answer if len(rows) % 3 else f"<{left}{sign}{right}>{answer}\n{answer}"
        columns = {wanted.prompt_column: text, wanted.answer_column or "answer": answer}
        rows.append({"calculation": calculation} | columns)
    return whole(rows, f'[data] source = "arithmetic" (max = {max})')


def _check_arithmetic(size: int, max: int, operators: list[str], question: str) -> Iterator[str]:
    yield from _check_count("size", size, 10**8)
    yield from _check_count("max", max, 10**9)
    if not operators or not set(operators) <= OPERATORS.keys():
        yield f'operators = {json.dumps(operators)} must hold some of "+", "-", "*"'
    places = ["{left}", "{right}", *(["{operator}"] if len(operators) > 1 else [])]
    if lacking := [place for place in places if place not in question]:
        yield f"question = {json.dumps(question)} lacks {', '.join(lacking)}"


def _check_count(name: str, value: int, at_most: int) -> Iterator[str]:
    if not 1 <= value <= at_most:
        yield f"{name} = {value} must be at least 1 and at most {at_most}"


def _reasoning_gym(wanted: Wanted, *, tasks: list[str] = [], size: int = 10000) -> DatasetRows:  # noqa: B006
    """`size` questions of each task, interleaved (https://github.com/open-thought/reasoning-gym).

    A task's scorer needs the entry that the task made, with its tuples and integer keys. JSON would lose those, so
    the row holds the entry as a Python literal.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError('[data] source = "reasoning_gym" needs the package: pip install reasoning-gym')
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = sorted(set(DATASETS) - {"composite"})  # a mixture of others, which needs its own configuration
    for task in tasks:
        if task not in known:
            raise UserError(f'[data] source_args tasks: reasoning-gym has no task "{task}"{did_you_mean(task, known)}')
    per_task = size + -(-wanted.extra // len(tasks))
    generators = [reasoning_gym.create_dataset(task, size=per_task, seed=0) for task in tasks]
    rows = []
    for i in range(per_task):
        for task, generator in zip(tasks, generators, strict=True):
            entry = generator[i]
            answer = "" if entry["answer"] is None else entry["answer"]
            row = {wanted.prompt_column: entry["question"], wanted.answer_column or "answer": answer}
            rows.append(row | {"task": task, "entry": _literal(entry)})
    return whole(rows, f'[data] source = "reasoning_gym" ({", ".join(tasks)})')


def _check_reasoning_gym(tasks: list[str], size: int) -> Iterator[str]:
    yield from _check_count("size", size, 10**8)
    if not tasks:
        yield 'tasks is empty: source = "reasoning_gym" needs task names, as in ["basic_arithmetic"]'
    for task, times in Counter(tasks).items():
        if times > 1:
            yield f"tasks has {json.dumps(task)} {times} times"


def _literal(entry: DatasetRow) -> str:
    text = repr(entry)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):  # an object of the task's own: the scorer gets what JSON keeps
        text = repr(json.loads(json.dumps(entry, default=str)))
    return text


def _jsonl(wanted: Wanted) -> DatasetRows:
    path, key = wanted.path, wanted.path_key
    if not os.path.isfile(path):
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        instead = "give a JSONL file, or set [data] source"
        if os.path.isdir(path):
            instead = 'for all files of a folder set [data] source = "hf"'
        raise UserError(f"[data] {key} = {path!r} is not a file{where}: {instead}")
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
    found = whole(rows, path, lines)
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
        return "write one JSON object per line, or one list of them, in UTF-8"
    return f'it is {kind}: put it into a folder of its own, set [data] source = "hf" and give that folder\'s path'


def _hugging_face(wanted: Wanted) -> DatasetRows:
    """Rows of a folder from the Hub, or of one that `Dataset.save_to_disk` wrote."""
    import datasets

    path, split, key = wanted.path, wanted.split, wanted.path_key
    if not os.path.isdir(path):
        raise UserError(
            f"[data] {key} = {path!r} is not a folder: give one, or the dataset's id on the hub, as in openai/gsm8k"
        )
    saved = [name for name in ("dataset_dict.json", "state.json") if os.path.exists(os.path.join(path, name))]
    try:
        if saved:
            loaded = datasets.load_from_disk(path)
            splits = list(loaded) if isinstance(loaded, datasets.DatasetDict) else [split]
            configuration = None
        else:
            path, configuration = _configuration(path, wanted.subset, key)
            splits = datasets.get_dataset_split_names(path, configuration)
        if split not in splits:
            raise UserError(f"{path} has no split {split!r}: set [data] split or validation_split to one of {splits}")
        if saved:
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(path, configuration, split=split)
    except UserError:
        raise
    except Exception as error:  # what reads the files may raise anything, and often only the cause says why
        why = ": ".join(in_words(each) for each in (error, error.__cause__) if each is not None)
        raise UserError(f"[data] {key} = {path!r} cannot be read as a dataset: {why}") from error
    return whole(rows, f"{path} (split {split})")


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


def _of_environment(wanted: Wanted) -> DatasetRows:
    name, rows = '[data] source = "environment"', wanted.of_environment
    where = f"{name}: [rollout] environment"
    if rows is None:
        raise UserError(f"{where} brings no rows: name another source, or give the environment `rows`")
    at = "its rows"
    try:
        count = len(rows)
        for position in range(count):
            at = f"row {position}"
            row = rows[position]
            if not isinstance(row, dict):
                raise UserError(f"{where}: {at} is {shown(row)}: give a dict of columns")
            as_json(row, f"{where}: {at}")
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{where}: {at} cannot be read: {in_words(error)}. Give a list of dicts") from error
    if not count:
        raise UserError(f"{where} brings an empty list of rows: name another source, or give it some")
    return whole(rows, name)


SOURCES = {
    "arithmetic": Source(_arithmetic, check=_check_arithmetic),
    "jsonl": Source(_jsonl, path="a file"),
    "hf": Source(_hugging_face, path="a folder", reads=("subset", "split", "validation_split"), fills_columns=True),
    "reasoning_gym": Source(_reasoning_gym, check=_check_reasoning_gym),
    "environment": Source(_of_environment),
}
"""By `[data] source`. To add one: write its function above, and a row here."""
