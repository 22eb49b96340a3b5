"""The table of docs/reliability.md, between two comments. Rows come from runs of the campaign only."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from chaos import ROOT

DOCS = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: written by scripts/chaos.py -->", "<!-- end of the table -->"
COLUMNS = ["part", "fault", "tries", "survived", "noticed, s", "recovered, s", "lost"]

Row = list[str]


def row(
    part: str,
    fault: str,
    tries: int,
    survived: int,
    detect_s: Sequence[float] = (),
    recover_s: Sequence[float] = (),
    lost: str = "",
) -> Row:
    """One line of the table. Seconds are the median and the worst."""
    return [part, fault, str(tries), str(survived), _span(detect_s), _span(recover_s), lost or "-"]


def show(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(rows: Sequence[Row], docs: Path = DOCS) -> None:
    """Put the rows into the table, in place of those of the same parts."""
    text = docs.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in old.strip().splitlines()[2:]]
    replaced = {line[0] for line in rows}
    merged = sorted([line for line in kept if line[0] not in replaced] + list(rows))
    docs.write_text(f"{before}{BEGIN}\n{show(merged)}\n{END}{after}", encoding="utf-8")


def _span(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else "-"
