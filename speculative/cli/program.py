"""The start of a program: Ctrl-C ends it at once while the engine is imported.

Import this module first. A program that has something to keep sets a handler of its own later.
"""

import signal

from speculative.cli.processes import prepare_output, utf8_output

__all__ = ["prepare_output", "utf8_output"]

signal.signal(signal.SIGINT, signal.SIG_DFL)
