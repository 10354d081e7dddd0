"""Seconds by number of tokens, as measured and learned."""

import numpy as np
import pytest

from speculative.drafting.latency_curve import BOUNDS, LatencyCurve, LatencyTable


def test_costs_of_unmeasured_sizes_are_interpolated_linearly():
    costs = LatencyCurve({1: 10.0, 2: 11.0, 4: 13.0})
    assert costs(0) == 0 and costs(3) == pytest.approx(12) and costs(100) == pytest.approx(109)
    assert costs.max_tokens(20.0, other_tokens=1, most=512) == 10
    assert costs.max_tokens(20.0, other_tokens=1, most=8) == 8 and costs.max_tokens(5.0, other_tokens=1, most=512) == 0
    assert LatencyCurve({1: 10.0, 2: 11.0})(100) == pytest.approx(109)


@pytest.mark.parametrize("unit", [1.0, 0.001])
def test_cost_approaches_a_repeated_time(unit):
    costs = LatencyCurve({1: 10.0 * unit, 2: 11.0 * unit, 4: 13.0 * unit})
    for _ in range(100):
        costs.update(2, 22.0 * unit)
    assert costs(2) == pytest.approx(22 * unit, rel=0.05)


def test_times_as_expected_change_no_cost():
    costs = LatencyCurve({1: 10.0, 2: 11.0, 100: 80.0})
    before = costs.between(0, 200)
    for _ in range(200):
        costs.update(2, 11.0)
    assert costs.between(0, 200) == pytest.approx(before)


@pytest.mark.parametrize(("factor", "fades"), [(1.9, True), (0.6, False)])
def test_slowdown_of_one_size_fades_while_others_do_not_show_it(factor, fades):
    costs = LatencyCurve({1: 10.0, 2: 11.0, 512: 400.0})
    for _ in range(50):
        costs.update(512, factor * 400)
    learned = costs(512)
    for _ in range(300):
        costs.update(2, costs(2))
    assert costs(512) < 0.9 * learned if fades else costs(512) == learned


def test_ranges_of_sizes_are_interpolated_as_single_ones_and_by_numpy():
    """Before and after updates, between and beyond the measured sizes."""
    costs = LatencyCurve({1: 10.0, 2: 11.0, 100: 80.0})
    for size, seconds in ((1, 12.0), (40, 20.0), (300, 900.0)):
        costs.update(size, seconds)
        table = [costs(n) for n in range(2200)]
        assert np.interp(range(2200), BOUNDS, [costs(n) for n in BOUNDS]) == pytest.approx(table)
        for start, end in ((0, 0), (0, 64), (3, 3), (5, 700), (64, 2047), (2048, 2048), (2040, 2199), (2100, 2150)):
            assert costs.between(start, end) == pytest.approx(table[start : end + 1])


def test_more_tokens_never_cost_less():
    assert LatencyCurve({1: 10.0, 2: 9.0, 4: 13.0}).between(1, 3) == [9, 9, 11]


def test_table_spreads_a_time_over_neighbouring_sizes():
    table = LatencyTable(np.array([0.0, 10.0, 20.0, 30.0, 40.0]), change=0.0)
    table.update(3, 45.0)
    near, nearer = 1 + 0.05 * LatencyTable.SPREAD**2, 1 + 0.05 * LatencyTable.SPREAD
    assert table.seconds == pytest.approx([0.0, 10 * near, 20 * nearer, 30 * 1.05, 40 * nearer])


def test_table_lowers_the_cost_of_fewer_tokens_at_once():
    table = LatencyTable(np.array([60.0, 60.0, 60.0, 60.0]), change=0.0)
    for _ in range(100):
        table.update(2, 30.0)
    assert (
        table.seconds[:3] == pytest.approx([30] * 3, rel=0.01)
        and table.seconds[0] == table.seconds[2] < table.seconds[3]
    )
