"""A live line at the bottom of a terminal. Whatever Python prints comes above it."""

import sys
from collections.abc import Callable

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BAR_CHARS = 16
_REFRESHES_PER_S = 2

Styled = list[tuple[str, str]]
"""Pieces of one line, each with a style of rich, such as "bold red"."""


class Terminal:
    """The live line: a progress bar and a text that may change while nothing else happens.

    rich sends stdout and stderr through itself: log lines, tracebacks and warnings of any thread leave the live line
    whole. What another process writes to the terminal may cover it. It is drawn again within half a second.

    Args:
        total: Of the progress bar.
        text: The text, for a width in characters. It is called from a thread.
    """

    def __init__(self, total: int, text: Callable[[int], Styled]) -> None:
        self.done = 0
        self._total = total
        self._text = text
        # Long lines are left to the terminal: it wraps them again when its width changes.
        self._console = RichConsole(highlight=False, soft_wrap=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._line,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        self._console.show_cursor(True)  # hidden, it would stay so if the process is killed

    @property
    def width(self) -> int:
        """Characters of a line."""
        return self._console.width

    def print(self, *pieces: tuple[str, str]) -> None:
        """Print a line above the live line."""
        self._console.print(Text.assemble(*pieces))

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1, 0, 0))
        text = Text.assemble(*self._text(self.width - _BAR_CHARS - 1))
        line.add_row(ProgressBar(self._total, self.done, width=_BAR_CHARS), text)
        return line
