"""An error that ends a program is one line on standard error and an exit status."""

import pytest


@pytest.fixture
def exit_on(kept_signals):
    from speculative.cli.program import exit_on

    return exit_on


def test_expected_error_is_one_line_with_its_exit_status(exit_on, capsys):
    with pytest.raises(SystemExit) as stop, exit_on(ValueError, KeyError, status=2):
        raise ValueError("first line\n  second line")
    assert stop.value.code == 2 and capsys.readouterr() == ("", "error: first line second line\n")


def test_ctrl_c_prints_nothing(exit_on, capsys):
    with pytest.raises(SystemExit) as stop, exit_on(ValueError):
        raise KeyboardInterrupt
    assert stop.value.code == 130 and capsys.readouterr() == ("", "")


def test_unexpected_error_is_not_hidden(exit_on):
    with pytest.raises(ZeroDivisionError), exit_on(ValueError):
        _ = 1 / 0
