"""Progress bars in a log and in a terminal."""

import os
import subprocess
import sys

import pytest

from speculative.cli import progress
from tests.support.paths import ROOT

WORK = (
    "import time\n"
    "begin = time.monotonic()\n"
    "from speculative.cli import progress\n"
    "progress.SECONDS_PER_LINE = {seconds}\n"
    "for leave in (True, False):\n"
    "    for _ in progress.tqdm(range(40), desc='work', mininterval=0, leave=leave):\n"
    "        time.sleep(0.005)\n"
    "print(time.monotonic() - begin)\n"
)


def printed(seconds: float) -> tuple[str, float]:
    """What a log gets, and the seconds that the work took."""
    done = subprocess.run([sys.executable, "-c", WORK.format(seconds=seconds)], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.decode(), float(done.stdout)


def test_log_receives_few_complete_lines():
    assert printed(seconds=30)[0] == ""
    often, took = printed(seconds=0.05)
    lines = often.splitlines()
    assert 2 <= len(lines) <= took / 0.05 + 1 and all(line.startswith("work: ") for line in lines)
    assert "\r" not in often and often.endswith("\n") and "\n\n" not in often


@pytest.mark.posix("a pseudo-terminal")
def test_terminal_receives_a_bar():
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # rows, columns, pixels
    work = [sys.executable, "-c", WORK.format(seconds=30)]
    with subprocess.Popen(work, cwd=ROOT, stderr=theirs, close_fds=True) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            drawn += piece
    os.close(ours)
    assert process.returncode == 0
    assert drawn.count(b"\rwork: ") > 10 and b"100%" in drawn
    assert progress.SECONDS_PER_LINE == 30
