"""Program startup: Ctrl-C ends the program immediately while the engine is being imported.

Import this module first. A program with results to keep installs its own handler later.
"""

import signal

from speculative.cli.processes import prepare_output, utf8_output

__all__ = ["prepare_output", "utf8_output"]

signal.signal(signal.SIGINT, signal.SIG_DFL)
