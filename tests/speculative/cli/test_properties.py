"""KEY=VALUE is read the same way by every program, so that what was measured is what runs."""

import argparse

import pytest

from convert import export_model_server
from scripts import benchmark_serving, device_swap, tune, verify_lossless
from speculative.cli import arguments, pipeline_arguments
from speculative.cli.properties import PROPERTY, key_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("X=2", 2), ("X=-1", -1), ("X=2.5", "2.5"), ("X=f32", "f32"), ("X=a=b", "a=b"), ("X=YES", "YES")],
)
def test_whole_numbers_are_parsed_as_int(text, value):
    assert key_value(text) == ("X", value)


@pytest.mark.parametrize("text", ["X", "=f32", "X=", ""])
def test_malformed_property_is_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="KEY=VALUE"):
        key_value(text)


def test_every_program_uses_the_same_parser():
    for module in (arguments, pipeline_arguments, export_model_server, benchmark_serving, tune, verify_lossless):
        assert module.PROPERTY is PROPERTY
    assert PROPERTY["type"] is device_swap.key_value is key_value
    assert device_swap.device_property("GPU:X=2") == ("GPU", "X", 2)
