"""Former names of options, which keep working but are not listed by `--help`."""

import argparse


def accept(parser: argparse._ActionsContainer, action: argparse.Action, *names: str) -> None:
    """Accept `names` for the option `action` of `parser`, too."""
    for name in names:
        hidden = argparse.SUPPRESS
        parser.add_argument(name, dest=action.dest, type=action.type or str, default=hidden, help=hidden)
