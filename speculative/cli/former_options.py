"""Former names of options, which keep working but are not listed by `--help`."""

import argparse


def accept(parser: argparse._ActionsContainer, action: argparse.Action, *names: str) -> None:
    """Accept `names` for the option `action` of `parser`, too."""
    for name in names:
        parser.add_argument(name, dest=action.dest, type=action.type, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
