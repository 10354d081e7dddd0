"""Former names of options are accepted, mean the same, and are not listed."""

import argparse

import pytest

from convert import export_model_server
from scripts import device_swap, sweep_draft_length
from speculative.bench.load.arguments import add_load_arguments
from speculative.cli import former_options
from speculative.serving import arguments as serving
from tests.support.paths import DRAFT, MAIN


def load_arguments(given):
    parser = argparse.ArgumentParser()
    add_load_arguments(parser)
    return parser.parse_args(given)


PROGRAMS = {  # a parser that reads sys.argv, or a list; its positional arguments
    "device_swap": (device_swap.parse_arguments, [MAIN, DRAFT]),
    "sweep": (sweep_draft_length.parse_arguments, [MAIN, DRAFT]),
    "serve": (lambda: serving.parse(""), [MAIN, DRAFT]),
    "load": (load_arguments, []),
    "model server": (export_model_server.parse, [MAIN.parent, "out"]),
}


@pytest.mark.parametrize(
    ("program", "former", "present", "value"),
    [
        ("device_swap", "--k", "--num-assistant-tokens", "2,6"),
        ("sweep", "--k", "-k", "2-4"),
        ("serve", "--max-running", "--max-num-seqs", "3"),
        ("serve", "--max-waiting", "--max-queue", "3"),
        ("load", "--clients", "--max-concurrency", "2,5"),
        ("model server", "--draft-length", "--num-assistant-tokens", "3"),
    ],
)
def test_former_option_name_is_an_alias(program, former, present, value, monkeypatch):
    parse, positional = PROGRAMS[program]

    def parsed(*options):
        given = [*map(str, positional), *options]
        monkeypatch.setattr("sys.argv", ["program", *given])
        return vars(parse(given) if program in ("load", "model server") else parse())

    assert parsed(former, value) == parsed(present, value) != parsed()


def test_help_lists_the_current_name_only():
    parser = argparse.ArgumentParser()
    former_options.accept(parser, parser.add_argument("--present", type=int, default=5), "--former")
    assert "--former" not in parser.format_help() and "--former" not in parser.format_usage()
    assert parser.parse_args([]).present == 5 and parser.parse_args(["--former", "7"]).present == 7
