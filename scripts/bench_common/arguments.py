"""Types of command-line arguments: what does not fit ends the program and says why."""

import argparse


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


def address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no base address: write http://host:port")
    return text.rstrip("/")


def device(text: str) -> str:
    if text != "cpu" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor the index of a GPU")
    return text
