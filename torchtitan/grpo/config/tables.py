"""Lists of tables, `[[data.mixture]]` and `[[validation.sets]]`: read, checked, and filled with what they inherit.

    a table's keys  >  those of the source with a held-out set's name  >  [data]

What else a held-out set leaves out comes from [validation] and [rollout]. A table with another `source` than the one it
inherits from takes over no key that says which rows there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.earlier import GONE
from torchtitan.grpo.config.job_config import Data, HeldOutSet, MixtureSource
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.keys import Mismatch, check_value, range_problem, shortened, show, table_keys
from torchtitan.grpo.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

PATH_KEYS = ("path", "validation_path")
"""Keys of [data] whose values may start with `~`, the home folder."""
INHERITED = {
    "prompts": "validation.prompts",
    "samples_per_prompt": "validation.samples_per_prompt",
    "temperature": "validation.temperature",
    "top_p": "validation.top_p",
    "max_answer_tokens": "rollout.max_answer_tokens",
    "environment": "rollout.environment",
}
"""Keys of a held-out set, and where their values come from if it leaves them out."""
_OF_OTHER_ROWS = ("path", "subset", "split", "validation_path", "validation_split", "source_args")


def table_title(path: str, name: str, number: int = 0) -> str:
    """`[[data.mixture]] "gsm8k"`, as messages name a table; without a name by its number."""
    return f"[[{path}]] {show(name) if name else number}"


def read_tables(path: str, value: Any, problems: list[str]) -> list[dict[str, Any]]:
    """The valid keys of each table of a TOML file's `[[path]]`. Appends what is wrong to `problems`."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        problems.append(f"[[{path}]] is a list of tables: write [[{path}]] above the keys of each, with two brackets")
        return []
    return [_read_table(path, number, table, problems) for number, table in enumerate(value, start=1)]


def _read_table(path: str, number: int, table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    name = table.get("name")
    title = table_title(path, name if isinstance(name, str) else "", number)
    known, given = table_keys(path), {}
    for name, value in table.items():
        if gone := GONE.get(f"{path}.{name}") or GONE.get(f"data.{name}"):
            problems.append(f"{title} {name} is a key of an earlier version: {gone.replace('[data]', title)}")
            continue
        if name not in known:
            hint = did_you_mean(name, known) or f": see [[{path}]] in docs/configuration.md for its keys"
            problems.append(f"unknown key {title} {shortened(name)}{hint}")
            continue
        try:
            given[name] = check_value(value, known[name].type)
        except Mismatch as error:
            problems.append(f"{title} {name} = {error}")
            continue
        if problem := range_problem(known[name], given[name]):
            problems.append(f"{title} {name} = {problem}")
    return given


def fill_tables(config: JobConfig) -> None:
    """Make the tables that `read_tables` returned what they stand for, in place."""
    config.data.mixture = [_mixture_source(config.data, given) for given in config.data.mixture]
    config.validation.sets = [held_out_set(config, given) for given in config.validation.sets]


def _mixture_source(data: Data, given: dict[str, Any]) -> MixtureSource:
    own = {name: given[name] for name in table_keys("data.mixture", own_only=True) if name in given}
    return MixtureSource(**own, data=_rows(data, given), given=given)


def held_out_set(config: JobConfig, given: dict[str, Any]) -> HeldOutSet:
    """A `[[validation.sets]]` table with these keys, and what it inherits."""
    source = {source.name: source for source in config.data.mixture}.get(given.get("name", ""))
    own = {name: attrgetter(path)(config) for name, path in INHERITED.items()}
    own |= {"environment": "", "functions": source.functions if source else []}  # "" stands for that of [rollout]
    own |= {name: given[name] for name in table_keys("validation.sets", own_only=True) if name in given}
    return HeldOutSet(**own, data=_rows(source.data if source else config.data, given), given=given)


def _rows(base: Data, given: Mapping[str, Any]) -> Data:
    """`base` with the keys of [data] that a table gives."""
    kept = {}
    if given.get("source", base.source) != base.source:
        kept = {name: getattr(Data(), name) for name in _OF_OTHER_ROWS}
    names = {field.name for field in fields(Data)}
    own = {name: value for name, value in given.items() if name in names}
    own |= {name: os.path.expanduser(own[name]) for name in PATH_KEYS if name in own}
    return replace(base, mixture=[], **kept | own)


def training_sources(config: JobConfig) -> list[MixtureSource]:
    """What a run trains on: the mixture's sources, or [data] as the only one, without a name."""
    return config.data.mixture or [MixtureSource(data=config.data)]


def held_out_sets(config: JobConfig) -> list[HeldOutSet]:
    """The held-out sets. Without `[[validation.sets]]`, what each source of the training data holds out."""
    return config.validation.sets or [
        held_out_set(config, {"name": source.name} if source.name else {}) for source in training_sources(config)
    ]


def held_out_rows(config: JobConfig, name: str) -> int:
    """How many of its last rows a source of the training data keeps for the held-out sets that draw on it."""
    if not config.validation.enable:
        return 0
    drawing = [each for each in held_out_sets(config) if not each.own_rows and source_of(config, each).name == name]
    return max((each.prompts for each in drawing), default=0)


def source_of(config: JobConfig, held_out: HeldOutSet) -> MixtureSource:
    """The source whose held-out rows a set without rows of its own answers."""
    return next((source for source in training_sources(config) if source.name in (held_out.name, "")), MixtureSource())


def validation_metric_names(config: JobConfig, job: Job) -> list[str]:
    """Names of what each validation measures, but for standard errors. Without a reward, one may be missing."""
    means = ["token_accuracy", "loss"] if job == "sft" else ["greedy_reward", "sampled_reward"]
    names = [f"validation/{name}" for name in means]
    for each in held_out_sets(config):
        n = each.samples_per_prompt
        sampled = [f"pass_at_{k}" for k in pass_counts(n)] + [f"majority_at_{n}"] * (n > 1) + ["answer_tokens_mean"]
        prefix = f"validation/{each.name}/" if each.name else "validation/"
        names += [prefix + name for name in [*means, *(sampled if job == "grpo" else [])]]
    return list(dict.fromkeys(names))


def pass_counts(n: int) -> list[int]:
    """The k for which pass@k of n answers is measured: 1, 2, 4 and so on, and n."""
    return list(dict.fromkeys([*(2**i for i in range(n.bit_length())), n])) if n else []


def longest_tokens(config: JobConfig, trains: bool = True) -> int:
    """The longest prompt and answer together that a run, or an evaluation, asks a server for."""
    held_out = held_out_sets(config) if config.validation.enable else []
    lengths = [each.data.max_prompt_tokens + each.max_answer_tokens for each in held_out]
    return max([config.training.seq_len] * trains + lengths)


def check_lengths(config: JobConfig, positions: int) -> None:
    """Refuse a held-out set that is longer than a model with so many positions (0: only its servers know how many),
    before a server is started for it.

    Raises:
        UserError: The message names the set.
    """
    for each in held_out_sets(config) if positions and config.validation.enable and config.rollout.replicas else ():
        prompt, answer = each.data.max_prompt_tokens, each.max_answer_tokens
        if prompt + answer > positions:
            title = table_title("validation.sets", each.name) if config.validation.sets else "[data]"
            other = "" if config.validation.sets else "[rollout] "
            raise UserError(
                f"{title} max_prompt_tokens + {other}max_answer_tokens = {prompt} + {answer} is over this model's "
                f"maximum of {positions} tokens: lower one of them"
            )


def titled_tables(config: JobConfig) -> Iterator[tuple[str, MixtureSource | HeldOutSet]]:
    """Each table as the user wrote it, with its name in messages."""
    for path, tables in (("data.mixture", config.data.mixture), ("validation.sets", config.validation.sets)):
        for number, table in enumerate(tables, start=1):
            yield table_title(path, table.name, number), table
