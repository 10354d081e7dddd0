"""Argument parser of all programs: prints the program's docstring as --help, and an error as one sentence."""

import argparse
from typing import Any, NoReturn

from speculative.cli.processes import print_or_exit

AS_MAIN = "the main model's"  # the default of --draft-device
DRAFT_DEVICE: dict[str, Any] = {
    "default": AS_MAIN,
    "metavar": "DEVICE",
    "help": "device of the draft (default: the main model's)",
}


class Parser(argparse.ArgumentParser):
    """Keeps the lines of `description`. Exits with status 2 for wrong arguments."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also replaces the value AS_MAIN of the draft's device by the main model's device."""
        arguments, rest = super().parse_known_args(args, namespace)
        if getattr(arguments, "draft_device", None) == AS_MAIN:
            arguments.draft_device = arguments.device
        return arguments, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")

    def print_help(self, file: Any = None) -> None:
        """Argparse ignores that the output cannot be written."""
        print_or_exit(self.format_help().rstrip("\n"), file)
