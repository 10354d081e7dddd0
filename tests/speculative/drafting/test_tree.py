"""Draft trees: the leaves that are worth most, by learned probabilities."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.drafting.combined import CombinedDraftLength
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs
from speculative.drafting.suffix import CONFIDENCES
from speculative.drafting.tree import MAX_POSITIONS, RANKS, LeafEstimate, top_tokens
from speculative.sampling.proposal import Leaf, Proposal
from speculative.sampling.rejection_sampling import OneHot

FLAT = Costs(draft=0.05, main={1: 1.0, LONGEST + 1: 1.05})
SLOPING = Costs(draft=0.05, main={1: 1.0, LONGEST + 1: 1.6}, main_change=0.2)
STEEP = Costs(draft=0.05, main={n: float(n) for n in range(1, LONGEST + 2)})


def proposal(token, alternatives, confidence=0.5):
    return Proposal(token, OneHot(token, 100), lambda: confidence, lambda n: alternatives[:n])


@given(st.integers(1, 5000), st.integers(0, 99), st.sampled_from([0, 100, 900]), st.integers(1, 20), st.data())
@settings(max_examples=100, deadline=None)
def test_top_tokens_are_the_largest_logits_except_one(size, seed, live, count, data):
    """Also of equal logits, and where only the first `live` tokens have large ones."""
    logits = np.random.default_rng(seed).integers(-50, 50, size).astype(np.float32)
    logits[logits < -40] = -np.inf
    if live:
        logits[live:] -= 10_000
    without = data.draw(st.integers(0, size - 1))
    found = top_tokens(logits, count, without)
    rest = np.delete(logits, without)
    expected = np.sort(rest[np.isfinite(rest)])[::-1][:count]
    assert without not in found and len(set(found)) == len(found)
    assert logits[found].tolist() == expected.tolist()


def test_top_tokens_are_found_in_many_blocks():
    """The logits differ, and so do the maxima of the blocks."""
    for seed in range(50):
        random = np.random.default_rng(seed)
        logits = random.normal(size=random.integers(100, 5000)).astype(np.float32)
        count = int(random.integers(1, 20))
        best, *others = np.argsort(-logits).tolist()
        assert top_tokens(logits, count, best) == others[:count]


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_gains_are_those_of_the_best_leaves(acceptance):
    estimate = LeafEstimate()
    gains, h = estimate.gains(acceptance, LONGEST), estimate.probabilities()
    for k, m in itertools.product((1, 2, 5, MAX_POSITIONS + 4), (0, 1, 4, 9, LONGEST)):
        positions = range(min(k, MAX_POSITIONS))
        each = sorted((acceptance**i * (1 - acceptance) * p for i in positions for p in h), reverse=True)
        assert gains[k][m] == pytest.approx(sum(each[:m]))
    assert not any(gains[0]) and (np.diff(gains, axis=1) >= 0).all()


def test_rank_of_the_main_models_token_is_learned():
    """By the first rejected token, whether its alternative was a leaf or not. It decides which leaves are chosen."""
    estimate = LeafEstimate()
    for _ in range(200):
        estimate.begin()
        for token in (1, 2):
            estimate.draft(proposal(token, [*range(10, 10 + RANKS)]))
        estimate.observe([1, 13, 12])  # the second one is rejected, for its fourth alternative
    assert np.argmax(estimate.probabilities()) == 3 and 0.9 < estimate.probabilities()[3] < 1
    assert estimate.best([0.5, 0.9], 2) == [Leaf(0, 13), Leaf(1, 13)]
    assert estimate.best([0.5], 1) == [Leaf(0, 13)] and not estimate.best([0.5], 0)


def test_leaf_counts_only_if_its_position_is_reached():
    estimate = LeafEstimate()
    for token in (1, 2):
        estimate.draft(proposal(token, [10 + token]))
    assert estimate.best([0.2, 0.1], 1) == [Leaf(0, 11)]  # the second token is reached with a probability of 0.2
    assert estimate.best([0.9, 0.1], 1) == estimate.best([0.7, 0.4], 1) == [Leaf(1, 12)]


def test_draft_longer_than_planned_has_no_leaves():
    estimate = LeafEstimate()
    for token in (1, 2):
        estimate.draft(proposal(token, [10 + token]))
    assert estimate.best([0.5, 0.5], -1) == []


def test_positions_without_alternatives_have_no_leaves():
    estimate = LeafEstimate()
    before = estimate.probabilities()
    estimate.begin()
    estimate.draft(proposal(1, []))
    estimate.draft(proposal(2, [7]))
    assert estimate.best([0.5, 0.5], 5) == [Leaf(1, 7)]
    estimate.observe([9])
    assert estimate.probabilities() == before


def draft(policy, match):
    """Draft until the policy stops; the number of draft tokens. `match` is a token that may be copied."""
    combined, drafted, confidence = isinstance(policy, CombinedDraftLength), 0, None
    if combined:
        policy.begin()
    while True:
        copies = policy.copies_next(match) if combined else False
        if copies is None or not (combined or policy.should_draft(drafted, confidence)):
            return drafted
        one = match if copies else proposal(1, [10, 11, 12, 13])
        if combined:
            policy.draft(one, copies)
        if not copies:
            policy.observe_step(policy.costs.draft)
        if policy.tree:
            policy.tree.draft(one)
        drafted, confidence = drafted + 1, one.confidence


def iterations(policy, count=300, acceptance=0.4, leaf_share=0.6, match=None):
    """Draft and verify with a simulated main model; the leaves of the last iteration and the mean tokens of all."""
    random = np.random.default_rng(0)
    policy.pass_width, leaves, gained = policy.costs.pass_width(), [], 0
    again = 0
    for _ in range(count):
        policy.tree.begin() if policy.tree else None
        drafted = draft(policy, match)
        leaves = policy.leaves() if policy.tree else []
        accepted = int(np.append(random.random(drafted) >= acceptance, True).argmax())
        if isinstance(policy, CombinedDraftLength) and match and match.token != 1 and any(policy.estimate.copied):
            accepted = min(accepted, policy.estimate.copied.index(True))
        token = 10 if accepted < drafted and random.random() < leaf_share else 99
        leaf = Leaf(accepted, token) in leaves
        policy.pass_width.width_for(1 + again + drafted + len(leaves))
        again = int(leaf)
        tokens = [1] * accepted + [token]
        if isinstance(policy, CombinedDraftLength):
            policy.observe(tokens)
        if policy.tree:
            policy.tree.observe(tokens)
        policy.update(drafted, accepted, drafted * 0.05, float(policy.costs.verify()[policy.pass_width.last]), leaf)
        gained += accepted + leaf + 1
    return leaves, gained / count


def test_leaves_are_drafted_if_they_are_cheap():
    tree, chain = AdaptiveDraftLength(FLAT), AdaptiveDraftLength(FLAT)
    tree.has_leaves = True
    leaves, with_leaves = iterations(tree)
    none, without = iterations(chain)
    assert leaves and not none
    assert with_leaves > without + 0.2
    assert "by leaves of the draft tree" in tree.describe() and "leaves" not in chain.describe()


def test_two_sources_gain_as_much_from_leaves_as_draft_model_alone():
    one, two = AdaptiveDraftLength(SLOPING), CombinedDraftLength(SLOPING)
    one.has_leaves = two.has_leaves = True
    (leaves_of_one, gained_by_one), (leaves_of_two, gained_by_two) = iterations(one, 4000), iterations(two, 4000)
    assert leaves_of_one and leaves_of_two
    assert gained_by_two == pytest.approx(gained_by_one, rel=0.02)


def test_copies_replace_leaves_only_if_worth_more():
    """The first match is always wrong; the policy observes this whether it copies the match or not."""
    wrong, right = proposal(2, [], CONFIDENCES[0]), proposal(1, [], CONFIDENCES[-1])
    policies = CombinedDraftLength(SLOPING), CombinedDraftLength(SLOPING)
    for policy, match in zip(policies, (wrong, None), strict=True):
        policy.has_leaves = True
        assert iterations(policy, match=match)[0]
        policy.tree.begin()
        draft(policy, match or right)
    many, none = (policy.leaves() for policy in policies)
    assert len(many) >= 2 and not none
    assert sum(policies[1].estimate.copied) > 2


def test_leaves_that_cost_more_than_they_gain_are_not_drafted():
    policy = AdaptiveDraftLength(STEEP)
    policy.has_leaves = True
    assert iterations(policy, leaf_share=0.1)[0] == []


def test_tree_has_a_draft_token_beside_its_leaves():
    policy = AdaptiveDraftLength(SLOPING)
    policy.has_leaves = True
    iterations(policy, 100, acceptance=0.9)  # long chains are worth most
    assert policy._chains[0] == 1 and all(1 <= chain <= size for size, chain in enumerate(policy._chains, 1))


def test_chain_longer_than_planned_has_no_leaves():
    policy = AdaptiveDraftLength(FLAT)
    policy.has_leaves = True
    iterations(policy, 100)
    assert policy._leaves_value(0, 2) > policy._leaves_value(policy._width + 1, 2) == 0


def test_short_passes_have_no_leaves():
    short = AdaptiveDraftLength(dataclasses.replace(FLAT, main={n: 0.0039 * s for n, s in FLAT.main.items()}))
    short.has_leaves = True
    assert FLAT.main[1] == 1 and short.tree is None and iterations(short)[0] == []


def test_reset_forgets_the_ranks():
    policy = AdaptiveDraftLength(FLAT)
    policy.has_leaves = True
    iterations(policy, 50)
    policy.reset()
    assert policy.tree.probabilities() == LeafEstimate().probabilities()
