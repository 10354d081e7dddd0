"""The checks of `make lint`, here beside the other tests, so that they take no time of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command", ["ruff check .", "ruff format --check .", "mypy speculative", "lint-imports"], ids=lambda text: text
)
def test_lint_command_passes(command):
    program, *arguments = command.split()
    done = subprocess.run([BIN / program, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_lint_runs_the_same_checks():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nlint: ")[2].partition("\n\n")[0].replace("$(PY) -m ", "").replace("$(BIN)/", "")
    marks = test_lint_command_passes.pytestmark
    assert [line.strip() for line in recipe.splitlines()[1:]] == marks[0].args[1]
