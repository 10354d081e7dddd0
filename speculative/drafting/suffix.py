"""Suffix decoding: draft tokens copied from earlier matches with the end of the text, without a draft model.

Oliaro et al. 2025, "SuffixDecoding" (arXiv 2411.04975), which generalizes prompt lookup (Saxena 2023): it finds
the longest matches and drafts the token that followed them most often. It searches the text itself (prompt and output
so far) and past answers, if there are any.

The search is a few numpy comparisons of the whole text. This is faster than a suffix tree in Python, and has no state
that rejected draft tokens or an edited chat could invalidate.
"""

from collections import Counter, deque

import numpy as np

from speculative.drafting.proposers import Transform
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot

LONGEST_MATCH = 16  # tokens of a match that are compared
MATCH_ACCEPTANCE = (0.36, 0.57, 0.74, *[0.85] * 12, 0.97)
"""Acceptance of a token copied after a match of 1, 2, ..., 16 or more tokens, which are all followed by this token;
measured on SmolLM2-135M's answers to scripts/prompts/repeats.jsonl."""
DIVIDED_ACCEPTANCE = 0.2  # the same, if the matches are followed by different tokens, whatever their length
CONFIDENCES = sorted({DIVIDED_ACCEPTANCE, *MATCH_ACCEPTANCE})
"""All confidences that a copied token can have, ascending."""
SHORT_MATCH, MAX_MATCHES = 3, 64  # of the matches longer than this, so many are compared further: the latest
FEW_MATCHES = 8  # so many are compared one by one, which then takes less time than numpy
END = -1  # after each past answer: no token


class SuffixProposer:
    """Copies draft tokens: the most frequent token after the longest earlier match with the end of the text.

    The proposal is one-hot and depends on the past only; rejection sampling keeps it lossless. The confidence is the
    `MATCH_ACCEPTANCE` of the match's length, or `DIVIDED_ACCEPTANCE`.
    """

    def __init__(
        self, vocab_size: int, max_ngram_size: int = LONGEST_MATCH, past: "PastAnswers | None" = None, salt: bytes = b""
    ):
        """`max_ngram_size` is the longest match in tokens: more matching tokens do not count. With `past`, matches are
        also searched in the past answers with this `salt`."""
        self._vocab_size = vocab_size
        self._max_ngram_size = max_ngram_size
        self.past = past
        self._salt = salt

    def of_request(self, salt: bytes, past: bool = True) -> "SuffixProposer":
        """The same for a request with this `salt`; without `past`, it does not copy from past answers."""
        return SuffixProposer(self._vocab_size, self._max_ngram_size, self.past if past else None, salt)

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        suffix = tokens[: -self._max_ngram_size - 1 : -1].tolist()  # the last token first
        length, following = longest_match(tokens, np.flatnonzero(tokens[:-1] == suffix[0]), suffix)
        if self.past is not None and length < len(suffix):
            answers = self.past.of(self._salt)
            past_length, past_following = longest_match(answers.tokens, answers.ends(suffix[0]), suffix)
            if past_length >= length:
                following = past_following + (following if past_length == length else [])
                length = past_length
        if not length:
            return None
        [(token, count)] = Counter(reversed(following)).most_common(1)  # of equally frequent ones the latest
        by_length = MATCH_ACCEPTANCE[min(length, len(MATCH_ACCEPTANCE)) - 1]
        confidence = by_length if count == len(following) else DIVIDED_ACCEPTANCE
        return Proposal(token, OneHot(token, self._vocab_size), lambda: confidence)

    def remember(self, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        """Add the answer in `tokens` (int64 [n], prompt and answer) to the past answers, if there are any, with the end
        of the prompt, by which the answer's beginning is found."""
        if self.past is not None:
            self.past.add(self._salt, tokens[max(num_prompt_tokens - LONGEST_MATCH, 0) :])

    def reset(self) -> None:
        """Forget the past answers."""
        if self.past is not None:
            self.past.clear()


def longest_match(text: np.ndarray, ends: np.ndarray, suffix: list[int]) -> tuple[int, list[int]]:
    """The longest matches of `suffix` (its last token first) in `text` (int [m]), of those that end at the indices
    `ends` (int64 [n], ascending), where the last token matches.

    Returns their length and the tokens that follow them: 0 and none if there are no `ends`.
    """
    length = min(len(ends), 1)
    while len(ends) > FEW_MATCHES and length < len(suffix):
        same = text[ends - length] == suffix[length]
        if ends[0] < length:
            same &= ends >= length
        longer = ends[same]
        if not len(longer):
            return length, text[ends[-MAX_MATCHES:] + 1].tolist()
        ends = longer[-MAX_MATCHES:] if length >= SHORT_MATCH else longer
        length += 1
    rest, lengths = suffix[length:], []
    for end in ends[-MAX_MATCHES:].tolist():
        before = text[max(end + 1 - len(suffix), 0) : end + 1 - length].tolist()
        lengths.append(length + _common_prefix(before[::-1], rest))
    longest = max(lengths, default=0)
    following = text[ends[-MAX_MATCHES:] + 1].tolist()
    return longest, [token for token, length in zip(following, lengths, strict=True) if length == longest]


def _common_prefix(tokens: list[int], others: list[int]) -> int:
    """The number of leading tokens that both lists have in common."""
    same = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        same += 1
    return same


class Answers:
    """Past answers, with an index of their tokens."""

    def __init__(self) -> None:
        self.tokens = np.empty(0, np.int32)  # [m]: answers, each followed by END
        self._order = np.empty(0, np.int64)  # indices of tokens that another one follows, by token, then ascending
        self._sorted = np.empty(0, np.int32)  # the tokens at those indices

    def ends(self, token: int) -> np.ndarray:
        """The indices of `token` in `tokens`, int64 [n], ascending, where another token follows."""
        first, last = np.searchsorted(self._sorted, (token, token + 1))
        return self._order[first:last]

    def add(self, answer: np.ndarray) -> None:
        """Add an answer, token ids int64 [n]."""
        order = np.argsort(answer[:-1], kind="stable")
        places = np.searchsorted(self._sorted, answer[order], side="right")
        self._order = np.insert(self._order, places, order + len(self.tokens))
        self._sorted = np.insert(self._sorted, places, answer[order])
        self.tokens = np.concatenate([self.tokens, answer, [END]]).astype(np.int32)

    def remove(self, length: int) -> None:
        """Remove the oldest answers, which have `length` tokens with their END."""
        self.tokens = self.tokens[length:].copy()
        kept = self._order >= length
        self._order, self._sorted = self._order[kept] - length, self._sorted[kept]


class PastAnswers:
    """The latest answers, of at most `capacity` tokens in all, by salt."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._by_salt: dict[bytes, Answers] = {}
        self._lengths: deque[tuple[bytes, int]] = deque()  # salt and tokens of each answer, END included; oldest first
        self._size = 0

    def of(self, salt: bytes) -> Answers:
        """The answers with this `salt`."""
        return self._by_salt.get(salt, NO_ANSWERS)

    def add(self, salt: bytes, answer: np.ndarray) -> None:
        """Add an answer, token ids int64 [n], of which the last `capacity` - 1 are kept. Removes the oldest answers."""
        answer = answer[max(len(answer) - self.capacity + 1, 0) :]
        if not len(answer):
            return
        self._by_salt.setdefault(salt, Answers()).add(answer)
        self._lengths.append((salt, len(answer) + 1))
        self._size += len(answer) + 1
        while self._size > self.capacity:
            oldest, length = self._lengths.popleft()
            self._size -= length
            self._by_salt[oldest].remove(length)
            if not len(self._by_salt[oldest].tokens):
                del self._by_salt[oldest]

    def clear(self) -> None:
        """Remove all answers."""
        self._by_salt.clear()
        self._lengths.clear()
        self._size = 0


NO_ANSWERS = Answers()
