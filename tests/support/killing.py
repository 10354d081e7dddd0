"""Programs of this project that are killed in the middle of replacing a folder."""

import signal
import subprocess
import sys

from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

KILL_AT_RENAME = """
import os, runpy, signal, sys
from pathlib import Path
rename, left = Path.rename, int(sys.argv[1])
def killing(self, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = killing
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
"""
RUN = 'runpy.run_path(sys.argv[0], run_name="__main__")'


def killed_at_rename(renames: int, program: str, *arguments, prepare: str = RUN) -> None:
    """Run the program in a process that is killed, as by `kill -9`, instead of its next rename after `renames` ones.

    `prepare` is the Python code that runs it.
    """
    command = [sys.executable, "-c", KILL_AT_RENAME + prepare, str(renames), str(ROOT / program), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, cwd=ROOT)
    assert process.returncode == -signal.SIGKILL, process.stderr
