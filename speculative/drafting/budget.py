"""What drafting may lose against plain decoding: a token bucket, so that no draft makes decoding slower by more."""


class DraftBudget:
    """Plain inferences' time that drafting may still lose.

    An iteration with a draft takes out what it took beyond plain decoding of the tokens it gained, or puts in what it
    saved. A small share of all time flows in. So in T plain inferences' time drafting loses at most START + SHARE x T,
    and one iteration more, whatever the chances and the costs of draft tokens are.
    """

    SHARE = 0.003
    START = 1.5
    MOST = 8.0  # savings kept for later, so that a text that turns to what the draft does not know loses no more

    def __init__(self):
        self._left = self.START

    def allows(self, loss: float) -> bool:
        """Whether an iteration may lose so much, in plain inferences' time."""
        return loss <= self._left

    def learn(self, taken: float, saved: float = 0.0) -> None:
        """An iteration took so long and, if tokens were drafted, saved so much, both in plain inferences' time."""
        self._left = min(self._left + self.SHARE * taken + saved, self.MOST)
