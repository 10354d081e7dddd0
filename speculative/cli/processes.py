"""What is different on Windows about processes: groups, Ctrl-C, and the encoding and the end of a program's output."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

NEW_PROCESS_GROUP = 0x200  # subprocess.CREATE_NEW_PROCESS_GROUP, which Python defines on Windows only


def own_group() -> dict:
    """Arguments of subprocess.Popen for a child that leads a process group: Ctrl-C in this program's terminal does not
    reach it, and `kill_group` ends it with everything that it started."""
    return {"creationflags": NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}


def interrupt_group(leader: subprocess.Popen) -> None:
    """Ctrl-C for a whole group; on Windows Ctrl-Break, as Ctrl-C cannot be sent to one group of a console."""
    if os.name == "nt":
        leader.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        _signal_group(leader, signal.SIGINT)


def terminate_group(leader: subprocess.Popen) -> None:
    """Ask a whole group to end. Windows has no such request: there it is killed."""
    if os.name == "nt":
        kill_group(leader)
    else:
        _signal_group(leader, signal.SIGTERM)


def kill_group(leader: subprocess.Popen) -> None:
    """Kill a whole group, whether or not its leader still runs; on Windows the leader's tree, while the leader runs."""
    if os.name != "nt":
        _signal_group(leader, signal.SIGKILL)
    elif leader.poll() is None:
        tree = ["taskkill", "/F", "/T", "/PID", str(leader.pid)]
        subprocess.run(tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _signal_group(leader: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left: PermissionError on macOS
        os.killpg(leader.pid, number)


def utf8_output() -> None:
    """Output is UTF-8 from now on, whatever the console's code page; what cannot be encoded is escaped."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def end_with_reader() -> None:
    """Where the reader of the output goes away, as `| head` does, the program ends without a message. For programs that
    leave nothing half-written."""
    if _pipes_have_a_signal():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def prepare_output() -> None:
    """Both of the above, for the start of a program."""
    utf8_output()
    end_with_reader()


@contextlib.contextmanager
def no_sigpipe() -> Iterator[None]:
    """Writing to a process that has ended raises BrokenPipeError, also after `end_with_reader`."""
    if not _pipes_have_a_signal():
        yield
        return
    usual = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, usual)


def _pipes_have_a_signal() -> bool:
    """Windows has none, and Python sets signals in the main thread only."""
    return hasattr(signal, "SIGPIPE") and threading.current_thread() is threading.main_thread()
