"""samples/serve/serve_pair.py in a process of its own, from when it is ready until it is no longer needed.

with StartedServer(["models/embedded/main", "models/embedded/draft"]) as server:
    print(server.url)
"""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

SERVE_PAIR = Path(__file__).resolve().parent.parent / "samples/serve/serve_pair.py"
READY = "ready: "  # then the URL, on a line of its standard error
START = 180.0  # seconds to get ready
END = 60.0  # seconds to answer what it has taken, and to end what it started
SHOWN = 200  # characters of what it said last


class StartedServer:
    def __init__(self, arguments: Sequence[object]):
        """`arguments` of serve_pair.py, but for the port: a free one is taken."""
        self.arguments = list(map(str, arguments))
        self.url = ""

    def __enter__(self) -> "StartedServer":
        """Raises RuntimeError, with what it said last, where it does not get ready."""
        command = [
            sys.executable,
            str(SERVE_PAIR),
            *self.arguments,
            "--port",
            str(free_port()),
            "--metrics-port",
            str(free_port()),
        ]
        own_group = {"creationflags": 0x200} if os.name == "nt" else {"start_new_session": True}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", **own_group
        )
        said, ready = collections.deque(maxlen=20), threading.Event()

        def listen() -> None:
            for line in self.process.stderr:
                if line.startswith(READY):
                    self.url = line.removeprefix(READY).split()[0]
                    ready.set()
                elif line.strip():
                    said.append(line.strip())
            ready.set()

        self._listener = threading.Thread(target=listen, daemon=True)
        self._listener.start()
        try:
            ready.wait(START)
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise
        if not self.url:
            self.__exit__()
            last = (
                said[-1][:SHOWN].removeprefix("error: ") if said else f"it ended with status {self.process.returncode}"
            )
            raise RuntimeError(f"the server did not get ready: {last}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL) if os.name != "nt" else self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
