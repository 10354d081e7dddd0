"""Runs samples/serve/serve_pair.py as a child process for tests and benchmarks.

server = StartedServer(["models/embedded/main", "models/embedded/draft"])
try:
    print(server.url())
finally:
    server.end()
"""

import collections
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from speculative.cli.processes import kill_group, own_group

SERVE_PAIR = Path(__file__).resolve().parents[3] / "samples/serve/serve_pair.py"
READY = "ready: "  # then the URL, on a line of its standard error
START = 1800.0  # seconds to load the models: a process that ends is noticed at once
END = 60.0  # seconds to finish accepted requests and stop its processes
NOT_PASSED_ON = ("SPECULATIVE_API_KEY", "OTEL_")  # variables for a server that serves others
MAX_MESSAGE = 300  # characters shown of its last message


class StartedServer:
    """A server process that starts in the background, so that several can start at once."""

    def __init__(self, arguments: Sequence[object]):
        """`arguments` of serve_pair.py without ports; free ones are chosen."""
        ports = ["--port", str(free_port()), "--metrics-port", str(free_port())]
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE_PAIR), *map(str, arguments), *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)},
            **own_group(),  # Ctrl-C must reach only this program
        )
        self._url = ""
        self._output = collections.deque[str](maxlen=20)
        self._ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def url(self) -> str:
        """The server's URL, once ready. Raises RuntimeError with its last message if it does not become ready."""
        self._ready.wait(START)
        if not self._url:
            self.end()
            reason = self._output[-1][:MAX_MESSAGE].removeprefix("error: ") if self._output else "no output"
            raise RuntimeError(f"the server did not become ready: {reason}")
        return self._url

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            kill_group(self.process)
            self.process.wait()

    def _listen(self) -> None:
        assert self.process.stderr is not None  # a pipe
        for line in self.process.stderr:
            if line.startswith(READY):
                self._url = line.removeprefix(READY).split()[0]
                self._ready.set()
            elif line.strip():
                self._output.append(line.strip())
        self._ready.set()


def free_port() -> int:
    """A free port outside the ephemeral range: Ray opens hundreds of connections before the server listens, and one of
    them could take it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as candidate:
            candidate.bind(("127.0.0.1", port))
            return port
