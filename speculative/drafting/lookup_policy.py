"""Draft-length policy for prompt lookup: how many tokens to copy from an earlier match in the text."""

import numpy as np

from speculative.drafting.latency_curve import CLOCK, LatencyTable, excess
from speculative.drafting.policy import LONGEST, Confidence, Costs, describe_outcome
from speculative.drafting.suffix import LEVELS


class LookupDraftLength:
    """Drafts the tokens of a match while verifying them is expected to save clearly more time than it takes.

    Only for proposals that cost nothing and are not random: this policy sees them before it decides. If it declines
    one, the next token shows whether it was right. Acceptance by length of the match is thus learned from the whole
    text, and needs no probes. (To decline a random proposal after seeing it would change the output's distribution.)

    With p1, p2, ... the acceptance of the next token and of those after it, whose matches are longer, a token is
    drafted if, for some number of tokens,

        survival x (p1 + p1 p2 + ...)  >  MARGIN x recent tokens per second x additional seconds to verify them

    OpenVINO prepares a forward pass again if its number of tokens differs from the one before, which takes up to half
    of a plain one's time. So the first draft after plain decoding is charged with the way back, too, and the first
    plain forward pass after a draft is no measure of plain decoding.

    The balance is what drafts have saved or lost lately. While it is negative, nothing is drafted, and the drafts that
    would have been made are followed in the text: once they would have saved time, drafting resumes. So a text that
    repeats nothing is decoded plainly, almost from its start, however wrong the estimates are.
    """

    PRIOR = 8.0  # weight of a prior, in draft tokens
    FADE = 0.99  # decay of recent tokens and seconds per iteration, and of the statistics per judged token
    MARGIN = 1.3  # expectations must exceed costs by this factor
    SPREAD = 0.6  # weight of a forward pass's time for one of a token more or less
    SWITCH = 0.3  # until measured: additional time of a forward pass of another size, in plain forward passes
    BALANCE, LEAST, MOST = 0.5, -2.0, 4.0  # at first, and its bounds, in plain forward passes

    def __init__(self, costs: Costs):
        """`costs` gives the main model's seconds; those of a draft are not used."""
        self.costs = costs
        self.reset()

    def reset(self, repeatable: bool = False) -> None:
        self._repeatable = repeatable
        seconds = self.costs.verify()
        self._switch = self.SWITCH * float(seconds[1])  # additional seconds of a plain forward pass after a draft
        seconds[2:] += self._switch
        self._verify = LatencyTable(seconds, self.SPREAD)
        self._judged = np.full(len(LEVELS), self.PRIOR)  # by confidence
        self._accepted = self.PRIOR * LEVELS
        self._bins: list[int] = []  # of the proposals in this iteration, a declined one included
        self._declined_was_right: bool | None = None  # in this iteration
        self._wanted = 0  # draft tokens in this iteration, if the balance allows them
        self._balance = self.BALANCE
        self._shadow_wanted, self._shadow_right = 0, 0  # tokens of a draft that the balance did not allow
        self._was_plain = True  # the last iteration
        self._tokens = self._seconds = 0.0  # recent ones
        self._all_iterations, self._all_seconds, self._all_judged, self._all_accepted = 0, 0.0, 0, 0

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        """Whether to draft another token after `drafted` ones; `confidence` is that in the token to draft."""
        assert confidence is not None
        if not drafted:
            self._bins = []
        acceptance = self._accepted / self._judged
        survival = acceptance[self._bins].prod()
        bin_ = int(np.searchsorted(LEVELS, confidence(), side="right")) - 1
        self._bins.append(bin_)
        if drafted == LONGEST:
            return False
        longer = np.minimum(bin_ + np.arange(LONGEST - drafted), max(bin_, len(LEVELS) - 2))
        gains = survival * np.cumsum(np.cumprod(acceptance[longer]))
        seconds = self._verify.seconds[drafted + 2 :] - self._verify.seconds[drafted + 1]
        if self._was_plain and not drafted:
            seconds = seconds + self._switch
        net = gains - self.MARGIN * self._rate() * seconds
        if net.max() <= 0:
            return False
        if not drafted:
            self._wanted = int(net.argmax()) + 1
        return self._balance > 0

    def learn_declined(self, was_right: bool) -> None:
        """Record, before `update`, whether the declined proposal was the next token. Not if a draft token before it
        was rejected."""
        self._declined_was_right = was_right

    def update(self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float) -> None:
        judged = [True] * accepted + [False] * (accepted < drafted)
        self._all_judged += len(judged)
        self._all_accepted += accepted
        if self._declined_was_right is not None:
            judged.append(self._declined_was_right)
        for bin_, was_right in zip(self._bins, judged, strict=False):
            self._judged[bin_] = self._judged[bin_] * self.FADE + 1
            self._accepted[bin_] = self._accepted[bin_] * self.FADE + was_right
        if drafted:
            self._shadow_wanted = self._shadow_right = 0
        else:
            self._follow_shadow(bool(self._declined_was_right))
        self._learn_seconds(drafted, accepted, draft_seconds + main_seconds)
        self._bins, self._wanted, self._declined_was_right = [], 0, None

    def _follow_shadow(self, was_right: bool) -> None:
        """Record whether the next token of a draft that the balance did not allow was right. At its end, settle it."""
        self._shadow_wanted = self._shadow_wanted or self._wanted
        if not self._shadow_wanted:
            return
        self._shadow_right += was_right
        if not was_right or self._shadow_right == self._shadow_wanted:
            self._settle(self._shadow_right + 1, float(self._verify.seconds[self._shadow_wanted + 1]) + self._switch)
            self._shadow_wanted = self._shadow_right = 0

    def _settle(self, tokens: int, seconds: float) -> None:
        """Add to the balance what an iteration of `tokens` tokens saved against plain decoding."""
        self._balance = min(max(self._balance + tokens - seconds / self._plain(), self.LEAST), self.MOST)

    def _learn_seconds(self, drafted: int, accepted: int, seconds: float) -> None:
        is_way_back = not drafted and not self._was_plain
        expected = float(self._verify.seconds[drafted + 1]) + self._switch * is_way_back
        if self._repeatable:
            seconds = expected
        elif is_way_back:
            more = min(max(seconds - self._plain(), 0.0), self._plain())
            self._switch += CLOCK * (more - self._switch)
        else:
            self._verify.update(drafted + 1, seconds)
        if drafted or is_way_back:
            self._settle(accepted + 1, expected * (1 + excess(seconds, expected)))
        self._tokens = self._tokens * self.FADE + accepted + 1
        self._seconds = self._seconds * self.FADE + expected
        self._was_plain = not drafted
        self._all_iterations += 1
        self._all_seconds += seconds

    def _plain(self) -> float:
        """Seconds of a forward pass of plain decoding."""
        return float(self._verify.seconds[1])

    def _rate(self) -> float:
        """Tokens per second to beat: the recent ones, but at least those of plain decoding."""
        return max(1 / self._plain(), self._tokens / self._seconds if self._seconds else 0.0)

    def describe(self) -> str:
        outcome = describe_outcome(
            self._all_judged, self._all_accepted, self._all_iterations, self._all_seconds, self._plain()
        )
        return (
            f"as many tokens of a match as are worth verifying: {outcome}; the main model takes "
            f"{self._plain() * 1000:.1f} ms for one token, {self._verify.seconds[5] * 1000:.1f} ms for 5"
        )
