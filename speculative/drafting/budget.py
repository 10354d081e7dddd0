"""Draft budget: a token bucket that bounds how much slower than plain decoding drafting can get."""


class DraftBudget:
    """The time that drafting may still lose, in units of a plain forward pass of the main model.

    An iteration with a draft withdraws the time it took beyond plain decoding of the same tokens, or deposits what it
    saved. A small share of all time is deposited too. While the budget is positive, drafting is not limited. So in the
    time of T plain forward passes, drafting loses at most start + SHARE x T plus the loss of the last iteration,
    whatever acceptance and cost of draft tokens are.

    `start` exceeds the loss of a single iteration: with less, a good draft whose first tokens happen to be rejected
    would not be used again for hundreds of tokens. Recent tokens and seconds are kept separately: if a plain forward
    pass turns out to cost more or less than expected, their loss or gain is revalued.
    """

    SHARE = 0.003
    START = 8.0
    MOST = 16.0  # cap on savings: limits the loss once a text becomes hard for the draft

    FADE = 0.95  # decay of the recent tokens and seconds per iteration

    def __init__(self, start: float = START):
        self._start = self._settled = start
        self._tokens = self._seconds = 0.0  # of recent drafting, less the share of all time

    def left(self, plain: float) -> float:
        """The budget left, in plain forward passes that take `plain` seconds each."""
        return min(self._settled + self._tokens - self._seconds / plain, self.MOST)

    def is_low(self, plain: float) -> bool:
        """Whether less than half of the start is left."""
        return self.left(plain) < self._start / 2

    def update(self, plain: float, seconds: float, tokens: float | None = None) -> None:
        """Record an iteration: its `seconds` and, if it drafted, its `tokens`. A plain one takes `plain` seconds."""
        self._settled = self.left(plain) - self.FADE * (self._tokens - self._seconds / plain)
        self._tokens *= self.FADE
        self._seconds = self._seconds * self.FADE - self.SHARE * seconds
        if tokens is not None:
            self._seconds += seconds
            self._tokens += tokens
