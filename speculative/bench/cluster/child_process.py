"""Runs one job in a child process with a time limit; any failure is reported as one sentence.

    answer = run([sys.executable, "-m", "speculative.bench.devices.cell"], {"look_up": ["CPU"]}, timeout=60)

The child gets the job as one line of JSON on its standard input, which stays open as long as this process lives, and
prints its answer as JSON on the last line of its standard output. It leads its own process group (on Windows: a tree),
which is gone when `run` returns or raises, also after Ctrl-C.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO

from speculative.cli.processes import kill_group, no_sigpipe, own_group

POLL_SECONDS = 0.05  # seconds between polls of the child
MAX_MESSAGE = 200  # characters shown of its last message


class ChildFailed(Exception):
    """The child gave no answer; the message says why."""


class OutOfTime(ChildFailed):
    """The child was killed at its time limit."""


def run(command: list[str], job: dict, timeout: float, waiting: Callable[[], None] = lambda: None) -> dict | list:
    """The child's answer. `waiting` is called about every second. Raises ChildFailed, also for {"failed": reason}."""
    environment = {**os.environ, "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = None
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment, **own_group()
            )
            with no_sigpipe(), contextlib.suppress(OSError):  # it may have ended already
                assert child.stdin is not None  # a pipe
                child.stdin.write(json.dumps(job).encode() + b"\n")
                child.stdin.flush()
            _wait(child, timeout, waiting)
        finally:
            if child:  # if interrupted during startup, the child reads an empty standard input
                end(child)
        return _answer(child.returncode, last_line(out), last_line(err))


def _wait(child: subprocess.Popen, timeout: float, waiting: Callable[[], None]) -> None:
    begin = last_call = time.monotonic()
    while child.poll() is None:
        now = time.monotonic()
        if now - begin > timeout:
            raise OutOfTime(f"timed out after {timeout:g} seconds")
        if now - last_call >= 1:
            last_call = now
            waiting()
        time.sleep(POLL_SECONDS)


def end(child: subprocess.Popen) -> None:
    """Kill the child, if still running, and everything it started."""
    kill_group(child)
    child.wait()
    with no_sigpipe(), contextlib.suppress(OSError):  # closing flushes the buffer
        if child.stdin:
            child.stdin.close()


def _answer(status: int, output: str, message: str) -> dict | list:
    try:
        answer = json.loads(output)
    except ValueError:
        answer = None
    if status != 0 or answer is None:
        raise ChildFailed(f"{how_it_ended(status)}{f'; its last message: {message[:MAX_MESSAGE]}' if message else ''}")
    if "failed" in answer:
        raise ChildFailed(answer["failed"])
    return answer


def how_it_ended(status: int) -> str:
    """A description of a process's exit status."""
    if status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
        return f"its process was killed by {name}" + (", probably for lack of memory" if name == "SIGKILL" else "")
    if status >= 0xC0000000:  # Windows: an exception, 0xC0000005 is an access violation
        return f"its process crashed with status 0x{status:08X}"
    return f"its process exited with status {status} without an answer"


def last_line(file: IO[bytes]) -> str:
    """The last non-empty line of a file with a process's output."""
    file.seek(0)
    lines = file.read().decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
