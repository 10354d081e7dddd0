"""Argument parser of all programs: prints the program's docstring as --help, and an error as one sentence."""

import argparse
from typing import Any, NoReturn

from speculative.cli.processes import print_or_exit


class Parser(argparse.ArgumentParser):
    """Keeps the lines of `description`. Exits with status 2 for wrong arguments."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")

    def print_help(self, file: Any = None) -> None:
        """Argparse ignores that the output cannot be written."""
        print_or_exit(self.format_help().rstrip("\n"), file)
