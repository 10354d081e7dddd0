"""What drafting may lose against plain decoding: a token bucket, so that no draft makes decoding slower by more."""


class DraftBudget:
    """The time that drafting may still lose, in plain inferences.

    An iteration with a draft takes out what it took beyond plain decoding of the tokens it gained, or puts in what it
    saved. A small share of all time flows in. While something is left, an iteration may draft as much as it likes. So
    in the time of T plain inferences drafting loses at most start + SHARE x T and what the last iteration lost,
    whatever the chances and the costs of draft tokens are.

    `start` is larger than what one iteration can lose: with less, a good draft whose first tokens happen to be
    rejected would not be asked again for hundreds of tokens.
    """

    SHARE = 0.003
    START = 8.0
    MOST = 16.0  # savings kept for later, so that a text that turns to what the draft does not know loses no more

    def __init__(self, start: float = START):
        self._left = start

    def is_left(self) -> bool:
        """Whether an iteration may draft."""
        return self._left > 0

    def learn(self, taken: float, saved: float = 0.0) -> None:
        """An iteration took so long and, if tokens were drafted, saved so much, both in plain inferences' time."""
        self._left = min(self._left + self.SHARE * taken + saved, self.MOST)
