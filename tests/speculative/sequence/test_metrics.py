"""The metrics agree with counts by hand and with the formulas of the paper."""

import random

import pytest

from speculative.sequence import metrics

PROPOSED, ACCEPTED, GAINED = [4, 4, 4, 2], [4, 0, 2, 1], [5, 1, 3, 3]  # the last pass gained a leaf


def test_metrics_match_counts_by_hand():
    assert metrics.acceptance_rate(PROPOSED, ACCEPTED) == 7 / 14
    assert metrics.per_token_acceptance(PROPOSED, ACCEPTED) == 7 / (7 + 3)
    assert metrics.position_acceptance(PROPOSED, ACCEPTED) == [3 / 4, 2 / 4, 1 / 3, 1 / 3]
    assert metrics.block_efficiency(GAINED) == 12 / 4


def test_rates_are_none_without_drafts():
    assert metrics.acceptance_rate([0, 0], [0, 0]) is None
    assert metrics.per_token_acceptance([], []) is None
    assert metrics.block_efficiency([]) is None
    assert metrics.position_acceptance([], []) == []


def test_repetition_counts_repeated_four_grams():
    assert metrics.repetition([1, 2, 3, 4, 5, 6]) == 0
    assert metrics.repetition([7] * 13) == 1 - 1 / 10
    assert metrics.repetition([1, 2]) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_independent_acceptance_gives_the_papers_block_efficiency(alpha, draft_length):
    generator = random.Random(0)
    gained = []
    for _ in range(20_000):
        accepted = 0
        while accepted < draft_length and generator.random() < alpha:
            accepted += 1
        gained.append(accepted + 1)
    proposed = [draft_length] * len(gained)
    assert metrics.block_efficiency(gained) == pytest.approx(metrics.block_efficiency_at(alpha, draft_length), rel=0.02)
    assert metrics.per_token_acceptance(proposed, [n - 1 for n in gained]) == pytest.approx(alpha, abs=0.01)


def test_free_draft_and_verification_gain_the_block_efficiency():
    assert metrics.predicted_speedup(3.2, 4, 0.0, 1.0) == 3.2
    assert metrics.predicted_speedup(3.0, 4, 0.1, 1.6) == pytest.approx(1.5)
