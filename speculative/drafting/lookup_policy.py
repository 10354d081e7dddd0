"""Draft-length policy for suffix decoding: how many tokens to copy from an earlier match in the text."""

from speculative.drafting.budget import DraftBudget, OmittedCopies
from speculative.drafting.latency_curve import TIME_WEIGHT, LatencyTable, excess
from speculative.drafting.match_estimate import MatchEstimate
from speculative.drafting.policy import (
    LONGEST,
    AdaptiveDraftLength,
    Confidence,
    Costs,
    DraftLengthPolicy,
    describe_outcome,
    net_of_time,
)


class LookupDraftLength(DraftLengthPolicy):
    """Chooses the size of the next forward pass, and fills it with tokens of a match.

    Only for proposals that cost nothing and are not random: this policy sees them before it decides. The next token
    shows whether a declined proposal was right. Acceptance by length of the match is thus learned from the whole text,
    without probes. (To decline a random proposal after seeing it would change the output's distribution.)

    With p1, p2, ... the acceptance of the next token and of those after it, whose matches are longer, a forward pass
    over n tokens is worth

        1 + p1 + p1 p2 + ... + p1 ... p(n-1)  -  recent tokens per second x its seconds

    OpenVINO prepares a forward pass again if its number of tokens differs from the previous one's. This takes up to
    half of a plain pass's time. The size is changed only where that gains more than it costs (`PassWidth.plan`). Until
    then every pass has the same size, and tokens of a match that fit into it cost nothing.

    A `DraftBudget` bounds the loss of drafts. While it is spent, decoding is plain, and the omitted drafts are compared
    with the text. Drafting resumes once they would have saved time. A text without repetition is thus decoded plainly,
    almost from its start, however wrong the estimates are.
    """

    DECAY = 0.97  # decay of recent tokens and seconds per iteration
    BUDGET, MAX_BUDGET = 1.0, 8.0  # at first, and at most, in plain forward passes

    def __init__(self, costs: Costs):
        """Of `costs`, only the main model's seconds are used."""
        self.costs = costs
        self.pass_width = costs.pass_width()  # a decoder replaces it by its main model's
        self.reset()

    def reset(self, repeatable: bool = False) -> None:
        self._repeatable = repeatable
        self._verify = LatencyTable(self.costs.verify(), self.costs.main_change)
        self._passes = [1] * (LONGEST + 2)  # forward passes of each size
        self._plain_seconds = self._verify.seconds[1]  # of plain decoding, learned from that only
        self._acceptance = MatchEstimate()
        self._budget = DraftBudget(self.BUDGET, self.MAX_BUDGET)
        self._width = 1  # planned tokens of the next forward pass
        self._declined: float | None = None  # the confidence in this iteration's declined token
        self._declined_was_correct: bool | None = None
        self._omitted_copies = 0  # draft tokens in this iteration, if the budget allowed them
        self._omitted = OmittedCopies()
        self._tokens = self._seconds = 0.0  # recent ones
        self._all_iterations, self._all_seconds = 0, 0.0

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        """Whether to draft another token after `drafted` ones, with this `confidence` in it; None: there is none."""
        if not drafted:
            self._begin(confidence)
        if confidence is None:
            return False
        if drafted < self._width - 1:
            self._acceptance.draft(confidence())
            return True
        self._declined = confidence()
        return False

    def _begin(self, confidence: Confidence | None) -> None:
        """Start an iteration: plan its forward pass."""
        self._acceptance.begin()
        self._declined, self._declined_was_correct, self._omitted_copies = None, None, 0
        gains = self._acceptance.gains(confidence(), LONGEST) if confidence else [0.0] * LONGEST
        rate = self._rate()
        worth = net_of_time([0.0, *gains], rate, self._verify.seconds[1:])
        if self._budget.remaining(self._plain_cost()) > 0:
            self._width = self.pass_width.plan(worth, rate * self._verify.change)
        else:
            self._omitted_copies, self._width = worth.index(max(worth)), 1
            self.pass_width.plan_one()

    def observe_declined(self, was_correct: bool) -> None:
        """Record before `update` whether a declined proposal was the next token, unless a draft token was rejected."""
        self._declined_was_correct = was_correct

    def update(
        self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float, leaf: bool = False
    ) -> None:
        self._acceptance.update(drafted, accepted)
        if self._declined is not None and self._declined_was_correct is not None:
            self._acceptance.observe(self._declined, self._declined_was_correct)
        self._update_seconds(accepted + 1, draft_seconds + main_seconds)
        if drafted:
            self._omitted.forget()
        else:
            was_correct = bool(self._declined_was_correct)
            self._omitted.update(self._budget, self._omitted_copies, was_correct, self._plain_cost(), self._verify)
        self._declined, self._declined_was_correct, self._omitted_copies = None, None, 0

    def _update_seconds(self, tokens: int, seconds: float) -> None:
        """Record the seconds of an iteration that generated `tokens`."""
        least = self.pass_width.plain_size
        width, is_changed = min(max(self.pass_width.last, least), LONGEST + 1), self.pass_width.is_changed
        unavoidable = self._verify.change * (is_changed and self.pass_width.is_first)  # without a draft, too
        expected = self._verify.seconds[width] + self._verify.change * is_changed
        if self._repeatable:
            seconds = expected
        elif is_changed:
            self._verify.update_change(width, seconds, self._plain_cost())
        else:
            self._passes[width] += 1
            self._verify.update(width, seconds, max(TIME_WEIGHT, 1 / self._passes[width]))
            if width == least:
                self._plain_seconds *= 1 + TIME_WEIGHT * excess(seconds, self._plain_seconds)
            self._verify.seconds[1] = min(self._plain_seconds, self._verify.seconds[2])
        expected, seconds = expected - unavoidable, max(seconds - unavoidable, 0.0)
        is_plain = width == least and (not is_changed or self.pass_width.is_first)
        self._budget.update(
            self._plain_cost(), expected * (1 + excess(seconds, expected)), None if is_plain else tokens
        )
        self._tokens = self._tokens * self.DECAY + tokens
        self._seconds = self._seconds * self.DECAY + expected
        self._all_iterations += 1
        self._all_seconds += seconds

    def _plain_cost(self) -> float:
        """Seconds of a forward pass of plain decoding: its own timings, if there are many."""
        if self._passes[self.pass_width.plain_size] > AdaptiveDraftLength.MIN_PLAIN_SAMPLES:
            return self._plain_seconds
        return min(self._plain_seconds, self._verify.seconds[2])

    def _rate(self) -> float:
        """Tokens per second to beat: the recent rate, but at least that of plain decoding."""
        return max(1 / self._plain_cost(), self._tokens / self._seconds if self._seconds else 0.0)

    def describe(self) -> str:
        outcome = describe_outcome(
            self._acceptance.judged,
            self._acceptance.accepted,
            self._all_iterations,
            self._all_seconds,
            self._plain_cost(),
        )
        return (
            f"as many tokens of a match as are worth verifying: {outcome}; the main model takes "
            f"{self._plain_cost() * 1000:.1f} ms for one token, {self._verify.seconds[5] * 1000:.1f} ms for 5, and "
            f"{self._verify.change * 1000:.1f} ms more where the number changes"
        )
