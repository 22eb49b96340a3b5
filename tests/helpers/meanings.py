"""What each metric means by the lists of docs/metrics.md: every metric must be there."""

import functools
import re
from dataclasses import dataclass

from tests.helpers import ROOT

_PAGE = ROOT / "docs" / "metrics.md"
_NAME = r"`[^`\n]+`"
_ITEM = re.compile(rf"^- (?P<names>{_NAME}(?:,\s+{_NAME})*):\s+(?P<text>.+(?:\n  .+)*)$", re.MULTILINE)
_VARIABLE = re.compile(r"<(\w+)>")


@dataclass(frozen=True)
class Metric:
    """A documented metric.

    Attributes:
        name: As the page has it: `reward/mean`, `age/<k>/ratio`.
        text: What it means.
        variables: The parts of its name in angle brackets that a metric of this kind has, with their values.
    """

    name: str
    text: str
    variables: dict[str, str]


@functools.cache
def meaning(name: str) -> Metric:
    """The documented metric that a name belongs to. The text is empty if the page has none."""
    exact = documented().get(name)
    if exact is not None:
        return Metric(name, exact, {})
    for pattern, (form, text) in _forms().items():
        match = pattern.fullmatch(name)
        if match:
            return Metric(form, text, match.groupdict())
    return Metric(name, "", {})


@functools.cache
def documented() -> dict[str, str]:
    """Meaning of each name in the page's lists. Names in angle brackets stand for several."""
    texts: dict[str, str] = {}
    for item in _ITEM.finditer(_PAGE.read_text(encoding="utf-8")):
        text = " ".join(item["text"].replace("`", "").split())
        texts |= {name: text for name in re.findall(_NAME, item["names"])}
    return {name.strip("`"): text for name, text in texts.items()}


@functools.cache
def _forms() -> dict[re.Pattern[str], tuple[str, str]]:
    """Names with variables as patterns, the most exact first: few variables, then a long text around them."""
    forms = [(name, text) for name, text in documented().items() if "<" in name]
    forms.sort(key=lambda form: (form[0].count("<"), -len(form[0])))
    return {_pattern(name): (name, text) for name, text in forms}


def _pattern(name: str) -> re.Pattern[str]:
    parts = _VARIABLE.split(name)  # text and variables in turn
    return re.compile("".join(f"(?P<{part}>.+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))
