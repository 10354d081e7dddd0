"""Where draft tokens come from: a draft model, or the text itself (prompt lookup)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from speculative.models.cached_model import CachedModel
from speculative.sampling.rejection_sampling import OneHot, draw

Transform = Callable[[np.ndarray, np.ndarray], np.ndarray | OneHot]
"""Logits float32 [V] after the given text (int64 [n]) to the distribution float32 [V] that is sampled from."""


class Proposal(NamedTuple):
    """A draft token, the distribution float32 [V] it was drawn from, and how sure the draft is of it, from 0 to 1."""

    token: int
    q: np.ndarray | OneHot
    confidence: Callable[[], float]


class Proposer(Protocol):
    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        """One token to follow `tokens` (int64 [n], all so far, draft tokens included); None where there is no idea."""

    def forget(self) -> None:
        """Start as if new, for results that can be repeated."""


class DraftModelProposer:
    """Draft tokens of a draft model, drawn through the same transform as the main model's.

    `width` is the main model's number of logits. Models of one family pad one vocabulary differently: logits beyond
    it are cut, missing ones get probability 0. The draft proposes nothing beyond its own context, nor for a text with
    a token it does not know.
    """

    def __init__(self, model: CachedModel, width: int):
        self.model = model
        self._width = width

    def can_read(self, tokens: np.ndarray) -> bool:
        """Whether the draft model can compute what follows `tokens` (int64 [n]): it may know fewer than the main."""
        return len(tokens) <= self.model.capacity and int(tokens.max()) < self.model.width

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        if not self.can_read(tokens):
            return None
        logits = self.model.logits(tokens)[0][: self._width]
        if len(logits) < self._width:
            logits = np.pad(logits, (0, self._width - len(logits)), constant_values=-np.inf)
        q = transform(logits, tokens)
        token = draw(q, random)
        return Proposal(token, q, lambda: softmax_at(logits, token))

    def forget(self) -> None:
        self.model.forget()


def softmax_at(logits: np.ndarray, token: int) -> float:
    """The probability of `token` at temperature 1."""
    return float(1 / np.exp(logits - logits[token]).sum())


class NgramProposer:
    """Draft tokens copied from the text: what followed the last occurrence of its last few tokens (n-gram lookup).

    Saxena 2023, "Prompt Lookup Decoding". The draft is certain of its token, and the rejection rule keeps it lossless.
    """

    def __init__(self, width: int, max_ngram_size: int = 3):
        self._width = width
        self._max_ngram_size = max_ngram_size

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        followers = tokens[1:]
        same = np.ones(len(followers), bool)  # same[i]: the last `size` tokens also end at i
        best, size = None, 0
        for back in range(min(self._max_ngram_size, len(followers))):
            same[back:] &= tokens[: len(followers) - back] == tokens[-1 - back]
            same[:back] = False
            found = np.flatnonzero(same)
            if not len(found):
                break
            best, size = int(followers[found[-1]]), back + 1
        if best is None:
            return None
        return Proposal(best, OneHot(best, self._width), lambda: size / (self._max_ngram_size + 1))

    def forget(self) -> None:
        """The text is all it knows."""
