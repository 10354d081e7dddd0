"""What the tests share: where things are, and how to run a program of this project as its user does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / "models/embedded/main"
DRAFT = ROOT / "models/embedded/draft"

sys.path.insert(0, str(ROOT))


@pytest.fixture
def run():
    """Run `python PROGRAM ARGS...` from the checkout and return the finished process, its output decoded as UTF-8."""

    def run(program, *arguments, stdin="", timeout=300, env=None, encoding="utf-8"):
        return subprocess.run(
            [sys.executable, str(ROOT / program), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding=encoding,
            errors="replace",
            cwd=ROOT,
            timeout=timeout,
            env={**os.environ, **(env or {})},
        )

    return run
