"""Argparse types for numbers within a range; for others, the error names the number and the range."""

import argparse
import math
from collections.abc import Callable


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `low` to `high` inclusive."""

    def parse(text: str) -> int:
        if text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return parse


def decimal(valid: Callable[[float], bool], range_: str) -> Callable[[str], float]:
    """Return an argparse type for numbers for which `valid` is true; `range_` describes them."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if valid(value):
            return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {range_}")

    return parse


positive_int = whole_number(1, 2**31 - 1)
seed_number = whole_number(0, 2**32 - 1)  # what numpy and GenAI take as a seed
positive_float = decimal(lambda value: 0 < value < math.inf, "above 0")
port_number = whole_number(1, 65535)
share = decimal(lambda value: 0 <= value <= 1, "from 0 to 1")


def two_or_more(text: str) -> int:
    """An argparse type: new tokens, of which the first does not count as decoding."""
    if (value := positive_int(text)) == 1:
        raise argparse.ArgumentTypeError("'1' leaves nothing to time after the first token: use 2 or more")
    return value
