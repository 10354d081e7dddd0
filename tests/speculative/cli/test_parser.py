import os
import subprocess
import sys
from pathlib import Path

import pytest

from speculative.cli.parser import Parser
from tests.support.paths import ROOT


def test_invalid_argument_exits_with_one_sentence_error(capsys):
    parser = Parser(description="What it does.")
    parser.add_argument("--rounds", type=int, metavar="N")
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--rounds", "few"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: argument --rounds: invalid int value: 'few' (see --help)\n"


def test_help_keeps_line_breaks_of_the_description(capsys):
    with pytest.raises(SystemExit):
        Parser(description="Draft.\n\n    python draft.py").parse_args(["--help"])
    assert "Draft.\n\n    python draft.py\n" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("arguments", [("scripts/tune.py", "--help"), ("convert/export_pair.py", "--list")], ids=str)
def test_unwritable_short_output_gives_one_sentence_error(arguments):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, env=buffered)
    assert done.returncode == 1
    assert done.stderr == b"error: the output cannot be written: No space left on device.\n"
