"""Programs that print each step of their progress, for tests that act at a certain step."""

import sys

EACH_STEP = (  # then the program and its arguments; a log otherwise gets a line every 30 seconds
    sys.executable,
    "-c",
    "import runpy, sys; from speculative.cli import progress; progress.SECONDS_PER_LINE = 0.0; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')",
)
