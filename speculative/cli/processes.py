"""Process handling, which differs on Windows: process groups, Ctrl-C, output encoding and broken pipes."""

import atexit
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

NEW_PROCESS_GROUP = 0x200  # subprocess.CREATE_NEW_PROCESS_GROUP, which Python defines on Windows only
END_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # no SIGHUP on Windows


def own_group() -> dict:
    """Arguments of subprocess.Popen for a child that leads a process group: it does not receive Ctrl-C from this
    program's terminal, and `kill_group` ends it together with everything it started."""
    return {"creationflags": NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}


def interrupt_group(leader: subprocess.Popen) -> None:
    """Send Ctrl-C to a whole group; on Windows Ctrl-Break, as Ctrl-C cannot be sent to a single group of a console."""
    if os.name == "nt":
        leader.send_signal(signal.CTRL_BREAK_EVENT)  # type: ignore[attr-defined]
    else:
        _signal_group(leader, signal.SIGINT)


def terminate_group(leader: subprocess.Popen) -> None:
    """Ask a whole group to terminate. Windows has no such request: there it is killed."""
    if os.name == "nt":
        kill_group(leader)
    else:
        _signal_group(leader, signal.SIGTERM)


def kill_group(leader: subprocess.Popen) -> None:
    """Kill a whole group, whether or not its leader is running; on Windows the leader's tree, if the leader is."""
    if os.name != "nt":
        _signal_group(leader, signal.SIGKILL)
    elif leader.poll() is None:
        tree = ["taskkill", "/F", "/T", "/PID", str(leader.pid)]
        subprocess.run(tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _signal_group(leader: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone: PermissionError on macOS
        os.killpg(leader.pid, number)


def utf8_output() -> None:
    """Switch output to UTF-8, whatever the console's code page; characters that cannot be encoded are escaped. Output
    that is closed (`>&-`) is discarded."""
    discard_closed_output()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def discard_closed_output() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def end_with_reader() -> None:
    """Exit silently if the reader of the output goes away, as with `| head`. Only for programs that leave no partial
    files."""
    if _pipes_have_a_signal():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def discard_unwritable_output() -> OSError | None:
    """Discard text that stdout cannot take, as with a full disk, and return the error. Otherwise Python tries to write
    it at exit, and exits with status 120."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def print_or_exit(text: str, file: TextIO | None = None) -> None:
    """Print `text`, or exit with one sentence and status 1 if it cannot be written."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        discard_unwritable_output()
        _report_unwritable(error)
        sys.exit(1)


def _report_unwritable(error: OSError) -> None:
    print(f"error: the output cannot be written: {error.strerror}.", file=sys.stderr, flush=True)


def _report_unwritable_output() -> None:
    if error := discard_unwritable_output():
        _report_unwritable(error)
        os._exit(1)  # an exit handler cannot set the status in another way


def prepare_output() -> None:
    """Prepare stdout at the start of a program: UTF-8, a silent end with its reader, one sentence for a full disk."""
    utf8_output()
    end_with_reader()
    atexit.register(_report_unwritable_output)


@contextlib.contextmanager
def no_sigpipe() -> Iterator[None]:
    """Within the block, writing to a process that has ended raises BrokenPipeError, even after `end_with_reader`."""
    if not _pipes_have_a_signal():
        yield
        return
    previous = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, previous)


def raise_on_signals() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, and SIGTERM and the SIGHUP of a closed terminal raise SystemExit, so
    that unfinished work can be cleaned up. SIGHUP stays ignored after `nohup`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in END_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a terminal and its shell both send SIGHUP: do not disturb the cleaning up
    sys.exit(128 + number)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """`raise_on_signals` within the block, whatever the handlers outside."""
    if not _sets_signals():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *END_SIGNALS)}
    raise_on_signals()
    try:
        yield
    finally:
        for number, handler in previous.items():
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # not ending, see `_exit`
                signal.signal(number, handler)


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C within the block raises KeyboardInterrupt at its end, so that what it starts is known by then."""
    if not _sets_signals():
        yield
        return
    signals: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if signals:
        raise KeyboardInterrupt


def _pipes_have_a_signal() -> bool:
    """Windows has none."""
    return hasattr(signal, "SIGPIPE") and _sets_signals()


def _sets_signals() -> bool:
    """Python sets signal handlers in the main thread only."""
    return threading.current_thread() is threading.main_thread()
