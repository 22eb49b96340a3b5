"""How far ahead of the trainer to request groups: far enough that it does not wait, and no further."""

import math

WAITED_SHARE = 0.1
"""If steps wait for groups for more than this share of their time, rollouts hold them up."""
WINDOW = 4
"""Steps that are judged together, at least. One slow answer, or one short step, is no evidence."""


class Pace:
    """Bounds `groups`, the groups requested and not yet trained on, by how long the trainer waits.

    - Start: the groups of one step. While the trainer trains, the next step's groups are answered.
    - Grow: if several steps in a row were held up, by twice the share of their time spent waiting, at most doubling.
    - Shrink: if no step was held up for as long as an answer may take, by the complete groups that lay unused all that
      time, less a quarter of a step.

    So rollouts that are the bottleneck run ahead as far as staleness allows. If they are not, answers are hardly older
    than one step. Growing costs something where servers are full: the groups of the next step then come later.
    """

    def __init__(self, groups_per_step: int, max_age: int, surplus: int) -> None:
        self._per_step = groups_per_step
        self._least = groups_per_step + surplus
        self._most = (max_age + 2) * groups_per_step + surplus
        self._patience = max(2 * (max_age + 1), WINDOW)
        self.groups = self._least
        self._start_period()

    def _start_period(self) -> None:
        self._steps, self._waited_s, self._all_s = 0, 0.0, 0.0
        self._spare = self._most

    def step(self, waited_s: float, step_s: float, spare: int) -> None:
        """Record a step that has taken its groups.

        Args:
            waited_s: How long it waited for them.
            step_s: Its whole time.
            spare: Complete groups that it left.
        """
        self._steps += 1
        self._waited_s += waited_s
        self._all_s += step_s
        self._spare = min(self._spare, spare)
        if self._steps < WINDOW or self._all_s <= 0:
            return
        share = self._waited_s / self._all_s
        if share > WAITED_SHARE:
            self.groups = min(self.groups + math.ceil(self.groups * min(2 * share, 1.0)), self._most)
            self._start_period()
        elif self._steps >= self._patience:
            unused = self._spare - math.ceil(self._per_step / 4)
            self.groups = max(self.groups - max(unused, 0), self._least)
            self._start_period()
