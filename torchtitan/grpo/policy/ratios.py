"""Ratios of probabilities from differences of log-probabilities, and what stays finite of them."""

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""It keeps exp() finite: inf * 0 would be nan."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(x) within the bounds."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x. From LOG_RATIO_BOUND on, where exp(x) would overflow, it stays at its value there: gradient 0.

    The bound holds for both terms. If only exp(x) were bounded, -x would take over beyond: the value would fall, and
    the gradient point away from the reference. verl bounds x the same way and the value by 10, so that its gradient is
    0 from x = 2.6 on. TRL bounds neither.
    """
    log_ratio = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return log_ratio.expm1() - log_ratio
