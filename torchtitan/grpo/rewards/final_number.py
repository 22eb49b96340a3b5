"""The final number of an answer, which `numeric_match` compares.

It is the last one in the last `\\boxed{}` or in a line `#### 72`, else the last one in the text. Every pattern takes
time by the length of a text, whatever a model writes.
"""

import re
from collections import deque
from fractions import Fraction

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\^[-+]?\d+)?"
NUMBER = re.compile(
    rf"(?<![\d.^])(?<![A-Za-z)}}\\]/)(?:(?<![A-Za-z])|(?=[-+\\$€£¥]))"
    rf"(?P<sign>[-+]?)(?:\\?[$€£¥]\s*(?P<second_sign>[-+]?))?"
    rf"(?:(?P<whole>\d+) (?=\d+/\d))?(?P<top>{_UNSIGNED})(?:\s?/\s?(?P<bottom>[-+]?{_UNSIGNED}))?"
    rf"(?:\*10\^(?P<ten>[-+]?\d+))?"
)
"""A number, as in `-$1,234.50`, `2e-3`, `3/2`, `1 1/2`, `2^10` and `6*10^23`; not in `H2O` or `a/2`."""
FRACTION = {"whole": "0", "top": "", "bottom": "1"}
"""The parts of a number and what stands for one that is left out."""
SPELLINGS = {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "{,}": ",", "\\!": ""}
SPELLINGS |= dict.fromkeys(
    ["\N{NO-BREAK SPACE}", "\N{THIN SPACE}", "\N{NARROW NO-BREAK SPACE}", "\\,", "\\ ", "~"], " "
)
"""What is read as something else."""
SEPARATOR = re.compile(
    r"(?<=\d)(?<!\^\d)(?<![A-Za-z]_\d)(?:\\[, ]|\{,\}|,\\!|[~_\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])(?=\d{3}(?!\d))"
)
"""Between the groups of a number's digits, and never between two numbers, as in `2^3\\,100`."""
SPACED_SIGN = re.compile(r"((?:=|\\approx|\N{ALMOST EQUAL TO}|####|\\boxed\{)[ *$({]*[-+]) +(?=[\d.\\$€£¥])")
"""Of a number that begins there, as in `x = - 5`. Elsewhere it may be a minus, a dash or an item of a list."""
_TIMES = r"\\times|\\cdot|[*x\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}\N{DOT OPERATOR}]"
TIMES_TEN = re.compile(rf"(?<=\d) ?(?:{_TIMES}) ?(?=10\^)")
CURRENCY = re.compile(r"(?<![A-Za-z])(?:AUD|CAD|CHF|CNY|EUR|GBP|INR|JPY|RMB|USD|Rs\.?)(?=\d)")
_GROUPED = r"(?<![\d.,/^])(?<![A-Za-z]_)(?<!\d )\d{1,3}(?:%s)(?! ?[\d/])"
GROUPED = re.compile(_GROUPED % r"(?: \d{3})+")
"""Digits with spaces between them, such as `10 000`. `2^3 100` and `a_1 100` are products."""
GROUPED_IN_TEXT = re.compile(
    _GROUPED % r" 000| \d{3}(?: \d{3})+| \d{3}(?! ?[A-Za-z])"
    + r"|(?<![\w.)}\]^/])(?<!\d )-(?:\\?[$€£¥])?\d{1,3}(?: \d{3})+(?! ?[\d/])"
)
"""Those that are one number in any text: `5 200 g bags` has two, `-5 200 g` has one, since -5 counts nothing."""
FOOTNOTE = re.compile(r"(?:(?:(?<=[\d%°}])|(?<=\d\$)) ?|(?<=[.)]))(?:\[\d{1,2}(?:, ?\d{1,2})*\] ?)+")
"""Such as `72 [1]` and `72 apples.[1, 2]`. Behind a sentence and a space it is an answer: `Day 1. [72]`."""
LATEX = re.compile(r"\\[dtc]?frac(?![A-Za-z])|\^|(?<=[^\W_])_|(?<=[)}\]])_|\\[A-Za-z]+")
"""A fraction, an exponent, an index, which `_72_` has not, or another command, such as a root."""
SIGNED = re.compile(rf"[-+]?{_UNSIGNED}")
REPEATING = {r"\overline", r"\bar", r"\dot"}
r"""What marks the repeating digits of a decimal, as in `0.\overline{3}`."""
ARGUMENT = re.compile(r"\s*(\\[A-Za-z]+|[\w{])")
ROOT = re.compile(r"\s*(?:\[[^\[\]]*\]\s*)?(\\[A-Za-z]+|[\w{])")
EXPONENT = re.compile(r"[-+]?\w+|\([^()]*\)|{")
WHOLE = re.compile(r"[-+]?\d+")
NO_POWER = re.compile(r"\d|^[-+]?[A-Za-z]$")
r"""An exponent that makes a number an expression, unlike those of `90^\circ` and `5^{th}`."""
_VARIABLE = "[abefi-knoqru-z]"  # no usual unit
EXPRESSION = re.compile(
    r"\\(?:sqrt|pi|ln|log|sin|cos|tan|alpha|beta|theta|lambda)(?![A-Za-z])"
    rf"|\d(?!e[-+]?\d)(?: ?[xyz]|{_VARIABLE})(?![A-Za-z])"
    rf"|[-+*/^{{] ?{_VARIABLE}(?![A-Za-z])|(?<![A-Za-z\\\d]){_VARIABLE} ?[-+*^] ?[\d{{\\(]"
)
r"""A root, a function or a variable, as in `3\sqrt{2}`, `2x` and `x + 3`."""
EQUALS = re.compile(r"=|\N{ALMOST EQUAL TO}|\\approx(?![A-Za-z])")
_UNIT = r"[ \\{]*(?:[%°$€£¥]|(?![A-Z][a-z]{2})[A-Za-z])[A-Za-z/\\²³]*"
FINAL_LINE = re.compile(rf"[\s*_`$\\(:=]*{NUMBER.pattern}(?:{_UNIT})?[\s*_`$\\.!)}}]*")
"""A number with sign, currency, markup and unit. Another line behind `####` is a heading."""
DIGITS_MAX = 1000
"""Digits of a number, and size of its exponent, that numeric_match compares. Exact arithmetic on more costs time."""
TEXT_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname)\s*\{[^{}]*\}")


def last_number(text: str) -> Fraction | None:
    """The exact value of the final number; None if there is none or it is beyond DIGITS_MAX."""
    text = CURRENCY.sub("$", SEPARATOR.sub("", text))
    for spelling, meaning in SPELLINGS.items():
        text = text.replace(spelling, meaning)
    text, is_final = _final(TIMES_TEN.sub("*", SPACED_SIGN.sub(r"\1", text)))
    if is_final and EXPRESSION.search(TEXT_COMMAND.sub("", EQUALS.split(text)[-1])):
        return None
    grouped = GROUPED if is_final else GROUPED_IN_TEXT
    text = grouped.sub(lambda number: number[0].replace(" ", ""), _plain(text))
    last = _last(FOOTNOTE.sub(" ", text)) or _last(text)
    if last is None:
        return None
    parts = last.groupdict(default="")
    whole, top, bottom = (_exact(parts[name] or default) for name, default in FRACTION.items())
    scale = _exact(f"1e{parts['ten'] or 0}")
    if whole is None or top is None or scale is None or not bottom:
        return None
    return (whole + top / bottom) * scale * (-1) ** (parts["sign"] + parts["second_sign"]).count("-")


def _last(text: str) -> re.Match[str] | None:
    return next(iter(deque(NUMBER.finditer(text), maxlen=1)), None)


def _final(text: str) -> tuple[str, bool]:
    """What the last `\\boxed{}` holds, or a later line `#### 72`, if there is a digit; else all. And if it is not all.

    The last line behind `####` may have any form.
    """
    boxed, marked = text.rfind(r"\boxed{"), text.rfind("####")
    start = boxed + len(r"\boxed")
    inside = text[start + 1 : _closing(text).get(start)] if boxed >= 0 else ""
    line, _, rest = text[marked + len("####") :].partition("\n") if marked >= 0 else ("", "", "")
    line = line if not rest.strip() or FINAL_LINE.fullmatch(_plain(line)) else ""
    for final in (line, inside) if marked > boxed else (inside, line):
        if any(map(str.isdigit, final)):
            return final, True
    return text, False


def _closing(text: str) -> dict[int, int]:
    """Where each `{` ends: the position of its `}`."""
    opened: list[int] = []
    closing = {}
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def _plain(text: str) -> str:
    """LaTeX with `3/2` and `2^10` for fractions and powers of numbers.

    It has no roots, with their factors, no repeating decimals, and no other fractions, exponents, indices and commands.
    """
    closing = _closing(text)
    parts, done = [], 0

    def argument(kind: re.Pattern[str]) -> str:
        """Of the command that ends at `done`, which moves behind it."""
        nonlocal done
        found = kind.match(text, done)
        if found is None or (found[0][-1] == "{" and found.end() - 1 not in closing):
            return ""
        start = found.start(kind.groups)
        done = closing[start] + 1 if text[start] == "{" else found.end()
        return text[start:done].strip("{} ")

    for found in LATEX.finditer(text):
        if found.start() < done:
            continue
        parts.append(text[done : found.start()])
        done = found.end()
        if found[0] == "^" and parts[-1][-1:].isdigit():
            exponent = argument(EXPONENT).strip("()")
            if WHOLE.fullmatch(exponent):
                parts.append(f"^{exponent}")
                continue
            if NO_POWER.search(exponent):
                parts[-1] = parts[-1].rstrip("0123456789.")
        elif found[0] in "^_":
            argument(EXPONENT)
        elif found[0] == r"\sqrt" or (found[0] in REPEATING and parts[-1].endswith((".", *"0123456789"))):
            argument(ROOT)
            parts[-1] = parts[-1].rstrip("0123456789. ")
        elif "frac" in found[0]:
            top, bottom = argument(ARGUMENT), argument(ARGUMENT)
            if SIGNED.fullmatch(top) and SIGNED.fullmatch(bottom):
                parts.append(f" {top}/{bottom}" if parts[-1][-1:].isdigit() else f"{top}/{bottom}")  # 1 1/2
                continue
        parts.append("\\")
    return "".join([*parts, text[done:]])


def _exact(number: str) -> Fraction | None:
    """The value of `1,234.5e-6` or `10^6`."""
    base, _, power = number.replace(",", "").lower().partition("^")
    mantissa, _, exponent = base.partition("e")
    if max(len(exponent), len(power)) > 6:
        return None
    shift, times = int(exponent or 0), int(power or 1)
    digits = len(mantissa) + abs(shift)
    if max(len(mantissa), abs(shift)) > DIGITS_MAX or (power and digits * abs(times) > DIGITS_MAX):
        return None
    value = Fraction(mantissa) * Fraction(10) ** shift
    return value**times if value or times >= 0 else None
