"""Draft trees: a chain of draft tokens, and beside each of them some of the draft's next most likely tokens, as leaves.

The main model verifies chain and leaves in one forward pass. Where it rejects a token of the chain, the token that it
chooses instead is often the draft's second or third choice. If that is a leaf, its logits are there as well, and give
one more token. The leaves need no further draft steps, and no rule of their own to stay lossless: whichever token the
verification of the chain ends with, the next one is sampled from the main model's distribution after it.

Trees with branches below the leaves (Li et al. 2024, EAGLE-2, arXiv 2406.16858) accept more tokens, but take more draft
steps, and copies in the KV cache: here an accepted leaf is simply computed again, by the next forward pass.
"""

import numpy as np

from speculative.sampling.proposal import Leaf, Proposal

RANKS = 8  # alternatives to a draft token that may become leaves
MAX_POSITIONS = 8  # draft tokens, from the first one on, beside which leaves are considered
PRIOR = 8.0  # weight of the prior, in rejected tokens
DECAY = 0.98  # decay of the statistics per rejected token
BLOCK = 256  # logits whose maximum `top_tokens` keeps


class LeafEstimate:
    """Learns how often the token that replaces a rejected draft token is the draft's next choice, or the one after."""

    def __init__(self) -> None:
        self._hits = PRIOR * 0.15 * 0.7 ** np.arange(RANKS)  # by rank of the alternative
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
                    self._hits *= DECAY
                    self._rejected = self._rejected * DECAY + 1
                    if token in alternatives:
                        self._hits[alternatives.index(token)] += 1
                break

    def probabilities(self) -> np.ndarray:
        """The probability of each rank, given that the draft token is rejected: float64 [RANKS]."""
        return self._hits / self._rejected

    def gains(self, acceptance: float, longest: int) -> np.ndarray:
        """The expected tokens from the best m leaves beside a chain of k draft tokens, each accepted with probability
        `acceptance` if those before it are: float64 [most + 1 (k), most + 1 (m)]."""
        gains = np.zeros((longest + 1, longest + 1))
        reached = acceptance ** np.arange(MAX_POSITIONS) * (1 - acceptance)
        each = np.outer(reached, self.probabilities())
        for k in range(1, longest + 1):
            if k > MAX_POSITIONS:
                gains[k] = gains[MAX_POSITIONS]
                continue
            best = -np.sort(-each[:k], axis=None)[:longest]
            gains[k, 1 : len(best) + 1] = best.cumsum()
            gains[k, len(best) + 1 :] = gains[k, len(best)]
        return gains

    def best(self, acceptance: list[float], count: int) -> list[Leaf]:
        """The `count` leaves that are most likely accepted, beside draft tokens that are accepted with the probability
        `acceptance` if those before them are."""
        positions = min(len(self._drafted), len(acceptance), MAX_POSITIONS)
        if not positions or count <= 0:
            return []
        accepted = np.array(acceptance[:positions])
        reached = np.cumprod(np.append(1.0, accepted[:-1])) * (1 - accepted)
        order = np.argsort(-np.outer(reached, self.probabilities()), axis=None, kind="stable").tolist()
        leaves: list[Leaf] = []
        for position, rank in (divmod(i, RANKS) for i in order):
            alternatives = self._drafted[position][1]
            if rank < len(alternatives):
                leaves.append(Leaf(position, alternatives[rank]))
            if len(leaves) == count:
                break
        return leaves


def top_tokens(logits: np.ndarray, count: int, without: int) -> list[int]:
    """The ids of the `count` largest of `logits` float32 [V], largest first, except the id `without`, and those of
    -inf."""
    padded = np.full(-(-len(logits) // BLOCK) * BLOCK, -np.inf, np.float32)
    padded[: len(logits)] = logits
    padded[without] = -np.inf
    blocks = padded.reshape(-1, BLOCK)
    largest = blocks.max(axis=1)
    tokens: list[int] = []
    while len(tokens) < count:
        block = int(largest.argmax())
        if not largest[block] > -np.inf:
            break
        position = int(blocks[block].argmax())
        tokens.append(block * BLOCK + position)
        blocks[block, position] = -np.inf
        largest[block] = blocks[block].max()
    return tokens
