"""Child process with state between calls, whose crash does not affect this program.

    worker = WorkerProcess([sys.executable, "-m", "speculative.bench.tuning.worker"])
    worker.remember("open", main, capacity)  # repeated whenever the process is restarted
    run = worker.call("decode", setting, ids, 100)

Calls and answers are pickled over the child's standard input and output. Errors raised in the child are raised here. If
the process dies or times out, `ChildFailed` says what happened, and the next call starts a new one. The child leads its
own process group, which is gone after `close`, and exits when this program does.
"""

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from speculative.bench.cluster import child_process
from speculative.bench.cluster.child_process import ChildFailed, OutOfTime
from speculative.cli.processes import no_sigpipe, own_group
from speculative.error_text import one_line

CALL_SECONDS = 1800  # time limit per call, enough to compile a large model for a GPU
START = b"\0answers\0"  # follows anything libraries print during import
LENGTH = struct.Struct("<Q")  # precedes each message
RAISABLE = (RuntimeError, ValueError, KeyError, TypeError, MemoryError)
RAISED: dict[str, type[Exception]] = {error_type.__name__: error_type for error_type in RAISABLE}


class WorkerProcess:
    """The client's side; not thread-safe. `started` counts the processes so far."""

    def __init__(self, command: list[str]):
        self.started = 0
        self._command = command
        self._remembered: list[tuple] = []
        self._child: subprocess.Popen | None = None

    def remember(self, name: str, *arguments: object) -> Any:
        """Call now and in every process started later, unless the call raises now."""
        call = (name, *arguments)
        self._remembered.append(call)
        try:
            return self._exchange(call) if self._child else self._start()
        except RAISABLE:
            self._remembered.pop()
            raise

    def call(self, name: str, *arguments: object) -> Any:
        if not self._child:
            self._start()
        return self._exchange((name, *arguments))

    def close(self) -> None:
        if self._child:
            child_process.end(self._child)
            self._child = None

    def _start(self) -> Any:
        environment = {**os.environ, "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (kept open as long as the process)
        self._answers: queue.Queue = queue.Queue()
        self._child = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            **own_group(),
        )
        self.started += 1
        threading.Thread(target=_read, args=(self._child.stdout, self._answers), daemon=True).start()
        answer = None
        try:
            for call in self._remembered:
                answer = self._exchange(call)
        except RAISABLE:  # without all remembered calls, the process is not in the expected state
            self.close()
            raise
        return answer

    def _exchange(self, call: tuple) -> Any:
        assert self._child is not None and self._child.stdin is not None
        completed = False
        try:
            with no_sigpipe(), contextlib.suppress(OSError):  # the process may be gone; then there is no answer
                write(self._child.stdin, call)
            error, answer = self._wait()
            completed = True
        finally:
            if not completed:  # crash, timeout or Ctrl-C: a late answer would belong to no call
                self.close()
        if error:
            raise RAISED.get(error, RuntimeError)(answer)
        return answer

    def _wait(self) -> tuple[str, object]:
        try:
            message = self._answers.get(timeout=CALL_SECONDS)
        except queue.Empty:
            raise OutOfTime(f"timed out after {CALL_SECONDS} seconds") from None
        if message is None:
            assert self._child is not None
            status = self._child.wait()
            last = child_process.last_line(self._stderr)[: child_process.MAX_MESSAGE]
            raise ChildFailed(child_process.how_it_ended(status) + (f"; its last message: {last}" if last else ""))
        return message


# ---- messages, also used in the child -------------------------------------------------------------------------------


def write(stream: IO[bytes], message: object) -> None:
    data = pickle.dumps(message, protocol=5)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read(stream: IO[bytes]) -> object:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    length = LENGTH.unpack(head)[0]
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None


def _read(stream: IO[bytes], answers: queue.Queue) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed here
        received = b""
        while not received.endswith(START) and (byte := stream.read(1)):
            received = received[1 - len(START) :] + byte
        while (message := read(stream)) is not None:
            answers.put(message)
    answers.put(None)


def serve(functions: Callable[[str], Callable]) -> None:
    """The child's side: answer calls until the stream ends. Library output is redirected to standard error."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(START)
    answers.flush()
    waiting: queue.Queue = queue.Queue()
    threading.Thread(target=_read_calls, args=(calls, waiting), daemon=True).start()
    while True:
        name, *arguments = waiting.get()
        try:
            answer = "", functions(name)(*arguments)
        except RAISABLE as error:
            error_type = next(name for name, error_type in RAISED.items() if isinstance(error, error_type))
            answer = error_type, one_line(error)
        write(answers, answer)


def _read_calls(stream: IO[bytes], waiting: queue.Queue) -> None:
    """Read calls in a separate thread, so that the process exits with its parent whatever it is doing."""
    while (call := read(stream)) is not None:
        waiting.put(call)
    os._exit(0)
