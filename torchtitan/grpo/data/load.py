"""All prompts of a configuration: those to train on, and the held-out sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.config.job_config import HeldOutSet
from torchtitan.grpo.config.tables import held_out_rows, held_out_sets, source_of, table_title, training_sources
from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.mixture import Mixture
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.rows import row_keys
from torchtitan.grpo.errors import renamed
from torchtitan.grpo.sources.rows import DatasetRow

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

Prompts = PromptSource | Mixture
"""What a run trains on."""
Make = Callable[..., PromptSource]
"""`PromptSource`, or what takes its arguments and has its methods."""
Rows = Mapping[str, Sequence[DatasetRow] | None]
"""The rows that the run's environment brings, by "", and those of held-out sets with one of their own, by their names.
None for one that brings none."""


def load_training(
    config: JobConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[HeldOut],
    make: Make = PromptSource,
    rows: Rows | None = None,
) -> Prompts:
    """`[data]`, or `[[data.mixture]]`. Rows that ask what a held-out set asks are left out.

    Args:
        held_out: From `load_held_out`, by the same `make` and `rows`.
        rows: Of environments.

    Raises:
        UserError: See `PromptSource`; the message names the table.
    """
    columns = {
        each.name: each.data.question_column
        for each in held_out_sets(config)
        if each.own_rows or config.data.mixture  # one source holds a question out that another asks
    }
    asked = {
        key
        for each in held_out
        if each.name in columns
        for prompt in each.prompts
        for key in row_keys(prompt.columns, columns[each.name])
    }
    seed, functions = config.debug.seed or 0, config.reward.functions
    loaded = []
    for source in training_sources(config):
        kept_back = held_out_rows(config, source.name)
        with _named("data.mixture", source.name):
            own = {"validation_prompts": kept_back, "asked": asked, "functions": functions}
            loaded.append(make(source.data, tokenizer, seed, of_environment=(rows or {}).get(""), **own))
    return Mixture(config.data.mixture, loaded, seed) if config.data.mixture else loaded[0]


def load_held_out(
    config: JobConfig, tokenizer: PreTrainedTokenizerBase, make: Make = PromptSource, rows: Rows | None = None
) -> list[HeldOut]:
    """The held-out sets: `[[validation.sets]]`, else one for each source, which is one without a name for `[data]`.

    Raises:
        UserError: See `PromptSource`; the message names the table.
    """
    return [_held_out(config, each, tokenizer, make, rows or {}) for each in held_out_sets(config)]


def _held_out(
    config: JobConfig, table: HeldOutSet, tokenizer: PreTrainedTokenizerBase, make: Make, rows: Rows
) -> HeldOut:
    functions = config.reward.functions
    with _named("validation.sets" if config.validation.sets else "data.mixture", table.name, table.rows_environment):
        source = make(
            replace(table.data, curriculum=""),
            tokenizer,
            config.debug.seed or 0,
            held_out=not table.own_rows,
            validation_prompts=0 if table.own_rows else held_out_rows(config, source_of(config, table).name),
            functions=functions,
            of_environment=rows.get(table.rows_environment),
        )
    prompts = [
        replace(prompt, source=table.name or prompt.source, functions=prompt.functions or tuple(table.functions))
        for prompt in source.first(table.prompts)
    ]
    return HeldOut(
        name=table.name,
        prompts=prompts,
        samples=table.samples_per_prompt,
        temperature=table.temperature,
        max_answer_tokens=table.max_answer_tokens,
        top_p=table.top_p,
    )


@contextmanager
def _named(path: str, name: str, rows_environment: str = "") -> Iterator[None]:
    """Say in errors about [data], and about an environment that a table has, which table they are about."""
    title = table_title(path, name) if name else "[data]"
    with renamed("[data]", title), renamed("[rollout]", title if rows_environment else "[rollout]"):
        yield
