"""Draft budget: a token bucket that limits the loss of drafting, and when to compare it with plain decoding."""

from speculative.drafting.latency_curve import LatencyTable


class DraftBudget:
    """The time that drafting may still lose, in units of a plain forward pass of the main model.

    An iteration with a draft withdraws the time it took beyond plain decoding of the same tokens, or deposits the time
    it saved. A small share of all time is deposited, too. While the budget is positive, drafting is not limited. In the
    time of T plain forward passes, drafting thus loses at most start + SHARE x T plus the loss of the last iteration,
    for any acceptance and cost of draft tokens.

    `start` exceeds the loss of a single iteration. With less, a good draft whose first tokens happen to be rejected
    would not be used again for hundreds of tokens. Recent tokens and seconds are kept separately. If a plain forward
    pass costs more or less than expected, their loss or gain is revalued.
    """

    SHARE = 0.003
    START = 12.0
    MAX = 64.0  # cap on savings: the loss of a few hard texts, so that the draft is still used for those after them

    DECAY = 0.95  # decay of the recent tokens and seconds per iteration

    def __init__(self, start: float = START, maximum: float = MAX):
        self._start = self._settled = start
        self._maximum = maximum
        self._tokens = self._seconds = 0.0  # of recent drafting, less the share of all time

    def remaining(self, plain: float) -> float:
        """The budget left, in plain forward passes that take `plain` seconds each."""
        return min(self._settled + self._tokens - self._seconds / plain, self._maximum)

    def is_low(self, plain: float) -> bool:
        """Whether less than half of the start is left."""
        return self.remaining(plain) < self._start / 2

    def update(self, plain: float, seconds: float, tokens: float | None = None) -> None:
        """Record an iteration: its `seconds` and, if it drafted, its `tokens`. A plain one takes `plain` seconds."""
        self._settled = self.remaining(plain) - self.DECAY * (self._tokens - self._seconds / plain)
        self._tokens *= self.DECAY
        self._seconds = self._seconds * self.DECAY - self.SHARE * seconds
        if tokens is not None:
            self._seconds += seconds
            self._tokens += tokens


class ComparisonSchedule:
    """When to time an iteration without a draft again: after 64 consecutive ones with a draft, then after twice as many
    each time, because it costs two changes of the forward pass's size."""

    FIRST, LAST = 64, 512

    def __init__(self) -> None:
        self._consecutive = 0  # iterations with a draft
        self._interval = self.FIRST

    @property
    def is_due(self) -> bool:
        return self._consecutive >= self._interval

    def observe_drafted(self) -> None:
        """Record an iteration with a draft."""
        self._consecutive += 1

    def observe_plain(self) -> None:
        """Record an iteration without a draft."""
        if self.is_due:
            self._interval = min(2 * self._interval, self.LAST)
        self._consecutive = 0


class OmittedCopies:
    """Copies that the budget did not allow. The text shows how much time they would have saved; it is deposited."""

    CHANGE_SHARE = 0.25  # of the seconds of a change of the pass's size, for each draft: several share a change

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._copies = self._correct = 0

    def update(self, budget: DraftBudget, copies: int, was_correct: bool, plain: float, verify: LatencyTable) -> None:
        """Record an iteration without a draft, in which `copies` tokens would have been copied. `was_correct`: the
        first one was the next token. Seconds: `verify` of the main model's forward passes, `plain` of a plain one."""
        self._copies = self._copies or copies
        if not self._copies:
            return
        self._correct += was_correct
        if not was_correct or self._correct == self._copies:
            seconds = verify.seconds[self._copies + 1] + self.CHANGE_SHARE * verify.change
            budget.update(plain, seconds, self._correct + 1)
            self.forget()
