"""How far ahead of the trainer groups are asked: far enough that it does not wait, and no further."""

import math

WAITED_SHARE = 0.05
"""A step whose wait for groups was a greater share of it was held up by the rollouts."""


class Pace:
    """Bounds the groups that are asked and not yet trained on, `groups`, by what the trainer notices.

    It starts with one step's: while the trainer trains on some, the next step's are answered. After a step that was
    held up it grows, by twice the share of the step that was waited for and at most by a step's worth. When none was
    for as long as an answer may be under way, and more than a quarter of a step's groups lie ready that no step wants
    yet, it shrinks by that quarter. So rollouts that are the bottleneck run ahead as far as staleness allows, and the
    answers of those that are not are hardly older than one step.
    """

    def __init__(self, groups_per_step: int, max_age: int, surplus: int) -> None:
        self._per_step = groups_per_step
        self._least = groups_per_step + surplus
        self._most = (max_age + 2) * groups_per_step + surplus
        self._patience = 2 * (max_age + 1)
        self._steps_on_time = 0
        self.groups = self._least

    def step(self, waited_s: float, step_s: float, spare: int) -> None:
        """A step has taken its groups: it waited for them so long, out of all its time; `spare` complete ones stay."""
        waited_share = waited_s / step_s if step_s > 0 else 0.0
        if waited_share > WAITED_SHARE:
            self._steps_on_time = 0
            growth = math.ceil(self._per_step * min(2 * waited_share, 1.0))
            self.groups = min(self.groups + growth, self._most)
            return
        self._steps_on_time += 1
        quarter = -(-self._per_step // 4)
        if self._steps_on_time > self._patience and spare > quarter:
            self.groups = max(self.groups - quarter, self._least)
