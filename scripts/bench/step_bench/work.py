"""What one optimizer step trains on, the same for every contender."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_TOKEN = 3  # tokens below it end a document


@dataclass(frozen=True)
class Work:
    """One data-parallel rank's microbatches of documents of one length.

    Attributes:
        documents: Of one microbatch.
        length: Positions of a document. It has `length` + 1 tokens, the last of which is only predicted.
        prompt: Its first tokens, which are not trained; at least 1.
        group: Documents that follow each other with the same prompt.
    """

    microbatches: int
    documents: int
    length: int
    prompt: int
    group: int = 1

    @classmethod
    def of(cls, job: Mapping) -> "Work":
        """From the arguments of step.py."""
        length = job["documents"]
        prompt = min(max(1, round(job["prompt_share"] * (length + 1))), length)
        return cls(job["microbatches"], job["tokens"] // length, length, prompt, job.get("group", 1))

    @property
    def tokens(self) -> int:
        return self.microbatches * self.documents * self.length

    @property
    def trained_tokens(self) -> int:
        return self.microbatches * self.documents * (self.length + 1 - self.prompt)

    @property
    def lengths(self) -> list[int]:
        """Positions of each document."""
        return [self.length] * (self.microbatches * self.documents)

    def sequences(self, vocab_size: int, seed: int) -> Tensor:
        """Random tokens, int64 [microbatches, documents, length + 1], on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.microbatches, self.documents, self.length + 1)
        tokens = torch.randint(FIRST_TOKEN, vocab_size, shape, generator=generator)
        groups = tokens.view(-1, self.group, self.length + 1)
        groups[..., : self.prompt] = groups[:, :1, : self.prompt].clone()
        return tokens

    def advantages(self, seed: int) -> Tensor:
        """Of each document, float32 [microbatches, documents], on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.microbatches, self.documents, generator=generator)
