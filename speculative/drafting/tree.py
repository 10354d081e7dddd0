"""Draft trees: a chain of draft tokens, and beside each of them some of the draft's next most likely tokens, as leaves.

The main model verifies chain and leaves in one forward pass. Where it rejects a token of the chain, the token that it
chooses instead is often the draft's second or third choice. If that is a leaf, its logits are there as well, and give
one more token. The leaves need no further draft steps, and no rule of their own to stay lossless: whichever token the
verification of the chain ends with, the next one is sampled from the main model's distribution after it.

Trees with branches below the leaves (Li et al. 2024, EAGLE-2, arXiv 2406.16858) accept more tokens, but take more draft
steps, and copies in the KV cache: here an accepted leaf is simply computed again, by the next forward pass.
"""

import functools
from itertools import accumulate

import numpy as np

from speculative.sampling.proposal import Leaf, Proposal

RANKS = 8  # alternatives to a draft token that may become leaves
MAX_POSITIONS = 8  # draft tokens, from the first one on, beside which leaves are considered
PRIOR = 8.0  # weight of the prior, in rejected tokens
DECAY = 0.98  # decay of the statistics per rejected token
BLOCK = 128  # logits of which `top_tokens` computes the maximum
FEW = 256  # logits that Python sorts fast enough


class LeafEstimate:
    """Learns how often the token that replaces a rejected draft token is the draft's next choice, or the one after."""

    def __init__(self) -> None:
        self._hits = [PRIOR * 0.15 * 0.7**rank for rank in range(RANKS)]
        self._rejected = PRIOR
        self.begin()

    def begin(self) -> None:
        """Start an iteration."""
        self._drafted: list[tuple[int, list[int]]] = []

    @property
    def drafted(self) -> int:
        """Draft tokens in this iteration."""
        return len(self._drafted)

    def draft(self, proposal: Proposal) -> None:
        """Record a draft token. To be called before its draft computes anything else."""
        self._drafted.append((proposal.token, proposal.alternatives(RANKS)))

    def observe(self, tokens: list[int]) -> None:
        """Record the new `tokens` of the iteration."""
        for (drafted, alternatives), token in zip(self._drafted, tokens, strict=False):
            if token != drafted:
                if alternatives:
                    self._hits = [hits * DECAY for hits in self._hits]
                    self._rejected = self._rejected * DECAY + 1
                    if token in alternatives:
                        self._hits[alternatives.index(token)] += 1
                break

    def probabilities(self) -> list[float]:
        """The probability of each of the `RANKS` ranks, given that the draft token is rejected."""
        return [hits / self._rejected for hits in self._hits]

    def gains(self, acceptance: float, longest: int) -> list[list[float]]:
        """The expected tokens from the best 0, 1, ..., `longest` leaves (columns) beside a chain of 0, 1, ...,
        `longest` draft tokens (rows), each accepted with probability `acceptance` if those before it are."""
        gains = [[0.0] * (longest + 1)]
        leaves: list[float] = []  # the best ones, in tokens
        probabilities = self.probabilities()
        for position in range(min(longest, MAX_POSITIONS)):
            rejected_here = acceptance**position * (1 - acceptance)
            leaves = sorted([*leaves, *(rejected_here * of_rank for of_rank in probabilities)], reverse=True)[:longest]
            row = [0.0, *accumulate(leaves)]
            gains.append(row + [row[-1]] * (longest + 1 - len(row)))
        return gains + [gains[-1]] * (longest - MAX_POSITIONS)

    def best(self, acceptance: list[float], count: int) -> list[Leaf]:
        """The `count` leaves that are most likely accepted, beside draft tokens that are accepted with the probability
        `acceptance` if those before them are."""
        if count <= 0:
            return []
        probabilities, reached = self.probabilities(), 1.0  # by the main model's choices
        leaves: list[tuple[float, Leaf]] = []
        beside = zip(self._drafted, acceptance[:MAX_POSITIONS], strict=False)
        for position, ((_, alternatives), accepted) in enumerate(beside):
            rejected_here = reached * (1 - accepted)
            leaves += [
                (rejected_here * of_rank, Leaf(position, token))
                for of_rank, token in zip(probabilities, alternatives, strict=False)
            ]
            reached *= accepted
        leaves.sort(key=lambda leaf: -leaf[0])
        return [leaf for _, leaf in leaves[:count]]


def top_tokens(logits: np.ndarray, count: int, without: int) -> list[int]:
    """The ids of the `count` largest of `logits` float32 [V], largest first, except the id `without`, and those of
    -inf."""
    # Each of the count + 1 largest blocks has a logit that is at least the smallest of their maxima.
    maxima = np.maximum.reduceat(logits, _block_starts(len(logits)))
    least = np.partition(maxima, -count - 1)[-count - 1] if count < len(maxima) else -np.inf
    candidates = (logits >= least).nonzero()[0]
    if len(candidates) > FEW:  # the largest logits are in few blocks
        candidates = candidates[np.argsort(-logits[candidates], kind="stable")[: count + 1]]
    found = [(-logit, token) for logit, token in zip(logits[candidates].tolist(), candidates.tolist(), strict=True)]
    return [token for logit, token in sorted(found) if token != without and logit < np.inf][:count]


@functools.cache
def _block_starts(n: int) -> np.ndarray:
    """Where the blocks of n logits start."""
    return np.arange(0, n, BLOCK)
