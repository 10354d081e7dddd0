"""Suffix decoding proposes what a brute-force search finds, in the text and in past answers of the same salt."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.drafting.suffix import (
    DIVIDED_ACCEPTANCE,
    FEW_MATCHES,
    MATCH_ACCEPTANCE,
    MAX_MATCHES,
    PastAnswers,
    SuffixProposer,
    longest_match,
)

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)  # few tokens, many matches


def proposal(tokens, *arguments, **options):
    """The token that is proposed after `tokens` and its confidence, None if there is none."""
    found = SuffixProposer(100, *arguments, **options).propose(np.array(tokens), None, None)
    return found and (found.token, found.confidence())


def by_brute_force(tokens, longest, answers=()):
    longest = min(longest, len(tokens))
    for length in range(longest, 0, -1):
        own, past = (
            [
                text[end]
                for text in texts
                for end in range(length, len(text))
                if text[end - length : end] == tokens[-length:]
            ]
            for texts in ([tokens], answers)
        )
        following = own if length == longest and own else past + own  # a match cannot be longer: no need to go on
        if following:
            counts = Counter(following)
            most = max(counts.values())
            token = next(token for token in reversed(following) if counts[token] == most)
            by_length = MATCH_ACCEPTANCE[min(length, len(MATCH_ACCEPTANCE)) - 1]
            return token, by_length if len(counts) == 1 else DIVIDED_ACCEPTANCE
    return None


@settings(deadline=None)
@given(TEXTS, st.integers(1, 20), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=2))
def test_proposal_matches_brute_force_search(tokens, longest, answers):
    assert proposal(tokens, longest) == by_brute_force(tokens, longest)
    past = PastAnswers(1000)
    for answer in answers:
        past.add(b"a", np.array(answer))
        past.add(b"b", np.array(tokens))  # of another salt: never seen
    assert proposal(tokens, longest, past, b"a") == by_brute_force(tokens, longest, answers)


@pytest.mark.parametrize(
    ("tokens", "token", "length"),
    [
        ([1, 2, 3, 8, 9, 3, 4, 1, 2, 3], 8, 3),  # the longest match, although a shorter one is later
        ([3, 4, 0, 3, 4, 7, 3], 4, 1),
        ([3, 4, 0, 3, 4, 9, 3, 5, 7, 3], 4, None),  # the most frequent token, although another is later
        ([3, 4, 0, 3, 5, 9, 3], 5, None),  # of equally frequent ones the last
        ([5, 5, 5], 5, 2),  # a match may overlap its own copy
        ([*range(30), *range(20)], 20, 16),
    ],
)
def test_longest_match_wins_then_the_most_frequent_token(tokens, token, length):
    assert proposal(tokens) == (token, MATCH_ACCEPTANCE[length - 1] if length else DIVIDED_ACCEPTANCE)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [7, 7, 7, 9]])
def test_no_match_gives_no_proposal(tokens):
    assert proposal(tokens) is None


def test_only_the_latest_of_many_long_matches_are_compared():
    """A loop of thousands of tokens costs no more than a short one."""
    loop = [1, 2, 3, 4, 5]
    tokens = [*loop, 9, *loop * 1000]
    assert proposal(tokens) == (1, MATCH_ACCEPTANCE[-1])
    past = PastAnswers(10_000)
    past.add(b"", np.array(tokens))
    ends = past.of(b"").ends(5)
    length, following = longest_match(past.of(b"").tokens, ends, loop[::-1])
    assert length == 5 and following == [1] * MAX_MATCHES < [1] * len(ends)


def test_only_the_latest_of_many_short_matches_count():
    """The end of the text is too short to compare them further."""
    tokens = [*[1, 2, 3] * 10, *[1, 2, 4] * MAX_MATCHES, 1, 2]
    assert proposal(tokens, 2) == (4, MATCH_ACCEPTANCE[1])


def test_match_length_is_limited_to_max_ngram_size():
    tokens = [1, 2, 3, 8, 5, 2, 3, 9, 6, 2, 3, 9, 4, 1, 2, 3]
    assert proposal(tokens, 3) == (8, MATCH_ACCEPTANCE[2]) and proposal(tokens, 2) == (9, DIVIDED_ACCEPTANCE)


def test_match_does_not_continue_before_the_start_of_the_text():
    text = np.array([5, 9, *[1, 5, 6] * FEW_MATCHES, 7])
    ends = np.flatnonzero(text == 5)  # more than are compared one by one; before the first of them, nothing is a 7
    assert longest_match(text, ends, [5, 7]) == (1, [9, *[6] * FEW_MATCHES])


def test_beginning_of_a_past_answer_follows_the_end_of_its_prompt():
    past = PastAnswers(100)
    SuffixProposer(100, past=past).remember(np.array([1, 2, 3, 50, 51]), 3)
    assert proposal([9, 2, 3], past=past) == (50, MATCH_ACCEPTANCE[1])


def test_matches_do_not_cross_past_answers():
    past = PastAnswers(100)
    for answer in ([1, 2], [3, 4], [5, 6, 2, 3]):
        past.add(b"", np.array(answer))
    assert proposal([9, 1, 2], past=past) == (3, MATCH_ACCEPTANCE[0])  # after 2, not after 1 2
    assert proposal([9, 4], past=past) is None  # the last token of an answer


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), TEXTS), max_size=30), st.integers(1, 60))
def test_past_answers_are_bounded_and_evicted_oldest_first(added, capacity):
    past = PastAnswers(capacity)
    for salt, answer in added:
        past.add(salt, np.array(answer))
    kept, room = [], capacity
    for salt, answer in reversed(added):
        part = answer[-(capacity - 1) :] if capacity > 1 else []
        if part and len(part) + 1 > room:
            break
        if part:
            kept.insert(0, (salt, part))
            room -= len(part) + 1
    for salt in (b"a", b"b", b"c"):
        assert past.of(salt).tokens.tolist() == [token for s, part in kept if s == salt for token in (*part, -1)]
    assert set(past._by_salt) == {salt for salt, _ in kept}  # nothing is left of a salt without answers
    past.clear()
    assert not past._by_salt and not past._lengths


def test_request_sees_only_past_answers_of_its_salt():
    proposer = SuffixProposer(100, past=PastAnswers(100))
    proposer.past.add(b"mine", np.array([1, 2, 3]))
    tokens = np.array([9, 1, 2])
    assert proposer.of_request(b"mine").propose(tokens, None, None).token == 3
    assert proposer.of_request(b"another's").propose(tokens, None, None) is None
    proposer.reset()
    assert proposer.of_request(b"mine").propose(tokens, None, None) is None
