"""Acceptance of tokens copied from a match, by the length of the match."""

from bisect import bisect_right

import numpy as np

from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.suffix import LEVELS


class MatchEstimate(AcceptanceEstimate):
    """Learns the acceptance probability of tokens copied from a match, whether they were copied or not.

    The confidence in such a token is an acceptance measured elsewhere (`suffix.MATCH_ACCEPTANCE`), so it is the prior.
    If the matches of this text are right less often, the prior of lengths that were not seen yet falls, too.
    """

    _pool: "MatchEstimate | None"
    BINS = len(LEVELS)
    HOPE = 2.0  # weight of the prior as a whole, in accepted tokens

    def __init__(self, pool: "MatchEstimate | None" = None):
        super().__init__(pool=pool)
        self._hoped = self._right = self.HOPE

    def see(self, confidence: float, was_right: bool) -> None:
        """Record whether a token that was not copied was right."""
        for estimate in (self, self._pool) if self._pool else (self,):
            estimate._count(self._bin(confidence), was_right)

    def of(self, confidence: float) -> float:
        """The acceptance probability of a token copied with this `confidence`."""
        return self._of_bin(self._bin(confidence))

    def ahead_of(self, confidence: float, longest: int) -> np.ndarray:
        """The probabilities that the next 1, 2, ..., `longest` copied tokens are accepted, float64 [longest], with this
        `confidence` in the next one; the matches of those after it are longer."""
        first = self._bin(confidence)
        bins = np.minimum(first + np.arange(longest), max(first, self.BINS - 2))
        return np.array([self._of_bin(bin_) for bin_ in range(self.BINS)])[bins].cumprod()

    def _count(self, bin_: int, was_accepted: bool) -> None:
        prior = self._pool._of_bin(bin_) if self._pool else float(LEVELS[bin_])
        self._hoped = (self._hoped - self.HOPE) * self.FADE + prior + self.HOPE
        self._right = (self._right - self.HOPE) * self.FADE + was_accepted + self.HOPE
        super()._count(bin_, was_accepted)

    def _bin(self, confidence: float) -> int:
        return bisect_right(LEVELS, confidence) - 1

    def _of_bin(self, bin_: int) -> float:
        prior = self._pool._of_bin(bin_) if self._pool else float(LEVELS[bin_])
        prior *= min(self._right / self._hoped, 1.0)
        return float(self._accepted[bin_] + self.PRIOR * prior) / float(self._judged[bin_] + self.PRIOR)
