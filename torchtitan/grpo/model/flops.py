"""FLOPs that training takes by the model's formula, whatever the kernels compute: the numerator of MFU."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
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
        per_pair: For each pair of a token and one that it attends to, in one layer, all heads.
        windows: How many of the layers that attend have a sliding window of so many tokens; 0: none, or one that no
            document fills.
    """

    per_token: int
    per_answer_token: int
    per_pair: int
    windows: Mapping[int, int]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Of the whole model, sharded or not.

        Args:
            model: See `families.Family.model_cls`; meta tensors will do.
        """
        args = model.model_args
        matrices = sum(used(p, args) * _per_parameter(p) for p in model.layers.parameters() if p.dim() >= 2)
        output = args.vocab_size * args.dim * _per_parameter(model.output.weight)
        uses = getattr(args, "uses", None)  # of models of transformers
        given = [0] * args.n_layers if uses is None else uses.windows.values()
        windows = Counter(window if window < args.max_seq_len else 0 for window in given)
        return cls(matrices, output, 12 * args.n_heads * args.head_dim, windows)

    @property
    def attention_tokens(self) -> float:
        """The position from which a token's attention costs more than its other layers, for `packing.pack`.

        In a sliding window attention costs each token as much, so it counts as one of these. Infinity: no layer attends
        without one. Kernel speed is not considered.
        """
        in_windows = self.per_pair * sum(window * layers for window, layers in self.windows.items())
        without = self.per_pair * self.windows.get(0, 0)
        return (self.per_token + self.per_answer_token + in_windows) / without if without else math.inf

    def __call__(self, lengths: Iterable[int], answer_tokens: int, shared: Iterable[int] | None = None) -> int:
        """FLOPs of packed documents.

        Args:
            lengths: Tokens of each document, prompt and answer, less those that are `shared`.
            answer_tokens: Trained answer tokens of all of them.
            shared: Positions that each document has in an earlier one, besides its own tokens. None: no document has.
        """
        lengths = list(lengths)
        before = [0] * len(lengths) if shared is None else shared
        pairs = 0.0
        for n, p in zip(lengths, before, strict=True):
            pairs += sum(k * (_pairs(p + n, window) - _pairs(p, window)) for window, k in self.windows.items())
        return self.per_token * sum(lengths) + self.per_answer_token * answer_tokens + int(self.per_pair * pairs)


def _pairs(length: int, window: int) -> float:
    """Under the causal mask, half of the square, or less by a window."""
    reach = min(length, window or length)
    return reach * (2 * length - reach) / 2


def used(parameter: nn.Parameter, args: Any) -> int:
    """The elements that one token is multiplied by: of stacked experts those of `top_k`.

    Args:
        args: The model's arguments.
    """
    experts = getattr(args, "moe_args", None) if parameter.dim() == 3 else None  # convolutions have three, too
    # By the shape: to index a sharded tensor would gather it.
    return parameter.numel() if experts is None else math.prod(parameter.shape[1:]) * experts.top_k


def _per_parameter(weight: nn.Parameter) -> int:
    """FLOPs per token: 2 in the forward pass, 2 for the gradient of its input, and 2 for its own."""
    return 6 if weight.requires_grad else 4
