"""Program startup and end: Ctrl-C while the engine is being imported, and errors as one line and an exit status.

Import this module first. A program with results to keep installs its own handler later.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator

from speculative.cli.processes import prepare_output
from speculative.error_text import one_line

__all__ = ["exit_on", "prepare_output"]

signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def exit_on(*errors: type[Exception], status: int = 1) -> Iterator[None]:
    """Within the block, one of these errors is printed as one line and ends the program with `status`; Ctrl-C: 130."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except errors as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(status)
