"""Runs programs of this project in the test's own process, which saves the second that a new process needs to import
the engine."""

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.support.paths import ROOT

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGBREAK")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def run_here(program, *arguments, stdin="", env=None, checkout=ROOT) -> subprocess.CompletedProcess:
    """Like `python PROGRAM ARGUMENTS...` in the checkout; the output includes what libraries write to stdout and
    stderr. With another checkout, only the program itself is taken from it: modules are already imported from this one.

    Tests of signals, pipes, encodings and process exit need a separate process: the fixture `run`.
    """
    command = [str(checkout / program), *map(str, arguments)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(checkout)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(sys, "path", [str((checkout / program).parent), *sys.path])
        stack.enter_context(_kept_signals())
        stack.enter_context(_standard_input(stdin))
        stdout, stderr = stack.enter_context(_output("stdout", 1)), stack.enter_context(_output("stderr", 2))
        status = _status_of(command[0])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return subprocess.CompletedProcess(command, status, *map(_content, (stdout, stderr)))


def _status_of(program):
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):  # as Python itself does
            print(stop.code, file=sys.stderr)
            return 1
        return int(stop.code or 0)
    except Exception:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as stop:  # by a hook of the program
            return int(stop.code)
        return 1
    return 0


@contextlib.contextmanager
def _kept_signals():
    usual = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if (wakeup := signal.set_wakeup_fd(-1)) != -1:
            os.close(wakeup)  # ends the thread that listens for Ctrl-C
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _standard_input(text):
    with io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        yield


@contextlib.contextmanager
def _output(name, descriptor):
    """Both Python's stream and the file descriptor, which C++ writes to, go to a file."""
    getattr(sys, name).flush()
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        usual = os.dup(descriptor)
        os.dup2(file.fileno(), descriptor)
        stream = io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), encoding="utf-8", write_through=True)
        patch.setattr(sys, name, stream)
        try:
            yield file
        finally:
            stream.detach()
            os.dup2(usual, descriptor)
            os.close(usual)


def _content(file):
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace").read()  # every end of a line is \n, as in `run`
