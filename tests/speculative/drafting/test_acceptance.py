"""Estimates of a draft's acceptance."""

import numpy as np
import pytest

from speculative.drafting.acceptance import AcceptanceEstimate


def judge(estimate, confidence, accepted, times):
    """Draft a single token `times` times."""
    for _ in range(times):
        estimate.begin()
        estimate.draft(confidence)
        estimate.update(1, accepted)


def survival(estimate, *confidences):
    estimate.begin()
    for confidence in confidences:
        estimate.draft(confidence)
    return estimate.survival


def test_each_confidence_level_has_its_own_acceptance():
    estimate = AcceptanceEstimate()
    for _ in range(50):
        judge(estimate, 0.1, 0, 1)
        judge(estimate, 0.9, 1, 1)
    unsure, sure = (survival(estimate, confidence) for confidence in (0.1, 0.9))
    assert unsure < 0.15 and sure > 0.9 and estimate.mean() == pytest.approx(0.5, abs=0.02)
    assert survival(estimate, 0.1, 0.9) == pytest.approx(unsure * sure)
    assert survival(estimate, 0.0) == unsure and survival(estimate, 1.0) == sure


@pytest.mark.parametrize("rejected", [0.4, 0.8])
def test_rejections_are_proportional_to_doubt_at_confidences_not_seen_yet(rejected):
    estimate, random = AcceptanceEstimate(), np.random.default_rng(0)
    for _ in range(400):
        judge(estimate, 0.45, int(random.random() > rejected * 0.5625), 1)
    acceptance = [survival(estimate, (bin_ + 0.5) / 8) for bin_ in (0, 7)]
    assert acceptance == pytest.approx([1 - rejected * 0.9375, 1 - rejected * 0.0625], abs=0.1)


def test_token_of_typical_confidence_has_the_prior_acceptance_at_first():
    confidences = (np.arange(8) + 0.5) / 8
    for prior in (0.5, 0.9):
        acceptance = [survival(AcceptanceEstimate(prior), confidence) for confidence in confidences]
        assert np.interp(1 - AcceptanceEstimate.TYPICAL_DOUBT, confidences, acceptance) == pytest.approx(prior)


def test_tokens_after_a_rejected_one_are_not_counted():
    estimate, same = AcceptanceEstimate(), AcceptanceEstimate()
    for one, confidences in ((estimate, (0.9, 0.1, 0.5)), (same, (0.9, 0.1))):
        survival(one, *confidences)
        one.update(len(confidences), 1)
    assert estimate.mean() == same.mean() and survival(estimate, 0.5) == survival(same, 0.5)
    assert estimate.describe() == "per-token acceptance 0.50 over 2 draft tokens"
    assert AcceptanceEstimate().describe() == "no draft token verified yet"


def test_new_request_starts_from_pooled_acceptance():
    pool = AcceptanceEstimate()
    assert AcceptanceEstimate(pool=pool).mean() == pool.mean() == AcceptanceEstimate.PRIOR_ACCEPTANCE
    judge(AcceptanceEstimate(pool=pool), 0.9, 0, 200)
    new = AcceptanceEstimate(pool=pool)
    assert new.mean() == pool.mean() < 0.1 and survival(new, 0.9) == survival(pool, 0.9) < 0.05
    judge(new, 0.9, 1, 20)
    assert new.mean() > 0.8 > 0.3 > pool.mean() and pool.judged == 220 and pool.accepted == 20


@pytest.mark.parametrize(("fades", "least", "most"), [(True, 0.0, 0.001), (False, 0.02, 0.03)])
def test_prior_fades_or_keeps_its_weight(fades, least, most):
    estimate = AcceptanceEstimate(prior_decays=fades)
    judge(estimate, 0.9, 0, 1000)
    assert least <= estimate.mean() <= most


def test_probe_is_due_after_many_iterations_without_draft():
    estimate = AcceptanceEstimate()

    def plain():
        for n in range(100):
            if estimate.is_due:
                return n
            estimate.update(0, 0)

    gaps = []
    for accepted in (0, 0, 0, 0, 0, 1, 0, 0):
        gaps.append(plain())
        estimate.update(1, accepted)
    assert gaps == [8, 16, 32, 64, 64, 64, 0, 16]


def test_known_confidence_determines_acceptance_of_the_next_token():
    estimate = AcceptanceEstimate()
    for _ in range(50):
        judge(estimate, 0.2, 0, 1)
        judge(estimate, 0.97, 1, 1)
    estimate.begin()
    assert estimate.next() == estimate.mean()
    for confidence in (0.97, 0.2):
        estimate.set_next(confidence)
        assert estimate.next() == survival(estimate, confidence)
    estimate.set_next(0.97)
    estimate.draft(0.97)
    assert estimate.next() == estimate.mean()  # that of the token after it is not known yet


def test_acceptance_is_learned_from_declined_tokens():
    pool = AcceptanceEstimate()
    estimate = AcceptanceEstimate(pool=pool)
    for _ in range(100):
        estimate.begin()
        estimate.set_next(0.2)
        assert not estimate.is_due  # nothing has to be drafted to find out
        estimate.observe_declined(True)
        estimate.update(0, 0)
    for one in (estimate, pool, AcceptanceEstimate(pool=pool)):
        assert survival(one, 0.2) > 0.9
    assert estimate.judged == 0  # draft tokens only
