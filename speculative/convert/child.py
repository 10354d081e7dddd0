"""Runs a conversion step as a child process, with its progress, log and errors; it never outlives its parent's call.

If the parent is killed, the child keeps the lock of its WorkFolder until it ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from speculative.cli.processes import kill_group, own_group, terminate_group
from speculative.convert.errors import ConvertError

LAST_LINES = 12
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass
class Child:
    """A Python program to run: `arguments` follow the interpreter. Its temporary files go to `temporary`."""

    name: str  # for messages
    arguments: list[str]
    log: Path  # gets its output, unless `verbose` shows it
    temporary: Path
    verbose: bool = False
    doing: str = "exporting"  # for the progress line
    shown_lines: int = LAST_LINES  # of the log, in the message of a failure

    def run(self, environment: Mapping[str, str] | None = None) -> None:
        """Run it to its end; raise ConvertError with the last lines of the log if it fails."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        temporary_variables = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.temporary))
        child = None
        try:
            with _signals_wait(), (Path(os.devnull) if self.verbose else self.log).open("wb") as file:
                child = subprocess.Popen(
                    [sys.executable, *self.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=None if self.verbose else file,
                    stderr=None if self.verbose else subprocess.STDOUT,
                    env={**os.environ, "PYTHONUTF8": "1", **temporary_variables, **(environment or {})},
                    close_fds=False,  # of what may be inherited, that is the lock of a WorkFolder
                    **own_group(),
                )
            self._wait(child)
        finally:
            if child:
                _end(child)
        if child.returncode:
            self._fail(child.returncode)

    def _wait(self, child: subprocess.Popen) -> None:
        """Wait for the child and print the elapsed time."""
        start = last_report = time.monotonic()
        is_terminal = sys.stderr.isatty() and not self.verbose
        while True:
            try:
                child.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if is_terminal:
                    print(f"\r  {self.doing}, {now - start:.0f} s ", end="", file=sys.stderr, flush=True)
                elif not self.verbose and now - last_report >= 30:
                    print(f"  {self.doing}, {now - start:.0f} s", file=sys.stderr, flush=True)
                    last_report = now
        if is_terminal:
            print("\r" + " " * 30 + "\r", end="", file=sys.stderr, flush=True)

    def _fail(self, status: int) -> None:
        text = "" if self.verbose else self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-self.shown_lines :]
        if "No space left on device" in text or "[Errno 28]" in text:
            raise ConvertError(f"the disk of {self.log.parent} is full; free space and run the same command again")
        if "trust_remote_code" in text and "custom code" in text:
            raise ConvertError(
                "this model needs Python code from its repository; read it, then add --trust-remote-code"
            )
        location = "see above" if self.verbose else f"the end of its log, {self.log}:\n  " + "\n  ".join(lines)
        if len(lines) == 1:
            location = lines[0]
        outcome = f"failed with exit status {status}"
        if status < 0:
            outcome = f"was killed by signal {-status} (9 often means out of memory)"
        raise ConvertError(f"{self.name} {outcome}; {location}")


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Within the block a child starts: signals come at its end, when the child is known and can be ended."""
    arrived: list[int] = []
    handlers = {number: signal.signal(number, lambda received, _: arrived.append(received)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in arrived:
        signal.raise_signal(number)


def _end(child: subprocess.Popen) -> None:
    """End the child and everything it started."""
    if child.poll() is not None:
        return
    for end_method in (terminate_group, kill_group):
        end_method(child)
        try:
            child.wait(timeout=5)
            return
        except subprocess.TimeoutExpired:
            continue
