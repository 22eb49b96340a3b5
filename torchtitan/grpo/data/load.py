"""All prompts of a configuration: those to train on, and the held-out sets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from torchtitan.config import JobConfig
from torchtitan.grpo.config.job_config import HeldOutSet
from torchtitan.grpo.config.tables import held_out_rows, held_out_sets, source_of, table_title, training_sources
from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.mixture import Mixture
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.sources import question
from torchtitan.grpo.errors import UserError

Prompts = PromptSource | Mixture
"""What a run trains on."""
Make = Callable[..., PromptSource]
"""`PromptSource`, or what takes its arguments and has its methods."""


def load_training(
    config: JobConfig, tokenizer: PreTrainedTokenizerBase, held_out: list[HeldOut], make: Make = PromptSource
) -> Prompts:
    """`[data]`, or `[[data.mixture]]`. Rows that ask a question of a held-out set are left out.

    Args:
        held_out: From `load_held_out`, by the same `make`.

    Raises:
        UserError: See `PromptSource`; the message names the table.
    """
    columns = {
        each.name: each.data.question_column
        for each in held_out_sets(config)
        if each.own_rows or config.data.mixture  # one source holds a question out that another asks
    }
    asked = {
        question(prompt.columns, columns[each.name])
        for each in held_out
        if each.name in columns
        for prompt in each.prompts
    }
    seed, functions = config.debug.seed or 0, config.reward.functions
    loaded = []
    for source in training_sources(config):
        kept_back = held_out_rows(config, source.name)
        with _named("data.mixture", source.name):
            own = {"validation_prompts": kept_back, "asked": asked, "functions": functions}
            loaded.append(make(source.data, tokenizer, seed, **own))
    return Mixture(config.data.mixture, loaded, seed) if config.data.mixture else loaded[0]


def load_held_out(config: JobConfig, tokenizer: PreTrainedTokenizerBase, make: Make = PromptSource) -> list[HeldOut]:
    """The held-out sets: `[[validation.sets]]`, else one for each source, which is one without a name for `[data]`.

    Raises:
        UserError: See `PromptSource`; the message names the table.
    """
    return [_held_out(config, each, tokenizer, make) for each in held_out_sets(config)]


def _held_out(config: JobConfig, table: HeldOutSet, tokenizer: PreTrainedTokenizerBase, make: Make) -> HeldOut:
    functions = config.reward.functions
    with _named("validation.sets" if config.validation.sets else "data.mixture", table.name):
        source = make(
            replace(table.data, curriculum=""),
            tokenizer,
            config.debug.seed or 0,
            held_out=not table.own_rows,
            validation_prompts=0 if table.own_rows else held_out_rows(config, source_of(config, table).name),
            functions=functions,
        )
    prompts = [
        replace(prompt, source=table.name or prompt.source, functions=prompt.functions or tuple(table.functions))
        for prompt in source.first(table.prompts)
    ]
    sampling = table.samples_per_prompt, table.temperature, table.max_answer_tokens, table.top_p, table.min_p
    return HeldOut(table.name, prompts, *sampling)


@contextmanager
def _named(path: str, name: str) -> Iterator[None]:
    """Say in errors about [data] which table they are about."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(str(error).replace("[data]", table_title(path, name))) from error
