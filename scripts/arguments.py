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


def refuse_unsound(main: Path, draft: Path) -> None:
    """End with exit status 2 and the first reason where the two folders are no sound pair."""
    for finding in check_pair(main, draft).findings:
        if finding.level == "error":
            print(f"error: {finding.what}: {finding.message}", file=sys.stderr)
            sys.exit(2)
