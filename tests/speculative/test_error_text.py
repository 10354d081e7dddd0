"""Exceptions as one line of text."""

import pytest

from speculative.error_text import engine_lines, is_out_of_memory, one_line

ENGINE = """Exception from src/inference/src/cpp/core.cpp:110:
Exception from src/inference/src/dev/plugin.cpp:53:

Check 'is_found' failed at src/core/src/op.cpp:12:
Unsupported property X  by CPU plugin.
Use another.

"""


def test_message_becomes_one_line():
    assert one_line(ValueError("two\n  lines ")) == "two lines"
    assert one_line(ValueError()) == "ValueError"


def test_engine_error_loses_its_source_locations():
    assert engine_lines(RuntimeError(ENGINE)) == ["Unsupported property X  by CPU plugin.", "Use another."]
    assert engine_lines(RuntimeError("Check 'x' failed at\ny.cpp")) == ["y.cpp"]
    assert engine_lines(RuntimeError("Check 'x' failed\n")) == ["Check 'x' failed"]
    assert engine_lines(RuntimeError(" \n")) == ["RuntimeError"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("[GPU] Exceeded max size of memory object allocation"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[GPU] CL_OUT_OF_RESOURCES"), True),
        (RuntimeError("no such device"), False),
        (OSError(2, "No such file or directory"), False),
    ],
    ids=repr,
)
def test_out_of_memory_errors_are_recognised(error, expected):
    assert is_out_of_memory(error) == expected
