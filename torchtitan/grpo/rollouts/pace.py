"""How far ahead of the trainer to request groups: far enough that it does not wait, and no further."""

import math
from collections import deque
from collections.abc import Sequence

WAITED_SHARE = 0.1
"""If steps wait for groups for more than this share of their time, rollouts hold them up."""
WINDOW = 2
"""Steps that are judged together. One slow answer is no evidence."""
MOST_GROWTH, MOST_CUT = 0.5, 0.3
"""Of the groups, at a time."""
LOST_STEPS = 0.6
"""Of the age, for an answer: it begins somewhere between two versions, and servers have a version a moment after the
step that made it. Found by simulation: with less, steps wait for old groups; with more, servers are less full."""
IN_TIME = 0.99
"""Share of the groups that are to be in time. One answer that is far longer than all others does not empty the servers
for all steps that remember it: its step waits."""


class Pace:
    """Bounds `groups`, the groups requested and not yet trained on, by how long the trainer waits.

    A step waits because too few groups of the order window are complete, or because an old one must come first lest it
    become too old. The one asks for more groups, the other for fewer: with fewer answers at once each is faster. What
    counts is which of the two takes more time, and by how much.

    - Start: the groups of two steps. Servers have the next step's requests while the last answers of this one run.
    - Grow: by the share of the time that steps waited for too few groups, less that for an old one.
    - Cut: if an old one took more, by half of the difference; to the start at least.
    - Shrink: if steps hardly waited for as long as an answer may take, by the complete groups that lay unused all that
      time, less a quarter of a step; to one step's groups at least.

    So rollouts that are the bottleneck run ahead as far as staleness allows. If they are not, answers are hardly older
    than one step.

    `under_way` bounds those groups that lack answers, so that nearly all can be in time. With G of them and B that are
    answered in each step, a group takes G / B steps on average (Little's law). A group takes as long as its longest
    answer, so the longest groups take longer in proportion to their tokens, and may take no longer than the age. With
    more groups than that, steps wait for old ones, whatever else is complete. Servers then run out of work, since
    nothing new may begin.
    """

    def __init__(self, groups_per_step: int, max_age: int, surplus: int) -> None:
        self._per_step = groups_per_step
        self._least = groups_per_step + surplus
        self._most = (max_age + 2) * groups_per_step + surplus
        self._start = min(2 * groups_per_step + surplus, self._most)
        self._patience = max(2 * (max_age + 1), 2 * WINDOW)
        self.groups = self._start
        self.under_way = self._most
        self._in_time_steps = max_age - LOST_STEPS
        steps = 2 * (max_age + 1)
        self._longest: deque[int] = deque(maxlen=steps * groups_per_step)
        self._answered: deque[int] = deque(maxlen=steps)
        self._start_period()

    def _start_period(self) -> None:
        self._steps, self._wanting_s, self._waited_s, self._all_s = 0, 0.0, 0.0, 0.0
        self._spare = self._most

    def room(self, requested: int, answered: int) -> int:
        """How many more groups to request. Of those requested and not yet trained on, so many have their answers."""
        return min(self.groups - requested, self.under_way - (requested - answered))

    def taken(self, longest: Sequence[int], replaced: int = 0) -> None:
        """Record the groups of a step.

        Args:
            longest: Tokens of each group's longest answer.
            replaced: Groups that were answered since the last step, and are not trained on.
        """
        self._longest.extend(longest)
        self._answered.append(len(longest) + replaced)
        ordered = sorted(self._longest)
        most = ordered[math.ceil(IN_TIME * len(ordered)) - 1]
        if most:
            mean = sum(min(tokens, most) for tokens in ordered) / len(ordered)
            answered = sum(self._answered) / len(self._answered)
            self.under_way = max(math.ceil(self._in_time_steps * answered * mean / most), self._start)

    def step(self, waited_s: float, step_s: float, spare: int, held_s: float = 0.0) -> None:
        """Record a step that has taken its groups.

        Args:
            waited_s: How long it waited for them.
            step_s: Its whole time.
            spare: Complete groups that it left.
            held_s: Of `waited_s`: how long it waited for an old group only.
        """
        self._steps += 1
        self._wanting_s += (waited_s - held_s) - held_s
        self._waited_s += waited_s
        self._all_s += step_s
        self._spare = min(self._spare, spare)
        if self._steps < WINDOW or self._all_s <= 0:
            return
        share = self._wanting_s / self._all_s
        if share > WAITED_SHARE:
            self.groups = min(self.groups + math.ceil(self.groups * min(share, MOST_GROWTH)), self._most)
            self._start_period()
        elif -share > WAITED_SHARE:
            cut = math.ceil(self.groups * min(-share / 2, MOST_CUT))
            self.groups = max(self.groups - cut, min(self.groups, self._start))
            self._start_period()
        elif self._steps >= self._patience:
            if self._waited_s <= WAITED_SHARE * self._all_s:
                unused = self._spare - math.ceil(self._per_step / 4)
                self.groups = max(self.groups - max(unused, 0), self._least)
            self._start_period()
