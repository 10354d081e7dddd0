"""Block verification is exact: all its possible runs are enumerated, with exact fractions instead of samples.

A random number stands for all numbers from 0 to 1: comparing it with a threshold has both results, each with its exact
probability given those of earlier comparisons. The models are those of test_rejection_sampling.py, whose thresholds
have small denominators.
"""

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.sampling import rejection_sampling
from speculative.sampling.rejection_sampling import Acceptance, OneHot, verify_block, verify_tokens
from tests.speculative.sampling import test_rejection_sampling
from tests.speculative.sampling.test_rejection_sampling import GOOD, Numbers, Pair, drafts, one_hot, pairs

exactly = settings(max_examples=60, deadline=None)


def fraction(x):
    return Fraction(float(x)).limit_denominator(10**6)


class Undecided(Exception):
    """Raised at the first decision that is not made yet; `shares` are the probabilities of its results."""

    def __init__(self, shares):
        self.shares = shares


class Decisions:
    """Replaces numpy.random.Generator; takes the first decisions from `made`."""

    def __init__(self, made):
        self._made = list(made)

    def decide(self, shares):
        if not self._made:
            raise Undecided(shares)
        return self._made.pop(0)

    def random(self):
        return Uniform(self)


class Uniform:
    """A random number from 0 to 1, of which only the interval is known that its comparisons leave."""

    def __init__(self, decisions):
        self._decisions, self._low, self._high = decisions, Fraction(0), Fraction(1)

    def __lt__(self, threshold):
        at = min(max(fraction(threshold), self._low), self._high)
        share = (at - self._low) / (self._high - self._low)
        below = self._decisions.decide({True: share, False: 1 - share}) if 0 < share < 1 else bool(share)
        self._low, self._high = (self._low, at) if below else (at, self._high)
        return below

    def __ge__(self, threshold):
        return not self < threshold

    def __mul__(self, factor):
        return Scaled(self, fraction(factor))


class Scaled(NamedTuple):
    """A random number times a factor."""

    number: Uniform
    factor: Fraction

    def __lt__(self, threshold):
        return self.number < fraction(threshold) / self.factor if self.factor else threshold > 0


def chosen(row, random):
    """Replaces `draw`, which test_rejection_sampling.py tests."""
    if isinstance(row, OneHot):
        return row.token
    weights = [fraction(x) for x in row]
    return random.decide({x: weight / sum(weights) for x, weight in enumerate(weights)})


def outcomes(program):
    """Return {outcome: exact probability} of `program(random)`."""
    result, pending = Counter(), [((), Fraction(1))]
    while pending:
        made, probability = pending.pop()
        try:
            result[program(Decisions(made))] += probability
        except Undecided as undecided:
            pending += [((*made, one), probability * share) for one, share in undecided.shares.items() if share]
    return result


@pytest.fixture(autouse=True, scope="module")
def draw_in_fractions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampling, "draw", chosen)
        yield


def verdicts(pair, token, drafted, rule=verify_block):
    """Return {Acceptance: exact probability} of `drafted` after `token`."""
    q = [pair.q((token, *drafted[:i])) for i in range(len(drafted))]
    return outcomes(lambda random: rule(drafted, q, lambda i: pair.p((token, *drafted[:i])), random))


def speculative_text(pair, length, K, rule=verify_block, **drafting):
    """Return {tokens: exact probability} of `length` tokens, drafted and verified."""
    return test_rejection_sampling.speculative_text(pair, length, K, rule, verdicts, **drafting)


def expected_tokens(pair, K, rule):
    """The mean number of accepted draft tokens of an iteration."""
    return sum(
        weight * share * verdict.accepted
        for drafted, weight in drafts(pair, 0, K)
        for verdict, share in verdicts(pair, 0, drafted, rule).items()
    )


float64_pairs = pairs().map(lambda pair: Pair(pair.main, pair.draft))


@exactly
@given(float64_pairs, st.integers(0, 2))
def test_text_has_the_main_models_distribution(pair, K):
    assert speculative_text(pair, K + 1, K) == pair.text(K + 1)


def test_several_iterations_and_longer_drafts_are_exact():
    assert speculative_text(GOOD, 4, 2) == GOOD.text(4)
    assert speculative_text(GOOD, 4, 3) == GOOD.text(4)


@exactly
@given(float64_pairs, st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)))
def test_draft_length_may_depend_on_all_drafted_tokens(pair, stops):
    assert speculative_text(pair, 3, 2, goes_on=lambda drafted: drafted not in stops) == pair.text(3)


@exactly
@given(float64_pairs, st.integers(1, 3))
def test_accepts_at_least_as_many_tokens_as_token_verification(pair, K):
    assert expected_tokens(pair, K, verify_block) >= expected_tokens(pair, K, verify_tokens)


def test_expected_tokens_match_the_papers_example():
    """Sun et al. 2024, section 2: 11/9 tokens instead of 10/9."""
    pair = Pair([[2, 4], [2, 4]], [[4, 2], [4, 2]])
    assert expected_tokens(pair, 2, verify_tokens) == Fraction(10, 9)
    assert expected_tokens(pair, 2, verify_block) == Fraction(11, 9)


# Planted bugs: each a rule of its own; and the rule without a bug.


def block(weigh=lambda w, p, q: min(1, w * p / q), scale=lambda w: w, rest=lambda w, total: total + 1 - w):
    """`verify_block` rewritten, with hooks for planting bugs."""

    def rule(drafted, q, p, random):
        rows = [p(i) for i in range(len(drafted) + 1)]
        weights = [1.0]
        for i, x in enumerate(drafted):
            weights.append(weigh(weights[-1], rows[i][x], q[i][x]))
        if random.random() < weights[-1]:
            return Acceptance(len(drafted), chosen(rows[-1], random))
        for i in range(len(drafted) - 1, -1, -1):
            excess = np.maximum(scale(weights[i]) * rows[i] - q[i], 0)
            if i == 0 or random.random() * rest(weights[i], excess.sum()) < excess.sum():
                return Acceptance(i, chosen(excess if excess.any() else rows[i], random))

    return rule


BUGS = {
    "weight not limited to 1 at each token": block(weigh=lambda w, p, q: w * p / q),
    "each token on its own": block(weigh=lambda w, p, q: min(1, p / q)),
    "replaced as token by token": block(scale=lambda w: 1.0),
    "rejected weight forgotten": block(rest=lambda w, total: 1.0),
    "weights of token-by-token verification": block(weigh=lambda w, p, q: w * min(1, p / q)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug):
    assert speculative_text(GOOD, 3, 2, rule=BUGS[bug]) != GOOD.text(3)


def test_rewritten_rule_without_bug_passes():
    assert speculative_text(GOOD, 3, 2, rule=block()) == GOOD.text(3)


# Evaluated rows, and rejected input.


def test_main_model_is_not_evaluated_beyond_an_excluded_token():
    rows, evaluated = [one_hot(1), one_hot(2), one_hot(0), one_hot(1)], []

    def p(i):
        evaluated.append(i)
        return rows[i]

    random = Numbers()  # none is needed
    assert verify_block([1, 1, 0], [one_hot(1), one_hot(1), one_hot(0)], lambda i: OneHot(rows[i].argmax(), 3), random)
    assert verify_block([1, 1, 0], [OneHot(1, 3), OneHot(1, 3), OneHot(0, 3)], p, Decisions([2])) == (1, 2)
    assert evaluated == [0, 1]


def test_without_draft_the_token_is_the_main_models():
    assert verify_block([], [], lambda i: OneHot(2, 3), Numbers()) == (0, 2)


def test_impossible_draft_token_is_rejected():
    with pytest.raises(ValueError, match=r"draft token 0 at index 1 has probability 0.0 in the draft's distribution"):
        verify_block([1, 0], [one_hot(1), one_hot(1)], lambda i: np.full(3, 1 / 3), Numbers(0.5, 0.5))
