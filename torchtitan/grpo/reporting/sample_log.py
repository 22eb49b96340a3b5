"""Answers of a run in files that `torchtitan-grpo samples` and `report` read."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.held_out import HeldOutAnswers
from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.reporting.step_lines import StepLines

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

TABLE_STEPS = 20
"""Steps between tables of answers at Weights & Biases, which stores each one as a file."""
_TOKENS_BEFORE = 32
"""No character has more."""


class Tables(Protocol):
    """The part of `MetricsLogger` that tables need."""

    enabled: bool

    def table(self, name: str, step: int, records: list[dict[str, Any]]) -> None: ...


class SampleLog:
    """Writes some answers of each step to `samples.jsonl`, and all held-out ones to `validation_samples.jsonl`.

    Now and then they also go to Weights & Biases, as tables.

    Args:
        config: The run's configuration ([metrics] samples_per_step).
        metrics: Where tables go.
        tokenizer: Finds an environment's tokens in the text of an answer.
    """

    def __init__(
        self, config: JobConfig, dump_folder: str | Path, metrics: Tables, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._count = config.metrics.samples_per_step if metrics.enabled else 0
        folder = Path(dump_folder)
        self._lines = StepLines(folder / "samples.jsonl") if self._count else None
        self._held_out = StepLines(folder / "validation_samples.jsonl") if metrics.enabled else None

    def log(self, step: int, groups: list[Group], advantages: list[list[float]]) -> None:
        """Write `chosen` ones of a step's answers.

        Args:
            advantages: One per sample, in the groups' order.
        """
        self.write(step, self.chosen(step, groups), advantages)

    def chosen(self, step: int, groups: list[Group]) -> list[tuple[int, dict[str, Any]]]:
        """`samples_per_step` answers, spread over the step's groups and over their samples: number and line of each."""
        answers = [sample for group in groups for sample in group]
        count = min(self._count, len(answers))
        # Shifted by the step, so that it is not always the first answer of a group.
        numbers = [(k * len(answers) // count + step) % len(answers) for k in range(count)]
        return [(number, self._record(step, answers[number])) for number in numbers]

    def write(self, step: int, chosen: list[tuple[int, dict[str, Any]]], advantages: list[list[float]]) -> None:
        """Write the lines of `chosen` answers of a step, with their advantages."""
        if self._held_out is not None:  # a resumed run may validate at other steps than before
            self._held_out.begin(step)
        if self._lines is None:
            return
        of_answers = list(itertools.chain.from_iterable(advantages))
        records = [record | {"advantage": of_answers[number]} for number, record in chosen]
        for record in records:
            self._lines.append(record)
        if step == 1 or step % TABLE_STEPS == 0:
            self._metrics.table("samples", step, records)

    def log_validation(self, step: int, answers: list[HeldOutAnswers]) -> None:
        """Write all held-out answers. Their `kind` is "greedy" or "sampled", their `source` the name of the set."""
        if self._held_out is None:
            return
        groups = [("greedy", group) for each in answers for group in each.greedy]
        groups += [("sampled", group) for each in answers for group in each.sampled]
        records = [self._record(step, sample) | {"kind": kind} for kind, group in groups for sample in group]
        for record in records:
            self._held_out.append(record)
        self._metrics.table("validation_samples", step, records)

    def _record(self, step: int, sample: Sample) -> dict[str, Any]:
        """One line. `versions` are the oldest and newest weight versions that sampled its tokens."""
        versions = sample.sampled_versions
        return {
            "step": step,
            "source": sample.prompt.source,
            **answer_record(sample),
            "versions": [min(versions), max(versions)] if versions else [],
            "given": given_text(sample, self._tokenizer),
        }

    def close(self) -> None:
        for lines in (self._lines, self._held_out):
            if lines is not None:
                lines.close()


def answer_record(sample: Sample) -> dict[str, Any]:
    """What each line of an answer says of it, in the files of runs and of evaluations."""
    return {
        "prompt_index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "answer": sample.text,
        "reference": sample.prompt.answer,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "reward_failures": sample.reward_failures,
        "finish_reason": sample.finish_reason,
        "answer_tokens": sample.sampled_tokens,
    }


def given_text(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Where an environment's tokens, such as a tool's result, are in `sample.text`: [first, end) in characters.

    Each token is decoded with the few before it: a character may have several, which are no text until the last one.
    """

    def chars(token_ids: list[int]) -> int:
        return len(tokenizer.decode(token_ids, skip_special_tokens=True))

    def decoded_with_others(token_id: int) -> bool:
        """Whether the token is a byte, or none of the tokenizer's and so without any text."""
        token = tokenizer.convert_ids_to_tokens(token_id)
        return token is None or token.startswith("<0x")

    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    spans, end = [], 0
    before: list[int] = []
    for sampled, run in itertools.groupby(
        zip(sample.loss_mask or [], sample.token_ids, strict=False), key=operator.itemgetter(0)
    ):
        ids = before + [token_id for _, token_id in run if token_id not in special]
        first, end = end, end + chars(ids) - chars(before)
        if not sampled and first < end:
            spans.append([first, end])
        kept = min(_TOKENS_BEFORE, len(ids))
        while kept < len(ids) and decoded_with_others(ids[-kept]):
            kept += 1
        before = ids[len(ids) - kept :]
    return spans
