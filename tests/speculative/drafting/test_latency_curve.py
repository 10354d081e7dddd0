"""Seconds by number of tokens, as measured and learned."""

import numpy as np
import pytest

from speculative.drafting.latency_curve import LatencyCurve, LatencyTable


def test_costs_of_unmeasured_sizes_are_interpolated_linearly():
    costs = LatencyCurve({1: 10.0, 2: 11.0, 4: 13.0})
    assert costs(0) == 0 and costs(3) == pytest.approx(12) and costs(100) == pytest.approx(109)
    assert costs.max_tokens(20.0, other_tokens=1) == 10 and costs.max_tokens(5.0, other_tokens=1) == 0
    for _ in range(100):
        costs.update(2, 22.0)
    assert costs(2) == pytest.approx(22, rel=0.05)


def test_one_number_of_tokens_costs_as_much_as_in_an_array():
    """Before and after updates, between and beyond the measured sizes."""
    costs = LatencyCurve({1: 10.0, 2: 11.0, 100: 80.0})
    n = np.arange(0, 2200, 7)
    for size, seconds in ((1, 12.0), (40, 20.0), (300, 900.0)):
        costs.update(size, seconds)
        assert [costs(i) for i in n.tolist()] == pytest.approx(costs(n).tolist())
        assert costs.seconds[:2049:7] == pytest.approx(costs(n[n < 2049]))


def test_more_tokens_never_cost_less():
    assert LatencyCurve({1: 10.0, 2: 9.0, 4: 13.0})(np.array([1, 2, 3])).tolist() == [9, 9, 11]


def test_table_spreads_a_time_over_neighbouring_sizes():
    table = LatencyTable(np.array([0.0, 10.0, 20.0, 30.0, 40.0]))
    table.update(3, 45.0)
    near, nearer = 1 + 0.05 * LatencyTable.SPREAD**2, 1 + 0.05 * LatencyTable.SPREAD
    assert table.seconds == pytest.approx([0.0, 10 * near, 20 * nearer, 30 * 1.05, 40 * nearer])


def test_table_lowers_the_cost_of_fewer_tokens_at_once():
    table = LatencyTable(np.array([60.0, 60.0, 60.0, 60.0]))
    for _ in range(100):
        table.update(2, 30.0)
    assert (
        table.seconds[:3] == pytest.approx([30] * 3, rel=0.01)
        and table.seconds[0] == table.seconds[2] < table.seconds[3]
    )
