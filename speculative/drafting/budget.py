"""What drafting may lose against plain decoding: a token bucket, so that no draft makes decoding slower by more."""


class DraftBudget:
    """The time that drafting may still lose, in plain inferences.

    An iteration with a draft takes out what it took beyond plain decoding of the tokens it gained, or puts in what it
    saved. A small share of all time flows in. While something is left, an iteration may draft as much as it likes. So
    in the time of T plain inferences drafting loses at most start + SHARE x T and what the last iteration lost,
    whatever the chances and the costs of draft tokens are.

    `start` is larger than what one iteration can lose: with less, a good draft whose first tokens happen to be
    rejected would not be asked again for hundreds of tokens. The newest tokens and seconds are kept apart: if it turns
    out that a plain inference takes longer or shorter than expected, what they lost or saved changes with it.
    """

    SHARE = 0.003
    START = 8.0
    MOST = 16.0  # savings kept for later, so that a text that turns to what the draft does not know loses no more

    FADE = 0.95  # of what is kept apart, with each iteration

    def __init__(self, start: float = START):
        self._settled = start
        self._tokens = self._seconds = 0.0  # gained and taken by drafting lately, less the share of all time

    def left(self, plain: float) -> float:
        """In plain inferences, of which one takes `plain` seconds."""
        return min(self._settled + self._tokens - self._seconds / plain, self.MOST)

    def learn(self, plain: float, seconds: float, tokens: float | None = None) -> None:
        """An iteration took so long; one that drafted gained so many tokens. A plain one takes `plain` seconds."""
        self._settled = self.left(plain) - self.FADE * (self._tokens - self._seconds / plain)
        self._tokens *= self.FADE
        self._seconds = self._seconds * self.FADE - self.SHARE * seconds
        if tokens is not None:
            self._seconds += seconds
            self._tokens += tokens
