"""samples/serve/serve_pair.py in a process of its own, from when it is ready until it is no longer needed.

server = StartedServer(["models/embedded/main", "models/embedded/draft"])
try:
    print(server.url())
finally:
    server.end()
"""

import collections
import contextlib
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
START = 180.0  # seconds to get ready
END = 60.0  # seconds to answer what it has taken, and to end what it started
SHOWN = 300  # characters of what it said last


class StartedServer:
    """A server that gets ready while others do, too."""

    def __init__(self, arguments: Sequence[object]):
        """`arguments` of serve_pair.py, but for the ports: free ones are taken."""
        ports = ["--port", str(free_port()), "--metrics-port", str(free_port())]
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE_PAIR), *map(str, arguments), *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            **own_group(),  # Ctrl-C is for this program alone
        )
        self._url = ""
        self._said = collections.deque(maxlen=20)
        self._ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def url(self) -> str:
        """Where it answers, once it does. Raises RuntimeError, with what it said last, where it does not."""
        self._ready.wait(START)
        if not self._url:
            self.end()
            said = self._said[-1][:SHOWN].removeprefix("error: ") if self._said else "it said nothing"
            raise RuntimeError(f"the server did not get ready: {said}")
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
        for line in self.process.stderr:
            if line.startswith(READY):
                self._url = line.removeprefix(READY).split()[0]
                self._ready.set()
            elif line.strip():
                self._said.append(line.strip())
        self._ready.set()


def free_port() -> int:
    """A port that nobody has. Ports that systems give to connections by themselves are left out: Ray opens hundreds of
    connections before the server listens, and one could get it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
