"""How far ahead of the trainer groups are asked: far enough that it does not wait, and no further."""

import math

WAITED_SHARE = 0.1
"""Steps of which a greater share was spent on waiting for groups were held up by the rollouts."""
WINDOW = 4
"""So many steps at least are judged together: one slow answer, or one step that trained on little, says nothing."""


class Pace:
    """Bounds the groups that are asked and not yet trained on, `groups`, by what the trainer notices.

    It starts with one step's: while the trainer trains on some, the next step's are answered. When some steps in a row
    were held up, it grows by twice the share of their time that was spent waiting, at most to double. When none were
    for as long as an answer may be under way, it gives up what lay ready all that time, less a quarter of a step. So
    rollouts that are the bottleneck run ahead as far as staleness allows, and the answers of those that are not are
    hardly older than one step. Growing is not free where servers compute at their limit: with more under way, what the
    next step needs comes later.
    """

    def __init__(self, groups_per_step: int, max_age: int, surplus: int) -> None:
        self._per_step = groups_per_step
        self._least = groups_per_step + surplus
        self._most = (max_age + 2) * groups_per_step + surplus
        self._patience = max(2 * (max_age + 1), WINDOW)
        self.groups = self._least
        self._judge_anew()

    def step(self, waited_s: float, step_s: float, spare: int) -> None:
        """A step has taken its groups: it waited for them so long, out of all its time; `spare` complete ones stay."""
        self._steps += 1
        self._waited_s += waited_s
        self._all_s += step_s
        self._spare = min(self._spare, spare)
        if self._steps < WINDOW or self._all_s <= 0:
            return
        share = self._waited_s / self._all_s
        if share > WAITED_SHARE:
            self.groups = min(self.groups + math.ceil(self.groups * min(2 * share, 1.0)), self._most)
            self._judge_anew()
        elif self._steps >= self._patience:
            unused = self._spare - math.ceil(self._per_step / 4)
            self.groups = max(self.groups - max(unused, 0), self._least)
            self._judge_anew()

    def _judge_anew(self) -> None:
        self._steps, self._waited_s, self._all_s = 0, 0.0, 0.0
        self._spare = self._most
