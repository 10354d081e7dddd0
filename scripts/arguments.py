"""What the scripts ask of their arguments alike."""

import argparse
import sys
from pathlib import Path

from speculative.pair_check import check_pair


def whole(text: str) -> int:
    """An argparse type: a whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def lengths(text: str) -> list[int]:
    """An argparse type: draft lengths, "1-8" or "2,4,6"."""
    try:
        first, _, last = text.partition("-")
        values = list(range(int(first), int(last) + 1)) if last else [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > 64:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range like 1-8 or a list like 2,4,6 of draft lengths 1 to 64"
        )
    return values


def key_value(text: str) -> tuple[str, str]:
    """An argparse type: an OpenVINO property."""
    key, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def refuse_unsound(main: Path, draft: Path) -> None:
    """End with exit status 2 and the first reason where the two folders are no sound pair."""
    for finding in check_pair(main, draft).findings:
        if finding.level == "error":
            print(f"error: {finding.what}: {finding.message}", file=sys.stderr)
            sys.exit(2)
