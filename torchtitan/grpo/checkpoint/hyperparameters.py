"""Learning rate, betas, weight decay: a checkpoint has them beside AdamW's moments, but the configuration decides."""

import contextlib
from collections.abc import Iterator

from torch.optim.lr_scheduler import LambdaLR

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer


@contextlib.contextmanager
def kept(optimizers: OptimizersContainer, lr_schedulers: LRSchedulersContainer) -> Iterator[None]:
    """Around a load, before any step: the values that both were built with stay.

    Only the schedule's position is loaded. Learning rates are computed from it as the schedule computes them: without
    a change to the last bit those of the run that was saved.
    """
    built = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]
    yield
    for optimizer, scheduler, own in zip(optimizers, lr_schedulers, built, strict=True):
        assert isinstance(scheduler, LambdaLR)  # torchtitan builds no other
        scheduler.base_lrs = [settings["initial_lr"] for settings in own]
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, settings, rate in zip(optimizer.param_groups, own, rates, strict=True):
            group.update(settings | {"lr": rate})
        scheduler._last_lr = rates


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}
