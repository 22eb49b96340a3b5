r"""The final number of an answer, which `numeric_match` compares.

It is the one in the last `\boxed{}` or in a later line `#### 72`, else the last one in the text. Every pattern takes
time by the length of a text, whatever a model writes. Expressions are `math_verify`'s.
"""

import re
from collections import deque
from fractions import Fraction

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?|\.\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_NO_POWER = r"(?!\d|\^[-+({]*(?:\d|[a-z]\b))"
NUMBER = re.compile(
    rf"(?<![A-Za-z\d.^)}}\]/])(?<![A-Za-z\d)}}]_)(?<![\^_}}]{{)"
    rf"(?P<sign>[-+]?)(?:\\?[$€£¥]\s?(?P<second_sign>[-+]?))?"
    rf"(?P<top>{_UNSIGNED}){_NO_POWER}(?:\s?/\s?(?P<bottom>{_UNSIGNED}){_NO_POWER})?"
)
"""A number, as in `-$1,234.50`, `2e-3` and `3/2`; not in `H2O`, `x^2`, `x_2` or `a/2`."""
_WORDS = r"(?!(?:st|nd|rd|th)\b)(?:[A-Za-z]{2}|[mgshLJNW](?![A-Za-z]))[A-Za-z/. ]*(?:\^(?:\{-?\d\}|-?\d))?"
ALONE = re.compile(rf"[\s*_`$\\(]*{NUMBER.pattern}(?:\s*(?:\\?[%$]|[°€£¥]|\^\\circ|{_WORDS}))?[\s*_`$\\.!)}}]*")
"""A number with sign, currency, markup and unit."""
SPELLINGS = {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "{,}": ",", "\\!": "", "\\,": "", "\\approx": "= "}
"""What is read as something else."""
FRACTION = re.compile(r"\\[dtc]?frac\{?(\d+)\}?\{?(\d+)\}?")
TEXT_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname)\s*\{([^{}]*)\}")
EQUALS = re.compile(r"=|\\[gl]eq?(?![A-Za-z])")
DIGITS_MAX = 1000
"""Digits of a number, and size of its exponent, that numeric_match compares. Exact arithmetic on more costs time."""


def last_number(text: str) -> Fraction | None:
    """The exact value of the final number; None if there is none or it is beyond DIGITS_MAX.

    A box with anything but a number and its unit has none. A line `####` with more is a heading.
    """
    for spelling, meaning in SPELLINGS.items():
        text = text.replace(spelling, meaning)
    text = TEXT_COMMAND.sub(r"\1", FRACTION.sub(r"\1/\2", text))
    boxed, marked = text.rfind(r"\boxed{"), text.rfind("####")
    line = ALONE.fullmatch(text[marked + len("####") :].partition("\n")[0]) if marked >= 0 else None
    if marked > boxed and line is not None:
        return _value(line)
    inside = _inside(text, boxed + len(r"\boxed{")) if boxed >= 0 else ""
    if any(map(str.isdigit, inside)):
        return _value(ALONE.fullmatch(EQUALS.split(inside)[-1]))
    return _value(line or next(iter(deque(NUMBER.finditer(text), maxlen=1)), None))


def _inside(text: str, start: int) -> str:
    """What stands behind a `{`, up to its `}`; "" if there is none."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return ""


def _value(number: re.Match[str] | None) -> Fraction | None:
    if number is None:
        return None
    parts = number.groupdict(default="")
    top, bottom = _exact(parts["top"]), _exact(parts["bottom"] or "1")
    if top is None or not bottom:
        return None
    return top / bottom * (-1) ** (parts["sign"] + parts["second_sign"]).count("-")


def _exact(number: str) -> Fraction | None:
    """The value of `1,234.5e-6`."""
    mantissa, _, exponent = number.replace(",", "").lower().partition("e")
    if len(mantissa) > DIGITS_MAX or len(exponent) > 5 or abs(int(exponent or 0)) > DIGITS_MAX:
        return None
    return Fraction(f"{mantissa}e{exponent or 0}")
