import pytest

from speculative.cli.parser import Parser


def test_a_wrong_argument_ends_the_program_with_one_sentence(capsys):
    parser = Parser(description="What it does.")
    parser.add_argument("--rounds", type=int, metavar="N")
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--rounds", "few"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: argument --rounds: invalid int value: 'few' (see --help)\n"


def test_help_keeps_the_lines_of_the_description(capsys):
    with pytest.raises(SystemExit):
        Parser(description="Draft.\n\n    python draft.py").parse_args(["--help"])
    assert "Draft.\n\n    python draft.py\n" in capsys.readouterr().out
