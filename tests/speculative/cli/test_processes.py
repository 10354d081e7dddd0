"""Process groups and program output: the module for everything that differs on Windows."""

import _thread
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from speculative.cli.processes import ctrl_c_waits, interrupt_group, kill_group, own_group, terminate_group
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

SOURCES = [
    path for folder in ("samples", "convert", "scripts", "speculative") for path in (ROOT / folder).rglob("*.py")
]
START_ANOTHER = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(other.pid, flush=True)
time.sleep(600)
"""
WAIT_FOR_CTRL_C = """
import signal, time
def stop(*_):
    raise KeyboardInterrupt
signal.signal(getattr(signal, "SIGBREAK", signal.SIGINT), stop)
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""
HANG_UP_TWICE = """
import os, signal, sys
from speculative.cli.processes import raise_on_signals
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
raise_on_signals()
try:
    os.kill(os.getpid(), signal.SIGHUP)
finally:
    os.kill(os.getpid(), signal.SIGHUP)
    print("cleaned up")
"""
END_IN_BLOCK = """
import contextlib, os, signal, sys
from speculative.cli.processes import signals_raise
number = getattr(signal, sys.argv[1])
with signals_raise(), contextlib.ExitStack() as stack:
    stack.callback(print, "outer")
    stack.callback(os.kill, os.getpid(), number)
    with signals_raise(), contextlib.ExitStack() as inner:
        inner.callback(print, "inner")
        os.kill(os.getpid(), number)
"""
# A lone surrogate: what a file name that is no UTF-8 becomes in Python.
PRINT = "from speculative.cli.processes import {0}; {0}(); print('é, π, ' + chr(0xDC80))"
PRINT_MUCH = "from speculative.cli.processes import {0}; {0}()\nfor _ in range(100_000): print('x' * 100)"


def start(program):
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, encoding="utf-8", **own_group())


@pytest.mark.parametrize("end", [terminate_group, kill_group])
def test_process_group_ends_with_all_its_children(end):
    with start(START_ANOTHER) as leader:
        other = psutil.Process(int(leader.stdout.readline()))
        end(leader)
        assert leader.wait(PATIENCE) != 0
        assert psutil.wait_procs([other], timeout=PATIENCE)[1] == []
        end(leader)  # nothing is left: no error


def test_ctrl_c_is_deferred_until_children_are_registered(kept_signals):
    signal.signal(signal.SIGINT, usual := signal.default_int_handler)  # a program imported before may have set another
    started = []
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():  # deferred until the block ends
        _thread.interrupt_main()  # a signal's stack is too small in a process with torch, AMX and faulthandler
        started.append(1)
    assert started and signal.getsignal(signal.SIGINT) is usual
    with ctrl_c_waits():
        pass


def test_group_can_be_interrupted_without_this_program():
    with start(WAIT_FOR_CTRL_C) as leader:
        assert leader.stdout.readline() == "ready\n"
        interrupt_group(leader)
        assert leader.stdout.read() == "stopped\n"
        assert leader.wait(PATIENCE) == 0


@pytest.mark.parametrize("prepared", ["utf8_output", "prepare_output"])
def test_output_is_utf_8_on_a_console_of_another_code_page(prepared):
    console = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", PRINT.format(prepared)]
    process = subprocess.run(command, capture_output=True, cwd=ROOT, env=console, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr
    assert process.stdout.decode("utf-8").rstrip() == "é, π, \\udc80"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_full_disk_gives_one_sentence_error():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PRINT.format("prepare_output")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, env=buffered, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr == b"error: the output cannot be written: No space left on device.\n"


@pytest.mark.posix("Windows has no SIGPIPE")
@pytest.mark.parametrize(("prepared", "quiet"), [("prepare_output", True), ("utf8_output", False)])
def test_closed_pipe_ends_only_prepared_programs_quietly(prepared, quiet):
    command = [sys.executable, "-c", PRINT_MUCH.format(prepared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0) as process:
        process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
    assert (process.returncode == -signal.SIGPIPE) == quiet
    assert (stderr == b"") == quiet and (b"BrokenPipeError" in stderr) == (not quiet)


def test_platform_specific_code_is_in_one_module():
    of_a_system = re.compile(r"0x200\b|CREATE_NEW_PROCESS_GROUP|start_new_session|killpg|CTRL_BREAK|SIGPIPE")
    found = {path.name for path in SOURCES if of_a_system.search(path.read_text(encoding="utf-8"))}
    assert found == {"processes.py", "speculative_decoding_lm.py"}  # the latter imports nothing of ours


@pytest.mark.posix("signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_terminated_block_is_left_through_its_cleanup(name):
    command = [sys.executable, "-c", END_IN_BLOCK, name]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, cwd=ROOT)
    number = getattr(signal, name)
    assert (process.returncode, process.stdout, process.stderr) == (128 + number, "inner\nouter\n", "")


@pytest.mark.posix("signals")
@pytest.mark.parametrize(("before", "status"), [("SIG_DFL", 129), ("SIG_IGN", 0)])
def test_hangup_ends_a_program_once_and_is_ignored_under_nohup(before, status):
    """The terminal and its shell may both send the signal."""
    command = [sys.executable, "-c", HANG_UP_TWICE, before]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, cwd=ROOT)
    assert (process.returncode, process.stdout, process.stderr) == (status, "cleaned up\n", "")
