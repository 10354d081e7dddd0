"""Sizes in messages: decimal units, one decimal place."""

import pytest

from speculative.byte_size import byte_size


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0.0 KB"),
        (1000, "1.0 KB"),
        (999_949, "999.9 KB"),
        (1_000_000, "1.0 MB"),
        (135_600_000, "135.6 MB"),
        (1.1e9, "1.1 GB"),
        (2_500_000_000_000, "2,500.0 GB"),
    ],
)
def test_size_has_the_largest_unit_that_fits(number, shown):
    assert byte_size(number) == shown
