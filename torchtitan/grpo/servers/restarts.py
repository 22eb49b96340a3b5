"""How often a server is started again, and after which pauses."""

import time
from collections import deque

BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
"""Pause before the first restart in WINDOW_S; twice as long before each further one."""
RESTARTS_MAX, WINDOW_S = 5, 900.0
"""What ends more often than this in so many seconds stays down."""


class Restarts:
    """The ends of one server, or of one supervisor, that may be started again."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()

    def ended(self) -> str:
        """It has just ended. Returns why it must stay down; "" if it may be started again after `pause_s`."""
        now = time.monotonic()
        self._ends.append(now)
        while self._ends[0] < now - WINDOW_S:
            self._ends.popleft()
        if len(self._ends) <= RESTARTS_MAX:
            return ""
        return f"for the {len(self._ends)}th time in {now - self._ends[0]:.0f} s, and is not started again"

    @property
    def pause_s(self) -> float:
        return min(BACKOFF_S * 2 ** (len(self._ends) - 1), BACKOFF_MAX_S)
