"""The hidden work folder of a conversion: only one process may write to it."""

import os
import signal
import subprocess
import sys

import pytest

from speculative.convert.errors import ConvertError
from speculative.convert.work_folder import WorkFolder
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until

MAKE_SOMETHING = """
import sys
from pathlib import Path
from speculative.convert.child import Child
from speculative.convert.work_folder import WorkFolder
target = Path(sys.argv[1])
folder = WorkFolder(target, target / "work", target / "work/new", target)
folder.open()
write = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
Child("writer", ["-c", write], target / "log", target / "temporary").run()
"""


@pytest.mark.posix("signals")
def test_child_of_killed_parent_still_holds_the_lock(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", MAKE_SOMETHING, str(tmp_path)], cwd=ROOT)
    child = wait_until(lambda: int((tmp_path / "log").read_text()), "the child runs", passing=(OSError, ValueError))
    parent.kill()
    parent.wait(PATIENCE)
    folder = WorkFolder(tmp_path, tmp_path / "work", tmp_path / "work/new", tmp_path)
    try:
        with pytest.raises(ConvertError, match="another process is writing"):
            folder.open()
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: not folder.open(), "the lock is free", passing=(ConvertError,))
    folder.close()
    assert not (tmp_path / "work").exists()
