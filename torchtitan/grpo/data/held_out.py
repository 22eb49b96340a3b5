"""Held-out sets, and the answers to them."""

from dataclasses import dataclass

from torchtitan.grpo.data.samples import Group, Prompt


@dataclass(frozen=True)
class HeldOut:
    """A held-out set, ready to be asked.

    Attributes:
        name: "" for that of the plain [validation] keys.
        prompts: In the order of its rows, the same every time.
        samples: Sampled answers per prompt, besides the greedy one.
        temperature, top_p: Of the sampled answers.
        max_answer_tokens: Longest answer.
    """

    name: str
    prompts: list[Prompt]
    samples: int
    temperature: float
    max_answer_tokens: int
    top_p: float = 1.0


@dataclass
class HeldOutAnswers:
    """Scored answers to one held-out set, in the order of its prompts: one greedy answer each, and the sampled ones."""

    held_out: HeldOut
    greedy: list[Group]
    sampled: list[Group]

    @property
    def groups(self) -> list[Group]:
        """All groups, the greedy ones first."""
        return self.greedy + self.sampled
