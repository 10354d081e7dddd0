"""Proposed draft tokens: one with the distribution it was sampled from, and the leaves of a draft tree."""

from collections.abc import Callable
from typing import NamedTuple

from speculative.sampling.rejection_sampling import Probabilities


class Leaf(NamedTuple):
    """An alternative `token` to the draft token at `position` of the draft (0: the first one)."""

    position: int
    token: int


class Proposal(NamedTuple):
    """A draft token, the distribution float32 [V] it was sampled from, and the draft's confidence, from 0 to 1.

    `alternatives` gives the draft's n most likely other tokens, to be called before the draft computes anything else.
    """

    token: int
    q: Probabilities
    confidence: Callable[[], float]
    alternatives: Callable[[int], list[int]] = lambda n: []
