"""Groups in which no answer has a reward: which of them are an outage that passes, and which end the run.

Pure bookkeeping: no clock, no network.
"""

import logging

from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards.failures import check_failures, described

logger = logging.getLogger(__name__)

WAIT_MIN_S, WAIT_MAX_S = 1.0, 60.0
ROW_MIN = 4
"""Fewer groups in a row are no outage, whatever the limit."""


class Outage:
    """What follows when the environment, the reward functions or a teacher failed on every answer of a group.

    - Another group replaces it at once, up to `max_failed_fraction` of a step.
    - More end the run, unless they failed in a row, and groups had rewards before. In a row: of those requested since
      the first one, none had a reward. That is an outage, as of a tool server that starts again. A group that was
      requested before the row ended, and fails later, is one of it.
    - In an outage others are requested after a wait, of as long as it has lasted, 1 to 60 s. A group that was requested
      in it and has a reward ends it. What failed in groups under way until then does not count.
    - The run ends if an outage lasts over `longest_s`. One that begins before groups have worked for as long as they
      had failed goes on with the time of the old one.

    Args:
        per_step: `[grpo] prompts_per_step`.
        max_failed_fraction: `[reward] max_failed_fraction`.
        longest_s: `[rollout] group_timeout_seconds`.

    Attributes:
        is_on: There is an outage.
        has_worked: A group has had a reward, perhaps before a resume.
    """

    def __init__(self, per_step: int, max_failed_fraction: float, longest_s: float) -> None:
        self._per_step, self._limit, self._longest_s = per_step, max_failed_fraction, longest_s
        self.is_on = self.has_worked = False
        self._counted: list[Group] = []  # in this step
        self._row: list[Group] = []  # ended last, without one that worked; the newest ones
        self._since = self._ended = 0.0  # the outage, or the last one
        self._first_after = 0  # groups from this number on were requested after the row began
        self._last_row: list[Group] = []  # the row that ended last, if it was no outage
        self._last_until = 0  # groups below this number were requested before it ended
        self._excused = 0  # groups below this number were under way in an outage
        self._worked_in_step = False

    def failed(self, group: Group, number: int, next_number: int, now: float) -> float:
        """A group has failed. How many seconds to wait before others are requested.

        Args:
            number: Of the group, in the order of requests. The next one gets `next_number`.

        Raises:
            UserError: The run ends. The message says what failed last, and how often.
        """
        if not self.is_on and number < self._excused:
            return 0.0
        if not self.is_on and number < self._last_until:
            return self._failed_late(group)
        if not self._row:
            self._first_after = next_number
            lasted = self._ended - self._since
            self._since = now if now - self._ended >= lasted else now - lasted
        self._row.append(group)
        if not self.is_on:
            self._counted.append(group)
            row, counted = len(self._row), len(self._counted)
            proven = row >= min(ROW_MIN, self._per_step) and (row > self._per_step or self._is_over(counted))
            if not self.has_worked or not proven:
                if self.has_worked and row == counted < min(ROW_MIN, self._per_step):
                    return 0.0  # perhaps an outage begins
                if self._is_over(counted) or (counted > self._per_step and not self._worked_in_step):
                    check_failures(self._counted, self._limit)
                return 0.0
            self.is_on = True
            del self._counted[-row:]
        del self._row[: -self._per_step]
        self._excused = next_number
        lasted = now - self._since
        if lasted >= self._longest_s:
            raise UserError(
                f"no group has got a reward for {lasted:.0f} s in all, over [rollout] group_timeout_seconds = "
                f"{self._longest_s:g}: {self.describe()}"
            )
        return min(max(lasted, WAIT_MIN_S), WAIT_MAX_S, self._longest_s - lasted)

    def worked(self, number: int, next_number: int, now: float) -> None:
        """The group with this number has rewards."""
        self.has_worked = self._worked_in_step = True
        if not self._row or number < self._first_after:
            return
        if self.is_on:
            logger.info("Groups have rewards again, after %.3g s", now - self._since)
            self.is_on, self._ended, self._excused = False, now, next_number
        else:
            self._last_row, self._last_until = list(self._row), next_number
        self._row.clear()

    def _failed_late(self, group: Group) -> float:
        """A group of the last row has failed, which another one has ended meanwhile."""
        self._counted.append(group)
        self._last_row.append(group)
        if self._is_over(len(self._counted)):
            if len(self._last_row) < min(ROW_MIN, self._per_step):
                check_failures(self._counted, self._limit)
            late = set(map(id, self._last_row))  # it was an outage, and is over
            self._counted = [counted for counted in self._counted if id(counted) not in late]
            self._excused = max(self._excused, self._last_until)
        return 0.0

    def counted(self, number: int, group: Group) -> Group:
        """The answers of a group with rewards that count: not the failed ones, if it was under way in an outage."""
        return [sample for sample in group if sample.reward is not None or number >= self._excused]

    def take(self) -> list[Group]:
        """A step ends: its failed groups that count. Those in a row at its end count in the next step, if any had
        rewards before: an outage may begin with them."""
        row = len(self._row) if self.has_worked and not self.is_on else 0
        first = max(0, len(self._counted) - row)
        taken, self._counted, self._worked_in_step = self._counted[:first], self._counted[first:], False
        return taken

    def describe(self) -> str:
        """What failed in the newest groups."""
        return described([sample for group in self._row for sample in group])

    def _is_over(self, failed: int) -> bool:
        return failed > self._limit * (failed + self._per_step)
