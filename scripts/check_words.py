#!/usr/bin/env python3
"""Check that the documentation is in short sentences: a mean under 18 words per file, and none over 35.

    python scripts/check_words.py                 # all documentation
    python scripts/check_words.py docs/async.md   # these files

It prints one line per file and then each sentence that is too long. The exit status is 1 if a bound is broken.

How sentences are counted:

- Code blocks, headings, images and HTML comments are skipped.
- A paragraph, a list item and a table cell each end their last sentence, with or without a full stop.
- Tables have a mean of their own, so that short cells do not hide long sentences in the text. A cell of fewer than
  four words is a label or a number and is not counted.
- A sentence ends at `.`, `!` or `?` before white space. A colon or a semicolon ends none. Abbreviations, decimals,
  versions and file names end none.
- A word stands between white space and has a letter or a digit. Inline code is one word, a link counts by its text.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MEAN_WORDS = 18.0
"""The mean of a file's text, and of its tables, must be under this."""
LONGEST_WORDS = 35
"""A sentence may have this many words."""
LABEL_WORDS = 3
"""A table cell of at most this many words is no sentence."""

FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "scripts/*/README.md", "examples/*/README.md")

ABBREVIATIONS = ("e.g.", "i.e.", "cf.", "vs.", "dr.", "al.", "approx.", "no.", "fig.", "eq.", "sec.")
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
LIST_ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])(\s+)")
TABLE_RULE = re.compile(r"\s*\|?[\s:|-]*-[\s:|-]*$")
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
IMAGE = re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])")
LINK = re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?][*_\"')\]]*\s+")


@dataclass(frozen=True)
class Sentence:
    """One sentence, the line of the file on which it starts (from 1), its length, and whether a table cell has it."""

    line: int
    text: str
    words: int
    in_table: bool


@dataclass
class Block:
    """Text that belongs together: a paragraph, a list item or a table cell. Its lines are kept apart by newlines."""

    line: int
    text: str
    is_cell: bool = False


def blocks(markdown: str) -> Iterator[Block]:
    """The prose of a Markdown file, in order."""
    block: Block | None = None
    fence = ""  # of the code block that we are in
    item_indent: int | None = None  # column of the text of the list item that we are in
    after_blank = True
    # A comment keeps its newlines, so that line numbers stay right.
    lines = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), markdown).splitlines()
    for number, line in enumerate(lines, 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
            continue
        item = LIST_ITEM.match(line)
        indent = len(line) - len(line.lstrip())
        is_blank = not line.strip()
        is_table = line.lstrip().startswith("|")
        is_code = after_blank and block is None and indent >= (item_indent or 0) + 4
        starts_anew = mark or is_blank or item or is_table or is_code or line.startswith("#")
        if block is not None and starts_anew:
            yield block
            block = None
        if item_indent is not None and after_blank and not is_blank and indent < item_indent and not item:
            item_indent = None
        after_blank = is_blank or is_code
        if mark:
            fence = mark[1]
        elif is_blank or is_code or line.startswith("#"):
            pass
        elif is_table:
            if not TABLE_RULE.match(line):
                yield from (
                    Block(number, cell, is_cell=True)
                    for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))
                    if cell.strip()
                )
        elif item:
            item_indent = len(item[0])
            block = Block(number, line[item.end() :])
        elif block is None:
            block = Block(number, line.lstrip("> "))
        else:
            block.text += "\n" + line.lstrip("> ")
    if block is not None:
        yield block


def plain(text: str) -> str:
    """Text as it counts: inline code is one word, a link its text. Newlines stay."""
    text = CODE.sub(lambda code: "CODE" + "\n" * code[0].count("\n"), text)
    text = IMAGE.sub("", text)
    return LINK.sub(lambda link: link[1], text)


def count_words(text: str) -> int:
    """The words of `plain` text."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def sentences(block: Block) -> Iterator[Sentence]:
    """The sentences of one block."""
    text = plain(block.text)
    start = 0
    for end in [*(end.end() for end in SENTENCE_END.finditer(text) if not _goes_on(text, end)), len(text)]:
        part = text[start:end]
        words = count_words(part)
        if words and not (block.is_cell and words <= LABEL_WORDS):
            before = text[:start] + part[: len(part) - len(part.lstrip())]
            yield Sentence(block.line + before.count("\n"), " ".join(part.split()), words, block.is_cell)
        start = end


def _goes_on(text: str, end: re.Match[str]) -> bool:
    """Whether the sentence goes on after what looks like its end."""
    before = text[: end.start() + 1].split()[-1].lower().lstrip("(*_\"'[")
    after = text[end.end() : end.end() + 1]
    return before in ABBREVIATIONS or (before.endswith("...") and after.islower())


def measure(markdown: str) -> list[Sentence]:
    """All sentences of a Markdown file."""
    return [sentence for block in blocks(markdown) for sentence in sentences(block)]


def report(files: Iterable[tuple[str, str]]) -> tuple[str, bool]:
    """A table of (name, text) files and their long sentences; and whether all are within the bounds."""
    table = [f"{'file':<24} {'sentences':>9} {'mean':>5} {'in tables':>9} {'mean':>5} {'longest':>7}"]
    too_long: list[str] = []
    is_good = True
    for name, text in files:
        found = measure(text)
        means = []
        for in_table in (False, True):
            words = [sentence.words for sentence in found if sentence.in_table is in_table]
            means.append((len(words), sum(words) / max(1, len(words))))
        longest = max((sentence.words for sentence in found), default=0)
        is_bad = longest > LONGEST_WORDS or any(mean >= MEAN_WORDS for _, mean in means)
        is_good = is_good and not is_bad
        columns = " ".join(f"{count:>9} {mean:>5.1f}" for count, mean in means)
        table.append(f"{name:<24} {columns} {longest:>7}{'  too long' if is_bad else ''}")
        too_long += [
            f"{name}:{sentence.line}: {sentence.words} words: {sentence.text}"
            for sentence in found
            if sentence.words > LONGEST_WORDS
        ]
    return "\n".join([*table, *too_long]), is_good


def read_files(root: Path, patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="relative to the repository's root (default: all documentation)")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[1]
    patterns = options.files or FILES
    files = list(read_files(root, patterns))
    if not files:
        parser.error(f"no such file: {' '.join(patterns)}")
    text, is_good = report(files)
    print(text)
    if not is_good:
        print(f"Bounds: mean under {MEAN_WORDS:g} words, no sentence over {LONGEST_WORDS}.", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
