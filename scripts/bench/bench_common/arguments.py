"""Types of command-line arguments, and the words after `--`. Bad input ends the program with exit status 2."""

import argparse
import sys


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is under 1")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value:g} is not a positive number")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in [0, 1)")
    return value


def address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no base address: write http://host:port")
    return text.rstrip("/")


def device(text: str) -> str:
    if text != "cpu" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor the index of a GPU")
    return text


def parse_with_flags(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """This program's arguments, and the `--section.key value` pairs for grpo_train.py after `--`.

    `--section.key` alone is true, `--section.no-key` false.
    """
    own = list(sys.argv[1:] if argv is None else argv)
    cut = own.index("--") if "--" in own else len(own)
    words = own[cut + 1 :]
    args = parser.parse_args(own[:cut])
    flags: dict[str, str] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            parser.error(f"after --: {word!r} is not --section.key")
        key, equals, value = word[2:].partition("=")
        section, _, name = key.rpartition(".")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not equals:
            value = "false" if name.startswith("no-") else "true"
            name = name.removeprefix("no-")
        flags[f"{section}.{name}"] = value
    return args, flags


def as_flags(flags: dict[str, object]) -> list[str]:
    """`{"grpo.group_size": 8, "compile.enable": True}` as words of grpo_train.py's command line."""
    words = []
    for key, value in flags.items():
        if isinstance(value, list):
            value = ",".join(map(str, value))
        words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words
