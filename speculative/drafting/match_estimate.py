"""Acceptance of tokens copied from a match, by the length of the match."""

from bisect import bisect_right
from itertools import accumulate
from operator import mul

from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.suffix import CONFIDENCES


class MatchEstimate(AcceptanceEstimate):
    """Learns the acceptance probability of tokens copied from a match, whether they were copied or not.

    The confidence in such a token is an acceptance measured elsewhere (`suffix.MATCH_ACCEPTANCE`), so it is the prior.
    If the matches of this text are right less often, the prior of lengths that were not seen yet falls, too.
    """

    _pool: "MatchEstimate | None"
    BINS = len(CONFIDENCES)
    BIN_PRIOR = 4.0
    PRIOR_SUCCESSES = 2.0  # weight of the prior as a whole, in accepted tokens

    def __init__(self, pool: "MatchEstimate | None" = None):
        super().__init__(pool=pool)
        self._expected_right = self._observed_right = self.PRIOR_SUCCESSES

    def observe(self, confidence: float, was_correct: bool) -> None:
        """Record whether a token that was not copied was right."""
        for estimate in (self, self._pool) if self._pool else (self,):
            estimate._count(self._bin(confidence), was_correct)

    def acceptance_of(self, confidence: float) -> float:
        """The acceptance probability of a token copied with this `confidence`."""
        return self._bin_acceptance(self._bin(confidence))

    def gains(self, confidence: float, longest: int) -> list[float]:
        """The expected tokens from copying the next 1, 2, ..., `longest` tokens, with this `confidence` in the next
        one; the matches of those after it are longer."""
        first = self._bin(confidence)
        last = max(first, self.BINS - 2)
        acceptance = [self._bin_acceptance(bin_) for bin_ in range(first, last + 1)]
        each = (acceptance + [acceptance[-1]] * longest)[:longest]
        return list(accumulate(accumulate(each, mul)))

    def _count(self, bin_: int, was_accepted: bool) -> None:
        prior = self._measured_prior(bin_)
        self._expected_right = (self._expected_right - self.PRIOR_SUCCESSES) * self.DECAY + prior + self.PRIOR_SUCCESSES
        self._observed_right = (
            (self._observed_right - self.PRIOR_SUCCESSES) * self.DECAY + was_accepted + self.PRIOR_SUCCESSES
        )
        super()._count(bin_, was_accepted)

    def _bin(self, confidence: float) -> int:
        return bisect_right(CONFIDENCES, confidence) - 1

    def _bin_prior(self, bin_: int) -> float:
        return self._measured_prior(bin_) * min(self._observed_right / self._expected_right, 1.0)

    def _measured_prior(self, bin_: int) -> float:
        """The acceptance in other texts."""
        return self._pool._bin_acceptance(bin_) if self._pool else CONFIDENCES[bin_]
