""".ci/fresh runs a command with an empty /tmp and HOME; only the checkout and pip's settings are visible."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.posix("a bash script")
LOOK = """
import json, os, pathlib, sys, tempfile
temporary = pathlib.Path(tempfile.mkdtemp()).parent
pathlib.Path("/tmp", sys.argv[2]).write_text("written")
print(json.dumps({
    "leftover": pathlib.Path(sys.argv[1]).exists(), "temporary": str(temporary),
    "home": os.listdir(pathlib.Path.home()),
    "checkout": pathlib.Path("README.md").read_text(), "user": os.geteuid(),
    "pip": pathlib.Path(os.environ["PIP_CONFIG_FILE"]).read_text(), "cache": os.environ["PIP_CACHE_DIR"],
}))
"""


@pytest.fixture
def fresh(tmp_path):
    """Run a Python program under a copy of .ci/fresh, in a checkout that usually lies in /tmp."""
    (checkout := tmp_path / "checkout").mkdir()
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    (checkout / "README.md").write_text("read me", encoding="utf-8")
    (tmp_path / "home/.config/pip").mkdir(parents=True)
    (tmp_path / "home/.config/pip/pip.conf").write_text("[global]\ntimeout = 7\n", encoding="utf-8")
    ours = {"PYTHON": sys.executable, "HOME": str(tmp_path / "home"), "PIP_CACHE_DIR": str(tmp_path / "downloads")}
    environment = {**os.environ, **ours}
    for name in ("PIP_CONFIG_FILE", "XDG_CONFIG_HOME"):
        environment.pop(name, None)

    def run(program, *arguments):
        command = [checkout / ".ci/fresh", sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=PATIENCE)
        assert not list((checkout / "build").iterdir())  # cleaned up
        return done

    return run


def test_command_sees_no_leftovers_and_leaves_none(fresh, tmp_path):
    with tempfile.NamedTemporaryFile(dir="/tmp") as leftover:
        own = f"{Path(leftover.name).name}-inside"
        done = fresh(LOOK, leftover.name, own)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["home"], seen["checkout"], seen["user"]) == ([], "read me", os.geteuid())
    assert seen["pip"] == "[global]\ntimeout = 7\n" and seen["cache"] == str(tmp_path / "downloads")
    if "no private mount namespace" in done.stderr:
        Path("/tmp", own).unlink()
        assert not Path(seen["temporary"]).exists() and seen["temporary"] != tempfile.gettempdir()
    else:
        assert (seen["leftover"], seen["temporary"]) == (False, "/tmp")
        assert not Path("/tmp", own).exists()


def test_exit_status_is_passed_on(fresh):
    assert fresh("raise SystemExit(7)").returncode == 7
