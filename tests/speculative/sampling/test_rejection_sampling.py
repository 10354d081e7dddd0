"""The algorithm is exact: all its possible runs are enumerated, with exact fractions instead of samples.

All probabilities here are multiples of 1/UNITS. So every threshold at which the algorithm decides differently is a
fraction with a denominator up to UNITS, and a random number can be replaced by the intervals between such fractions:
each outcome has an exact probability, and the check needs no tolerance. Planted bugs show that it can fail.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.sampling import rejection_sampling
from speculative.sampling.rejection_sampling import (
    Acceptance,
    OneHot,
    Sparse,
    draw,
    residual,
    speculative_decoding,
    verify_block,
    verify_match,
)
from speculative.sampling.rejection_sampling import verify_tokens as verify

UNITS = 6
POINTS = sorted({Fraction(a, b) for b in range(1, UNITS + 1) for a in range(b + 1)})
CELLS = [(float(low + high) / 2, high - low) for low, high in pairwise(POINTS)]
ALMOST_ONE = 1 - 2**-53  # the largest number a Generator returns


class Exhausted(Exception):
    pass


class Numbers:
    """Replaces numpy.random.Generator and returns chosen numbers."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        if not self.numbers:
            raise Exhausted
        return self.numbers.pop(0)


def outcomes(program):
    """Return {outcome: exact probability} of `program(random, seen)`, which appends its decisions to `seen`.

    Of all intervals of a random number that lead to the same decisions, only one is followed, for all of them.
    """
    result, pending = Counter(), [((), Fraction(1))]
    while pending:
        numbers, probability = pending.pop()
        decided = {}
        for number, share in CELLS:
            seen = []
            try:
                outcome = (program(Numbers(*numbers, number), seen),)
            except Exhausted:
                outcome = ()
            shares, _ = decided.get((outcome, tuple(seen)), (0, None))
            decided[outcome, tuple(seen)] = shares + share, number
        for (outcome, _), (share, number) in decided.items():
            if outcome:
                result[outcome[0]] += probability * share
            else:
                pending.append(((*numbers, number), probability * share))
    return result


@dataclass
class Pair:
    """A main and a draft model that depend on the last token only: `main[token]` and `draft[token]` are probabilities
    [V] in units of 1/UNITS. Text starts after token 0."""

    main: list[list[int]]
    draft: list[list[int]]
    dtype: type = np.float64

    def __post_init__(self):
        self.main_rows, self.draft_rows = (np.array(units, self.dtype) / UNITS for units in (self.main, self.draft))

    def p(self, tokens):
        return self.main_rows[tokens[-1]]

    def q(self, tokens):
        return self.draft_rows[tokens[-1]]

    def text(self, length):
        """Return {tokens: exact probability} of the main model alone: the chain rule."""
        texts = {(0,): Fraction(1)}
        for _ in range(length):
            texts = {(*t, x): w * share for t, w in texts.items() for x, share in possible(self.main[t[-1]])}
        return texts


def possible(units):
    """Return [(token, exact probability)], without those of probability 0."""
    return [(x, Fraction(n, UNITS)) for x, n in enumerate(units) if n]


def always(drafted):
    return True


def drafts(pair, token, K, goes_on=always, keeps=always):
    """Yield (drafted tokens, exact probability). `goes_on(drafted)` says whether to draft on, knowing all drafted so
    far; `keeps(drafted)` whether the token just drafted stays: a draft that drops tokens is one of the bugs."""
    pending = [((), Fraction(1))]
    while pending:
        drafted, probability = pending.pop()
        if len(drafted) == K or (drafted and not goes_on(drafted)):
            yield drafted, probability
            continue
        for x, share in possible(pair.draft[(token, *drafted)[-1]]):
            if keeps((*drafted, x)):
                pending.append(((*drafted, x), probability * share))
            else:
                yield drafted, probability * share


def verdicts(pair, token, drafted, verify=verify):
    """Return {Acceptance: exact probability} of `drafted` after `token`."""

    def iteration(random, seen):
        def p(i):
            seen.append(i)  # shows what was accepted
            return pair.p((token, *drafted[:i]))

        return verify(drafted, [pair.q((token, *drafted[:i])) for i in range(len(drafted))], p, random)

    return outcomes(iteration)


def speculative_text(pair, length, K, verify=verify, verdicts=verdicts, **rule):
    """Return {tokens: exact probability} of `length` tokens drafted and verified as speculative decoding does it."""

    @lru_cache(None)
    def text(token, length):
        if length == 0:
            return {(token,): Fraction(1)}
        result = Counter()
        for drafted, weight in drafts(pair, token, min(K, length - 1), **rule):
            for (accepted, own), share in verdicts(pair, token, drafted, verify).items():
                gained = (token, *drafted[:accepted])
                for rest, tail in text(own, length - len(gained)).items():
                    result[gained + rest] += weight * share * tail
        return result

    return text(0, length)


@st.composite
def rows(draw, vocabulary):
    """A distribution [V] in units, including zeros and one-hot distributions."""
    cuts = sorted(draw(st.lists(st.integers(0, UNITS), min_size=vocabulary - 1, max_size=vocabulary - 1)))
    return [high - low for low, high in zip([0, *cuts], [*cuts, UNITS], strict=True)]


@st.composite
def pairs(draw):
    """Main and draft models: unrelated, equal, or equal but for some rows."""
    vocabulary = draw(st.integers(2, 4))
    main = draw(st.lists(rows(vocabulary), min_size=vocabulary, max_size=vocabulary))
    draft = [row if draw(st.booleans()) else draw(rows(vocabulary)) for row in main]
    return Pair(main, draft, draw(st.sampled_from([np.float32, np.float64])))


exactly = settings(max_examples=120, deadline=None)
GOOD = Pair([[2, 3, 1], [0, 4, 2], [1, 1, 4]], [[1, 4, 1], [2, 1, 3], [2, 3, 1]])


@exactly
@given(pairs(), st.integers(0, 4))
def test_text_has_the_main_models_distribution(pair, K):
    assert speculative_text(pair, K + 1, K) == pair.text(K + 1)


@settings(max_examples=50, deadline=None)
@given(pairs(), st.integers(1, 2))
def test_several_iterations_are_exact(pair, K):
    assert speculative_text(pair, 4, K) == pair.text(4)


@exactly
@given(pairs(), st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)))
def test_draft_length_may_depend_on_all_drafted_tokens(pair, stops):
    assert speculative_text(pair, 3, 3, goes_on=lambda drafted: drafted not in stops) == pair.text(3)


def certain(drafted, pair=GOOD):
    """Whether the draft gave the token it drafted last at least half."""
    token, x = (0, *drafted)[-2:]
    return pair.draft[token][x] * 2 >= UNITS


def test_stopping_after_an_unlikely_token_does_not_bias():
    assert speculative_text(GOOD, 3, 2, goes_on=certain) == GOOD.text(3)


def test_dropping_an_unlikely_token_biases():
    assert speculative_text(GOOD, 3, 2, keeps=certain) != GOOD.text(3)


@exactly
@given(pairs())
def test_acceptance_probability_is_maximal(pair):
    """The sum over x of min(p(x), q(x)): Leviathan et al., section 3.2."""
    accepted = sum(
        weight * share
        for drafted, weight in drafts(pair, 0, 1)
        for verdict, share in verdicts(pair, 0, drafted).items()
        if verdict.accepted
    )
    assert accepted == Fraction(sum(map(min, pair.main[0], pair.draft[0])), UNITS)


# Planted bugs, and another rule that is exact.


def accepting(accepts, replaces=lambda p, q, i, random: draw(residual(p(i), q[i]), random), bonus=lambda n: n):
    """A `verify` with another rule of acceptance, of replacement, or of the bonus token's row."""

    def verify(drafted, q, p, random):
        for i, x in enumerate(drafted):
            if not accepts(p(i)[x], q[i][x], random):
                return Acceptance(i, replaces(p, q, i, random))
        return Acceptance(len(drafted), draw(p(bonus(len(drafted))), random))

    return verify


def right(p, q, random):
    return random.random() < p / q


def from_next_row(p, q, i, random):
    return draw(p(i + 1), random)


def residual_of_another_row(p, q, i, random):
    return draw(residual(p(i), q[i - 1]), random)


BUGS = {
    "no residual": accepting(right, lambda p, q, i, random: draw(p(i), random)),
    "inverted residual": accepting(right, lambda p, q, i, random: draw(residual(q[i], p(i)), random)),
    "residual of another row": accepting(right, residual_of_another_row),
    "replacement from the next row": accepting(right, from_next_row),
    "replacement from the draft": accepting(right, lambda p, q, i, random: draw(q[i], random)),
    "inverted ratio": accepting(lambda p, q, random: random.random() * p < q),
    "ratio without q": accepting(lambda p, q, random: random.random() < p),
    "accept all": accepting(lambda p, q, random: True),
    "accept none": accepting(lambda p, q, random: False),
    "accept where p is above q": accepting(lambda p, q, random: p >= q),
    "wrong bonus row": accepting(right, bonus=lambda n: max(n - 1, 0)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug):
    assert speculative_text(GOOD, 3, 2, verify=BUGS[bug]) != GOOD.text(3)


def test_rewritten_rule_without_bug_passes():
    assert speculative_text(GOOD, 3, 2, verify=accepting(right)) == GOOD.text(3)


def match(drafted, q, p, random):
    return verify_match(drafted, p, random)


@exactly
@given(pairs(), st.integers(0, 2))
def test_match_verification_is_exact_for_any_draft(pair, K):
    assert speculative_text(pair, K + 1, K, verify=match) == pair.text(K + 1)


@exactly
@given(pairs(), st.integers(0, 3))
def test_deterministic_draft_is_accepted_as_often_by_matching(pair, token):
    vocabulary = len(pair.main)
    certain = [UNITS * (x == token % vocabulary) for x in range(vocabulary)]
    pair = Pair(pair.main, [certain] * vocabulary)
    accepted = [
        sum(share for verdict, share in verdicts(pair, 0, (token % vocabulary,), rule).items() if verdict.accepted)
        for rule in (verify, match)
    ]
    assert accepted[0] == accepted[1]


# Evaluated rows, and rejected input.


def one_hot(token, vocabulary=3):
    row = np.zeros(vocabulary, np.float32)
    row[token] = 1
    return row


def test_main_model_is_not_evaluated_beyond_the_first_rejection():
    rows, evaluated = [one_hot(1), one_hot(2), one_hot(0), one_hot(1)], []

    def p(i):
        evaluated.append(i)
        return rows[i]

    random = np.random.default_rng(0)
    assert verify([1, 1, 0], [one_hot(1), one_hot(1), one_hot(0)], p, random) == (1, 2)
    assert evaluated == [0, 1]
    assert verify([1, 2, 0], [one_hot(1), one_hot(2), one_hot(0)], p, random) == (3, 1)
    assert evaluated == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_distributions_are_always_accepted(dtype):
    """Even for the largest possible random number, which rounds to 1 in float32."""
    row = np.array([0.1, 0.2, 0.7], dtype)
    assert verify([0, 2, 1], [row] * 3, lambda i: row, Numbers(*[ALMOST_ONE] * 4)).accepted == 3


def test_token_excluded_by_main_model_is_never_accepted():
    row = np.array([0, 0.5, 0.5])
    assert verify([0], [np.array([0.5, 0.5, 0])], lambda i: row, Numbers(0.0, 0.0)) == (0, 2)


def test_rejection_by_rounding_is_replaced_from_main_model():
    """If q exceeds p everywhere by rounding, there is no residual to sample from."""
    p = np.array([0.25, 0.25, 0.5], np.float32)
    q = np.nextafter(p, np.float32(1))
    assert verify([2], [q], lambda i: p, Numbers(ALMOST_ONE, 0.0)) == (0, 0)
    assert residual(p, q) is p


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 300), st.sampled_from([1e-7, 1e-3, 1.0, 30.0]))
def test_accepted_and_residual_probability_sum_to_p_in_float32(seed, vocabulary, difference):
    """q min(1, p / q) + (rejected) residual = p, with p and q as near or far as they come, with exact zeros."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal(vocabulary) * 5
    p, q = (
        np.exp(x - x.max()).astype(np.float32)
        for x in (logits, logits + random.standard_normal(vocabulary) * difference)
    )
    p[random.random(vocabulary) < 0.1] = 0
    p[logits.argmax()] = 1
    p, q = p / p.sum(), q / q.sum()
    accepted = np.minimum(p, q)
    assert np.allclose(accepted + (1 - accepted.sum()) * residual(p, q), p, rtol=0, atol=1e-6)
    assert not residual(p, q)[p == 0].any()


@pytest.mark.parametrize("impossible", [0.0, float("nan")])
def test_impossible_draft_token_is_rejected(impossible):
    q = np.array([impossible, 0.5, 0.5])
    with pytest.raises(ValueError, match=r"^draft token 0 at index 0 has probability (0.0|nan) in the draft's"):
        verify([0], [q], lambda i: q, np.random.default_rng(0))


# Drawing.


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocabulary", [1, 2, 511, 512, 513, 5000])
def test_each_token_is_drawn_by_its_share_of_random_numbers(dtype, vocabulary):
    random = np.random.default_rng(vocabulary)
    probabilities = random.dirichlet(np.ones(vocabulary)).astype(dtype)
    probabilities[random.random(vocabulary) < 0.3] = 0
    probabilities[vocabulary // 2] = 0.01
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    for edge in (1e-3, 0.5, 1 - 1e-3):  # of a token's share of the numbers
        at = (cumulative - (1 - edge) * probabilities) / cumulative[-1]
        possible = np.flatnonzero(probabilities > (1e-4 if dtype == np.float32 else 0))
        assert [draw(probabilities, Numbers(at[token])) for token in possible] == possible.tolist()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, ALMOST_ONE]) | st.floats(0, ALMOST_ONE))
def test_token_of_probability_zero_is_never_drawn(seed, number):
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.full(2000, 0.1)).astype(np.float32)
    probabilities[random.random(2000) < 0.9] = 0
    probabilities[: random.integers(1500)] = 0
    probabilities[random.integers(1600, 2000) :] = 0
    probabilities[1550] = 1e-30
    assert probabilities[draw(probabilities, Numbers(number))] > 0


@pytest.mark.parametrize("token", [0, 511, 512, 75_000, 150_015, 150_016])
@pytest.mark.parametrize("number", [0.0, 0.5, ALMOST_ONE])
def test_one_hot_in_a_large_vocabulary_is_drawn(token, number):
    assert draw(one_hot(token, 150_017), Numbers(number)) == token


@pytest.mark.parametrize("probabilities", [[0.0, 0.0], [float("nan"), 1.0]])
def test_drawing_from_nothing_is_an_error(probabilities):
    with pytest.raises(ValueError, match=r"^cannot sample a token from probabilities that sum to (0.0|nan)$"):
        draw(np.array(probabilities), np.random.default_rng(0))


# Speculative decoding as a whole, with functions as models.


@pytest.mark.parametrize("K", [0, 1, 2])
def test_speculative_decoding_is_exact_for_every_random_number(K, monkeypatch):
    def program(random, seen):
        def seen_draw(probabilities, random):
            seen.append(draw(probabilities, random))
            return seen[-1]

        def main(tokens):
            seen.append(tuple(tokens))
            return GOOD.p(tokens)

        monkeypatch.setattr(rejection_sampling, "draw", seen_draw)
        return (0, *(x for gained, _ in speculative_decoding(main, GOOD.q, [0], 3, K, random) for x in gained))

    assert outcomes(program) == GOOD.text(3)


@pytest.mark.parametrize("K", [0, 1, 4])
@pytest.mark.parametrize("new_tokens", [0, 1, 2, 5, 11])
def test_requested_tokens_are_returned_and_perfect_draft_is_accepted(K, new_tokens):
    steps = list(speculative_decoding(GOOD.p, GOOD.p, [0], new_tokens, K, np.random.default_rng(0)))
    assert sum(len(gained) for gained, _ in steps) == new_tokens
    assert all(accepted == len(gained) - 1 for gained, accepted in steps)
    assert [len(gained) for gained, _ in steps[:-1]] == [K + 1] * (len(steps) - 1)


def test_greedy_text_equals_the_main_models_for_any_draft():
    random = np.random.default_rng(0)
    likely, drafted = random.integers(0, 3, (2, 3))
    expected = [0]
    for _ in range(20):
        expected.append(int(likely[expected[-1]]))
    steps = speculative_decoding(
        lambda tokens: one_hot(likely[tokens[-1]]), lambda tokens: one_hot(drafted[tokens[-1]]), [0], 20, 4, random
    )
    assert [token for gained, _ in steps for token in gained] == expected[1:]


@pytest.mark.parametrize(
    "p",
    [OneHot(2, 4), np.array([0.5, 0.2, 0.2, 0.1]), Sparse(np.array([0, 1, 2]), np.array([0.5, 0.25, 0.25]), 4)],
    ids=["p certain", "p", "p of three tokens"],
)
@pytest.mark.parametrize(
    "q",
    [OneHot(1, 4), OneHot(2, 4), np.array([0.1, 0.2, 0.3, 0.4]), Sparse(np.array([1, 3]), np.array([0.25, 0.75]), 4)],
    ids=["q 1", "q 2", "q", "q of two tokens"],
)
def test_one_hot_and_sparse_equal_their_dense_arrays(p, q):
    assert np.asarray(OneHot(2, 4)).tolist() == [0, 0, 1, 0] and len(OneHot(2, 4)) == 4
    arrays = np.asarray(p, np.float64), np.asarray(q, np.float64)
    for x in np.flatnonzero(arrays[1]):
        if arrays[0][x] < arrays[1][x]:  # may be rejected
            assert np.allclose(residual(p, q), residual(*arrays))
        for seed in range(200):
            ours = verify([x], [q], lambda _: p, np.random.default_rng(seed))
            theirs = verify([x], [arrays[1]], lambda _: arrays[0], np.random.default_rng(seed))
            assert ours == theirs
            ours = verify_block([x, x], [q, q], lambda _: p, np.random.default_rng(seed))
            theirs = verify_block([x, x], [arrays[1]] * 2, lambda _: arrays[0], np.random.default_rng(seed))
            assert ours == theirs


def test_sparse_distribution_is_zero_elsewhere():
    q = Sparse(np.array([2, 5, 7]), np.array([0.125, 0.375, 0.5], np.float32), 9)
    assert len(q) == 9 and np.asarray(q).tolist() == [0, 0, 0.125, 0, 0, 0.375, 0, 0.5, 0]
    assert [q[token] for token in range(9)] == np.asarray(q).tolist()
    random = np.random.default_rng(0)
    counts = np.bincount([draw(q, random) for _ in range(4000)], minlength=9)
    assert not counts[np.asarray(q) == 0].any() and np.allclose(counts / 4000, q, atol=0.03)
