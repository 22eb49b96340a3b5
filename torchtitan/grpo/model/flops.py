"""FLOPs that training takes by the model's formula, whatever the kernels compute: the numerator of MFU."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of the matrix multiplications in a forward and a backward pass. What is computed again counts once.

    Attributes:
        per_token: 6 for each parameter of the layers' matrices. Frozen ones have no gradient: 4 for each of those. Of
            experts those count that one token goes through.
        per_answer_token: The same for the output layer, which computes trained answer tokens only.
        per_square: Times L^2 it is the causal attention of a document of L tokens, all layers and heads.
    """

    per_token: int
    per_answer_token: int
    per_square: int

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Of the whole model, sharded or not.

        Args:
            model: A model of torchtitan's parts (see `families.Family.model_cls`); meta tensors will do.
        """
        args = model.model_args
        matrices = sum(used(p, args) * _per_parameter(p) for p in model.layers.parameters() if p.dim() >= 2)
        output = args.vocab_size * args.dim * _per_parameter(model.output.weight)
        # 12 for each position that a token attends to; under the causal mask that is half the document.
        attention = 6 * args.n_layers * args.n_heads * args.head_dim
        return cls(matrices, output, attention)

    def __call__(self, lengths: Iterable[int], answer_tokens: int, shared: Iterable[int] | None = None) -> int:
        """FLOPs of packed documents.

        Args:
            lengths: Tokens of each document, prompt and answer, less those that are `shared`.
            answer_tokens: Trained answer tokens of all of them.
            shared: Positions that each document has in an earlier one, besides its own tokens. None: no document has.
        """
        lengths = list(lengths)
        before = [0] * len(lengths) if shared is None else shared
        attention = self.per_square * sum(n * (n + 2 * p) for n, p in zip(lengths, before, strict=True))
        return self.per_token * sum(lengths) + self.per_answer_token * answer_tokens + attention


def used(parameter: nn.Parameter, args: Any) -> int:
    """The elements that one token is multiplied by: of stacked experts those of `top_k`.

    Args:
        args: The model's arguments.
    """
    return parameter.numel() if parameter.dim() < 3 else parameter[0].numel() * args.moe_args.top_k


def _per_parameter(weight: nn.Parameter) -> int:
    """FLOPs per token: 2 in the forward pass, 2 for the gradient of its input, and 2 for its own."""
    return 6 if weight.requires_grad else 4
