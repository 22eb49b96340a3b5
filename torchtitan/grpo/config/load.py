"""From the command line to one checked JobConfig.

    defaults  <  TOML file (`--job.config_file run.toml`)  <  command line (`--grpo.group_size 16`)

torchtitan's ConfigManager merges them. Reading is stricter than there: each key and value is checked before a
dataclass is built. One error reports all problems, with the nearest known name for each unknown one.
"""

import contextlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, get_args, get_origin

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.grpo.config.contradictions import check_contradictions
from torchtitan.grpo.config.hints import unknown_flag, unknown_name, unknown_word
from torchtitan.grpo.config.jobs import Job, check_job, covering, without_unread
from torchtitan.grpo.config.keys import (
    MODULE,
    TABLES,
    Key,
    Mismatch,
    check_ranges,
    check_value,
    keys,
    label,
    merged_config,
    sections,
    shortened,
    show,
    type_name,
)
from torchtitan.grpo.config.machine import check_machine, planned_ranks
from torchtitan.grpo.config.tables import PATH_KEYS, fill_tables, read_tables, table_title
from torchtitan.grpo.config.target import NAMES, find_target
from torchtitan.grpo.config.unsupported import check_unsupported, honoured_keys
from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.tools.logging import logger

CONFIG_FILE = "job.config_file"
CUSTOM_MODULE = "job.custom_config_module"
PATHS = (
    "job.dump_folder",
    "model.hf_assets_path",
    "data.path",
    "data.validation_path",
    "data.chat_template_file",
    "checkpoint.folder",
    "rollout.urls_file",
    "weight_sync.disk_folder",
)
"""Keys whose values may start with `~`, the home folder."""

FULL = "full"
"""May follow `--dry_run` and `--check`, beside a target."""

HELP = f"""usage: grpo_train.py [--job.config_file FILE.toml] [--dry_run | --check] [--SECTION.KEY VALUE ...]
       sft_train.py  the same

Each key can stand in the TOML file as [SECTION] KEY, or here, which wins. Lists are comma-separated; booleans are
--SECTION.KEY and --SECTION.no-KEY, or true and false. --dry_run prints the keys that differ from their defaults, and
the plan: batch, memory, GPUs and disk. --check reads the task, too: it prints how many rows there are, a prompt, and
rewards of some answers. Both start no run, and both may be followed by the machine that the plan is about
({", ".join(NAMES)}) and by "{FULL}", for all keys. --version prints the version.
"""


@dataclass(frozen=True)
class DryRun:
    """What a command line asks for in place of a run.

    Attributes:
        target: The name of the machine to plan for, see `target.find_target`; "" if none is given.
        full: Print all keys, not only those that differ from their defaults.
        check: Read the task.
    """

    target: str = ""
    full: bool = False
    check: bool = False


def load_config(
    argv: list[str],
    dry_run: str | None = None,
    job: Job = "grpo",
    world_size: int | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    flags_only: Callable[[Mapping[str, Any]], Iterable[str]] = lambda given: (),
) -> JobConfig:
    """Read, merge and check the configuration of a run.

    Args:
        argv: The command line without the program's name.
        dry_run: The target of a dry run, see `DryRun`. None for a run.
        job: Keys that only the other job reads have their defaults in the result. The log names them.
        world_size: As for `check_machine`.
        defaults: Checked values by key, from `resolved`. What file and command line say replaces them. A key of another
            version of the program does not count.
        flags_only: Gets all that is given, by key. What file and `defaults` say of the sections and keys that it
            returns does not count.

    Returns:
        torchtitan's JobConfig with this project's sections. Every value is of its type and in its range.

    Raises:
        UserError: The file is unreadable; a key or flag is unknown, of the wrong type, out of range or without effect;
            or keys contradict one another. One message names all problems.
        SystemExit: `--help` or `--version`, with status 0.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    if "--version" in argv:
        print(f"torchtitan-grpo {version('torchtitan-grpo')}")
        sys.exit(0)
    problems: list[str] = []
    flags = _read_flags(argv, problems)
    given, path = dict(flags), flags.get(CONFIG_FILE)
    for key, value in _read_toml(path, problems) if path else ():
        given.setdefault(key, value)
    for each in honoured_keys():
        if defaults.get(each.path, each.default) != each.default:
            given.setdefault(each.path, defaults[each.path])
    left_out = list(flags_only(given))
    given = {key: value for key, value in given.items() if key in flags or not covering(key, left_out)}
    problems += [*check_unsupported(given), *check_job(given, job), *_check_paths(given)]
    _raise(problems, path)
    given, unread = without_unread(given, job)
    is_rank0 = os.environ.get("RANK", "0") == "0"
    if unread and is_rank0:
        logger.info(f"{job}_train.py does not read {', '.join(unread)}")

    given |= {name: os.path.expanduser(given[name]) for name in PATHS if name in given}
    config = _merge(given)
    rollout = config.rollout
    unnamed = COMMANDS[rollout.engine].bundled and not (rollout.urls or rollout.urls_file)
    if job == "grpo" and not rollout.replicas and (rollout.colocate or unnamed):
        ranks = planned_ranks(config, dry_run is not None) if world_size is None else world_size
        rollout.replicas = max(1, ranks) if rollout.colocate else 1  # a server on the GPU of each trainer process
    rollout.urls = [url.rstrip("/") for url in rollout.urls]
    fill_tables(config)
    _raise(check_ranges(config), path)
    target = None if dry_run is None else find_target(dry_run, config)
    _raise([*check_contradictions(config, job), *check_machine(config, world_size, target=target, job=job)], path)
    return config


def _check_paths(given: dict[str, Any]) -> Iterator[str]:
    """Paths with white space that nobody sees. In a TOML text, the backslashes of C:\\temp begin a tab."""
    paths = [(label(name), given.get(name)) for name in PATHS]
    for name in TABLES:
        tables = enumerate(given.get(name, []), start=1)
        paths += [
            (f"{table_title(name, table.get('name', ''), i)} {key}", table.get(key))
            for i, table in tables
            for key in PATH_KEYS
        ]
    for title, path in paths:
        if isinstance(path, str) and (path != path.strip() or re.search(r"[\0-\x1f]", path)):
            yield (
                f"{title} = {show(path)} has a tab, a line break or a space at its end: remove it (in a TOML text, "
                'write "/" or "\\\\" for a backslash)'
            )


def take_dry_run(argv: list[str]) -> tuple[DryRun | None, list[str]]:
    """Take `--dry_run` and `--check`, with the words that follow, out of a command line.

    Returns:
        What they ask for, None without them; and the other words.

    Raises:
        UserError: There is no such target, or there are two.
    """
    flags, named, left, is_own = [], [], [], False
    for word in argv:
        flag, _, name = word.partition("=") if word.startswith("--") else ("", "", word)
        if flag:
            is_own = flag.replace("-", "_") in ("__dry_run", "__check")
            flags += [flag] * is_own
        if not is_own:
            left.append(word)
        elif name in (*NAMES, FULL):
            named.append(name)
        elif name:
            known = ", ".join(NAMES)
            raise UserError(f'{flags[-1]} "{name}": no such target{did_you_mean(name, (*NAMES, FULL))}; one of {known}')
    targets = sorted({*named} - {FULL})
    if len(targets) > 1:
        raise UserError(f"{' and '.join(flags)} name {' and '.join(targets)}: keep one target")
    asked = DryRun("".join(targets), FULL in named, "--check" in flags)
    return asked if flags else None, left


def help_text() -> str:
    """Text of `--help`: each key with its type, default and meaning."""
    lines = [HELP]
    for key in honoured_keys():
        lines.append(f"  --{key.path} ({type_name(key.type)}, default {show(key.default)})")
        lines.append(f"        {key.meaning}")
    return "\n".join(lines)


def _raise(problems: list[str], path: str | None) -> None:
    """Raise one UserError for all problems, if there are any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        where = f" ({path} and the command line)" if path else ""
        raise UserError("\n  - ".join([f"{len(problems)} problems in the configuration{where}:", *problems]))


def _merge(given: dict[str, Any]) -> JobConfig:
    """Build the dataclasses from checked values, through torchtitan's ConfigManager."""
    tables: dict[str, Any] = {}
    for path, value in {**given, CUSTOM_MODULE: MODULE}.items():
        *parents, name = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    manager = ConfigManager()
    # Not `parse_args`: it would parse the command line again, and exit the process on an error.
    return manager._dict_to_dataclass(merged_config(), tables)


def _read_toml(path: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (path, checked value) of each valid key of a TOML file; append the others to `problems`."""
    text = ""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # Windows' editors begin a file with a BOM
            text = file.read()
        tables = tomllib.loads(text)
    except OSError as error:
        raise UserError(
            f"--job.config_file {shortened(path)}: cannot be read ({error.strerror}): give the path of a TOML file"
        ) from None
    except (ValueError, RecursionError) as error:  # bad TOML, bytes that are not UTF-8, or brackets by the thousand
        other = _other_format(path, text)
        why = f"is {other}: write it as TOML, like those in train_configs" if other else f"is not valid TOML: {error}"
        why += ". Save it as UTF-8" * isinstance(error, UnicodeDecodeError)
        raise UserError(f"--job.config_file {shortened(path)}: {why}") from None
    yield from _read_table(tables, "", problems)


def _other_format(path: str, text: str) -> str:
    """The format of a file that is no TOML, if its name or its first line tells; "" if not."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if path.endswith(".json") or first.startswith("{"):
        return "JSON"
    is_yaml = path.endswith((".yaml", ".yml")) or re.match(r"---\s*$|[\w.-]+:(\s|$)", first)
    return "YAML" if is_yaml else ""


def _read_table(table: dict[str, Any], section: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        path = f"{section}.{name}" if section else name
        if path in sections():
            if isinstance(value, dict):
                yield from _read_table(value, path, problems)
            else:
                problems.append(f"[{path}] is a section, not a value: write [{path}] and its keys below it")
        elif path == CONFIG_FILE:
            problems.append(f"{label(path)}: a TOML file cannot name another one: give --{path} on the command line")
        elif path in TABLES:
            yield path, read_tables(path, value, problems)
        elif path in keys():
            try:
                yield path, check_value(value, keys()[path].type)
            except Mismatch as error:
                problems.append(f"{label(path)} = {error}")
        else:
            problems.append(unknown_name(section, name, value))


def _read_flags(argv: list[str], problems: list[str]) -> dict[str, Any]:
    """Parse torchtitan's `--section.key value` flags. Hyphens count as underscores."""
    given: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            problems.append(unknown_word(word))
            continue
        path = flag[2:].replace("-", "_")
        section, _, name = path.rpartition(".")
        negated = path not in keys() and name.startswith("no_")
        key = keys().get(f"{section}.{name.removeprefix('no_')}" if negated else path)
        if key is None or (negated and not _is_switch(key)):
            problems.append(unknown_flag(flag))
            while words and not words[0].startswith("--"):
                words.pop(0)
            continue
        texts = [text] if equals else _values_of(key, words)
        if key.path in TABLES:
            problems.append(f"{flag}: write [[{key.path}]] tables into the TOML file; they are no flags")
        elif key.path in given:
            problems.append(f"--{key.path} is given twice: keep one")
        elif negated and texts:
            problems.append(f"{flag} takes no value: write {flag} or --{key.path} false")
        elif not texts and not _is_switch(key):
            problems.append(f"--{key.path} needs a value: {type_name(key.type)}")
        else:
            try:
                given[key.path] = check_value(_from_text(key, texts, negated), key.type)
            except Mismatch as error:
                problems.append(f"--{key.path} ({label(key.path)}): {error}")
    return given


def _is_switch(key: Key) -> bool:
    """Whether its flag may stand without a value, for true, and with `no-`, for false."""
    return bool in (key.type, *get_args(key.type))


def _values_of(key: Key, words: list[str]) -> list[str]:
    """Remove a flag's values from the front of `words` and return them."""
    if key.type is bool:
        return [words.pop(0)] if words and words[0].lower() in ("true", "false") else []
    many = get_origin(key.type) is list
    texts: list[str] = []
    while words and not words[0].startswith("--") and (many or not texts):
        texts.append(words.pop(0))
    return texts


def _from_text(key: Key, texts: list[str], negated: bool) -> Any:
    """A flag's values as a TOML value. What cannot be parsed stays text, for `check_value` to report."""
    if not texts:
        return not negated
    if key.type is dict:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(texts[0])
        return texts[0]
    if get_origin(key.type) is list:
        item = get_args(key.type)[0]
        if len(texts) == 1 and texts[0].startswith("["):  # as JSON or the file writes it, or a text such as [END]
            for read in (json.loads, lambda text: tomllib.loads(f"list = {text}")["list"]):
                with contextlib.suppress(ValueError, RecursionError):
                    return read(texts[0])
        return [_scalar(part, item) for text in texts for part in text.split(",") if part]
    options = get_args(key.type) or (key.type,)
    if type(None) in options and texts[0].lower() == "none":
        return None
    values = [_scalar(texts[0], option) for option in options]
    return next((value for value in values if not isinstance(value, str)), texts[0])


def _scalar(text: str, annotation: Any) -> Any:
    if annotation is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    return text
