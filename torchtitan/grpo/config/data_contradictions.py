"""What the keys of data, rewards and supervised fine-tuning must satisfy together."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchtitan.grpo.config.job_config import NO_ENVIRONMENT, TEMPLATE_OWN, Data, HeldOutSet
from torchtitan.grpo.config.keys import LARGEST, Mismatch, check_value, keys, label, show, unread
from torchtitan.grpo.config.ranges import ImportPath
from torchtitan.grpo.config.tables import titled_tables, training_sources
from torchtitan.grpo.errors import did_you_mean
from torchtitan.grpo.sources.table import SOURCES, Source

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

BUILT_IN = ("exact_match", "numeric_match", "math_verify", "reasoning_gym")
"""Reward functions without a module: those of `rewards/functions.py`."""


def check_data(config: JobConfig) -> Iterator[str]:
    if not config.data.mixture:
        yield from _check_rows(config.data)
    yield from check_function("data.curriculum", config.data.curriculum)


def check_tables(config: JobConfig) -> Iterator[str]:
    """`[[data.mixture]]` and `[[validation.sets]]`."""
    times = Counter((type(table), table.name) for _, table in titled_tables(config))
    named = sorted(source.name for source in config.data.mixture)
    for title, table in titled_tables(config):
        held_out = isinstance(table, HeldOutSet)
        if not table.name:
            yield f"{title} has no name: give one, for metrics"
        elif not re.fullmatch(r"[\w.-]+", table.name, re.ASCII):
            yield f"{title} name: it becomes part of metrics' names, so write letters, digits, _, - and . only"
        elif (count := times[type(table), table.name]) > 1:
            yield f"{title} is there {count} times: give each table a name of its own"
        if unknown := [name for name in table.functions if name not in config.reward.functions]:
            yield (
                f"{title} functions has {show(unknown[0])}, which is not in [reward] functions"
                f"{did_you_mean(unknown[0], config.reward.functions)}: list it there, with its weight if there are any"
            )
        if held_out and named and table.name not in named and not table.own_rows:
            yield (
                f"{title} has neither rows of its own nor the name of a [[data.mixture]] source: give source and path, "
                f"or one of the names {named}"
            )
        if not held_out and table.data.max_prompt_tokens > config.data.max_prompt_tokens:
            yield (
                f"{title} max_prompt_tokens = {table.data.max_prompt_tokens} is over [data] max_prompt_tokens = "
                f"{config.data.max_prompt_tokens}, which is that of the longest source: raise that one"
            )
        if not held_out or any(f"data.{name}" in keys() for name in table.given):
            problems = [*_check_unread(table.data), *_check_rows(table.data)]
            yield from (problem.replace("[data]", title) for problem in problems)


def _check_unread(data: Data) -> Iterator[str]:
    of_data = (key for key in keys().values() if key.section == "data")
    return unread(lambda path: getattr(data, path.removeprefix("data.")), of_data)


def _check_rows(data: Data) -> Iterator[str]:
    """The keys of one source, as [data] has them."""
    source = SOURCES[data.source]
    if source.arguments:
        yield from (f"[data] source_args {problem}" for problem in _check_arguments(data, source))
    if source.path and not data.path:
        yield f"[data] path is missing: source = {show(data.source)} needs {source.path}"
    if source.path and not data.prompt_column:
        yield "[data] prompt_column is empty: name the column with the question"
    if "split" in source.keys and not data.split:
        yield '[data] split is empty: name one, usually "train"'
    if "{prompt}" not in data.prompt_template:
        yield f"[data] prompt_template = {show(data.prompt_template)} lacks {{prompt}}, which stands for the question"
    if data.chat_template_file and not os.path.isfile(data.chat_template_file):
        yield f"[data] chat_template_file = {show(data.chat_template_file)} is no file: give a Jinja template"
    for name in data.chat_template_kwargs:
        if not name.isidentifier() or name in TEMPLATE_OWN:
            yield f"[data] chat_template_kwargs has {show(name)}: name variables that the run does not set itself"
    yield from _check_pattern("data.answer_pattern", data.answer_pattern)
    training = (data.path, data.split)
    held_out = (data.validation_path or data.path, data.validation_split or data.split)
    named = source.path and (data.validation_path or data.validation_split)
    if named and held_out == training:
        yield (
            "[data] validation_path and validation_split name the same rows as [data] "
            f"path = {show(data.path)}, split = {show(data.split)}: change them, or leave them out to hold out the "
            "last rows"
        )


def _check_arguments(data: Data, source: Source) -> Iterator[str]:
    """`[data] source_args`: the names and types that the source's function takes, then its own check."""
    known, problems = source.arguments, []
    for name, value in data.source_args.items():
        if name not in known:
            takes = ", ".join(known)
            problems.append(
                f"has {show(name)}, which source = {show(data.source)} does not take{did_you_mean(name, known)}: it "
                f"takes {takes}"
            )
            continue
        try:
            check_value(value, known[name].annotation)
        except Mismatch as error:
            problems.append(f"{name} = {error}")
    defaults = {name: each.default for name, each in known.items()}
    yield from problems or source.check(**defaults | data.source_args)


def check_reward(config: JobConfig) -> Iterator[str]:
    reward = config.reward
    teacher_alone = config.distill.teacher_urls and config.distill.mode == "only"
    if not (reward.functions or config.rollout.environment or teacher_alone):
        yield (
            '[reward] functions is empty: name at least one, as in ["exact_match"], or a [rollout] environment that '
            "gives rewards"
        )
    for title, table in titled_tables(config):
        if isinstance(table, HeldOutSet) and table.environment == NO_ENVIRONMENT and not reward.functions:
            yield (
                f'{title} environment = "{NO_ENVIRONMENT}" gives no rewards, and [reward] functions is empty: name one '
                "that scores the set's answers"
            )
    for function, times in Counter(reward.functions).items():
        if times > 1:
            yield f"[reward] functions has {show(function)} {times} times: give it a weight instead"
        if ":" in function:
            yield from check_function("reward.functions", function)
        elif function not in BUILT_IN:
            yield (
                f"[reward] functions: there is no built-in {show(function)}{did_you_mean(function, BUILT_IN)}. Choose "
                f'from {list(BUILT_IN)} or name a function of your own as "module:function"'
            )
    if reward.weights and len(reward.weights) != len(reward.functions):
        yield (
            f"[reward] weights has {len(reward.weights)} entries for {len(reward.functions)} [reward] functions: "
            "give one for each, or leave it out for 1 each"
        )
    if reward.weights and not any(reward.weights):
        yield "[reward] weights are all 0: every reward would be 0"
    if any(abs(weight) > LARGEST for weight in reward.weights):
        yield f"[reward] weights = {show(reward.weights)} must be at most {LARGEST} in size, as every number"
    for title, functions, data in _scored(config):
        own = "" if title == "[data]" else f", or name others in {title} functions"
        if "reasoning_gym" in functions and data.source != "reasoning_gym":
            yield (
                f'[reward] functions has "reasoning_gym", which scores tasks of {title} source = "reasoning_gym", not '
                f"{show(data.source)}: leave it out{own}"
            )
        compared = {"exact_match", "numeric_match", "math_verify"} & set(functions)
        if compared and SOURCES[data.source].path and not data.answer_column:
            names = ", ".join(sorted(compared))
            yield f"{title} answer_column is empty, but [reward] functions {names} compare with it: name it{own}"
    if reward.answer_pattern and reward.functions and all(":" in function for function in reward.functions):
        yield (
            f"[reward] answer_pattern = {show(reward.answer_pattern)} is read by built-in functions only, and "
            "[reward] functions has none: leave it out (a function of your own gets the whole answer)"
        )
    yield from _check_pattern("reward.answer_pattern", reward.answer_pattern)


def check_warm_start(config: JobConfig) -> Iterator[str]:
    for source in training_sources(config):
        data = source.data
        if config.sft.steps and SOURCES[data.source].path and not (config.sft.target_column or data.answer_column):
            yield "[sft] target_column is missing: name the column to learn, or set [data] answer_column"
            break


def check_sft(config: JobConfig) -> Iterator[str]:
    """What `sft_train.py` learns, and from which columns."""
    tables = [("[data]", config.data)] if not config.data.mixture else []
    tables += [(title, table.data) for title, table in titled_tables(config)]
    for title, data in tables:
        if data.messages_column and data.prompt_template != keys()["data.prompt_template"].default:
            yield (
                f"{title} prompt_template = {show(data.prompt_template)} goes around the question of prompt_column; "
                "with messages_column leave it out"
            )
        learned = data.messages_column or config.sft.target_column or data.answer_column
        if SOURCES[data.source].path and not learned:
            yield (
                f"{title}: there is no column to learn: set messages_column, or [sft] target_column or [data] "
                "answer_column"
            )
    if config.sft.train_on != "all" and not any(data.messages_column for _, data in tables):
        yield f"[sft] train_on = {show(config.sft.train_on)} is read with [data] messages_column only"
    if config.checkpoint.keep_best.endswith("loss"):
        yield (
            f"[checkpoint] keep_best = {show(config.checkpoint.keep_best)} would keep the highest loss: use "
            '"validation/token_accuracy"'
        )


def _scored(config: JobConfig) -> Iterator[tuple[str, list[str], Data]]:
    """For [data] or each table: its name in messages, the functions that score its rows, and its rows' keys.

    Not where each row names its functions, or comes from a held-out set's own environment, which may give rewards.
    """
    if not config.data.mixture and not config.data.reward_column:
        yield "[data]", config.reward.functions, config.data
    for title, table in titled_tables(config):
        own = isinstance(table, HeldOutSet) and table.rows_environment and table.data.source == "environment"
        if not (table.data.reward_column or own):
            yield title, table.functions or config.reward.functions, table.data


def _check_pattern(path: str, pattern: str) -> Iterator[str]:
    if not pattern:
        return
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        yield f"{label(path)} = {show(pattern)} is no regular expression: {error}"
        return
    if groups != 1:
        yield (
            f"{label(path)} = {show(pattern)} has {groups} groups and needs one: put ( ) around the answer, and write "
            "other brackets as (?: ) or \\( \\)"
        )


def check_function(path: str, name: str) -> Iterator[str]:
    """An import path must look like one. Whether the function exists is known when it is imported."""
    if name and not ImportPath.is_one(name):
        yield f'{label(path)}: {show(name)} must be "module:function", as in "my_package.my_module:my_function"'
