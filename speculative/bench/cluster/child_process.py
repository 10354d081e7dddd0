"""A job in a process of its own, with a time limit: whatever happens to it is one sentence here.

    answer = run([sys.executable, "-m", "speculative.bench.devices.cell"], {"look_up": ["CPU"]}, timeout=60)

The child gets the job as one line of JSON on its standard input, which stays open as long as this process lives, and
gives its answer as JSON on the last line of its standard output. It leads a process group of its own (on Windows: a
tree), and nothing of that is left when `run` returns or raises, Ctrl-C included.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

from speculative.cli.processes import kill_group, no_sigpipe, own_group

LOOK = 0.05  # seconds between two looks at the child
SHOWN = 200  # characters of what it said last


class Failed(Exception):
    """The child gave no answer; the message says what happened to it."""


class OutOfTime(Failed):
    """It was ended at its time limit."""


def run(command: list[str], job: dict, timeout: float, waiting: Callable[[], None] = lambda: None) -> dict | list:
    """The child's answer. `waiting` is called about every second. Raises Failed, for the answer {"failed": ...} too."""
    quiet = {**os.environ, "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        child = None
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=said, env=quiet, **own_group())
            with no_sigpipe(), contextlib.suppress(OSError):  # it may have ended already
                child.stdin.write(json.dumps(job).encode() + b"\n")
                child.stdin.flush()
            _wait(child, timeout, waiting)
        finally:
            if child:  # interrupted while it starts, it reads an empty standard input
                end(child)
        return _answer(child.returncode, last_line(out), last_line(said))


def _wait(child: subprocess.Popen, timeout: float, waiting: Callable[[], None]) -> None:
    begin = told = time.monotonic()
    while child.poll() is None:
        now = time.monotonic()
        if now - begin > timeout:
            raise OutOfTime(f"it was not done after {timeout:g} seconds")
        if now - told >= 1:
            told = now
            waiting()
        time.sleep(LOOK)


def end(child: subprocess.Popen) -> None:
    """End the child, if it still runs, and all that it started."""
    kill_group(child)
    child.wait()
    with no_sigpipe(), contextlib.suppress(OSError):  # closing writes what is still in the buffer
        child.stdin.close()


def _answer(status: int, answered: str, said: str) -> dict | list:
    try:
        answer = json.loads(answered)
    except ValueError:
        answer = None
    if status != 0 or answer is None:
        raise Failed(f"{how_it_ended(status)}{f'; it said last: {said[:SHOWN]}' if said else ''}")
    if "failed" in answer:
        raise Failed(answer["failed"])
    return answer


def how_it_ended(status: int) -> str:
    """A process' exit status in words."""
    if status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
        return f"its process was killed by {name}" + (", as a lack of memory ends it" if name == "SIGKILL" else "")
    if status >= 0xC0000000:  # Windows: an exception, 0xC0000005 is an access violation
        return f"its process crashed with status 0x{status:08X}"
    return f"its process ended with status {status} and no answer"


def last_line(file) -> str:
    """The last line of a file of what a process said that holds anything."""
    file.seek(0)
    lines = file.read().decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
