"""Two sources of draft tokens at once: suffix decoding and a draft model, each of which continues the other's draft.

A token copied from a match costs nothing to draft, but there is not always a match, and short ones are often wrong. So
every draft token has the source that is worth more, by learned acceptance and measured costs. That choice is made
before the draft model samples, from the tokens so far; it depends on the past only, and the output stays lossless.
"""

from typing import TypeAlias

import numpy as np

from speculative.drafting.acceptance import AcceptanceEstimate, MatchEstimate
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs
from speculative.drafting.proposers import DraftModelProposer, Transform
from speculative.drafting.suffix import SuffixProposer
from speculative.models.eagle3_batch import HeadSlot
from speculative.models.eagle3_head import EagleHead
from speculative.sampling.proposal import Proposal

TRUSTED = 0.7  # confidence from which a token is copied, if the draft length does not depend on acceptance and costs


class CombinedProposer:
    """Suffix decoding and a draft model. By itself it copies a token if the confidence in it is at least `TRUSTED`."""

    def __init__(self, suffix: SuffixProposer, model: DraftModelProposer):
        self.suffix = suffix
        self.draft_model = model

    @property
    def model(self) -> object:
        """The draft model."""
        return self.draft_model.model

    @property
    def continues_copies(self) -> bool:
        """Whether the draft model drafts after copied tokens. An EAGLE-3 head would need a forward pass for each."""
        return not isinstance(self.draft_model.model, (EagleHead, HeadSlot))

    def match(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        """The token to copy after `tokens` (int64 [n]), None without a match. It depends on `tokens` only."""
        return self.suffix.propose(tokens, transform, random)

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        match = self.match(tokens, transform, random)
        if match and match.confidence() >= TRUSTED:
            return match
        return self.draft_model.propose(tokens, transform, random)

    def reset(self) -> None:
        self.suffix.reset()
        self.draft_model.reset()


class CombinedEstimate:
    """Acceptance of the draft tokens of both sources; to draft-length policies it is an `AcceptanceEstimate`."""

    def __init__(self, draft: AcceptanceEstimate, matches: MatchEstimate, continues_copies: bool = True):
        self.of_draft = draft
        self.of_matches = matches
        self.continues_copies = continues_copies
        self.judged = self.accepted = 0  # draft tokens up to the first rejected one of each iteration
        self.begin()

    def begin(self) -> None:
        """Start an iteration."""
        self.of_draft.begin()
        self.of_matches.begin()
        self.copied: list[bool] = []  # whether each draft token is a copy
        self.match: Proposal | None = None  # the token that may be copied next
        self.copies = False  # whether it is to be
        self._declined: list[tuple[int, Proposal]] = []  # tokens that were not copied, with their places in the draft

    @property
    def drafted(self) -> int:
        """Draft tokens in this iteration."""
        return len(self.copied)

    @property
    def survival(self) -> float:
        """The probability that all draft tokens are accepted."""
        return self.of_draft.survival * self.of_matches.survival

    @property
    def is_due(self) -> bool:
        """Whether a probe of the draft model is due."""
        return self.of_draft.is_due

    @property
    def plain(self) -> int:
        """Consecutive iterations without a token of the draft model."""
        return self.of_draft.plain

    @property
    def can_use_model(self) -> bool:
        """Whether the draft model may propose the next token."""
        return self.continues_copies or not any(self.copied)

    def foresee(self, match: Proposal | None, step_worth: float = 0.0) -> None:
        """Record the token that may be copied next. It `copies` if that is worth more than a token of the draft model,
        which costs as much time as `step_worth` tokens."""
        self.match = match
        of_model = self.of_draft.mean() - step_worth if self.can_use_model else 0.0
        self.copies = match is not None and self.of_matches.of(match.confidence()) >= of_model

    def draft(self, proposal: Proposal, copied: bool) -> None:
        """Record a draft token and its source."""
        if self.match and not copied:
            self._declined.append((self.drafted, self.match))
        (self.of_matches if copied else self.of_draft).draft(proposal.confidence())
        self.copied.append(copied)
        self.match, self.copies = None, False

    def see(self, tokens: list[int]) -> None:
        """Record, before `update`, the iteration's `tokens`, which show whether the declined copies were right."""
        declined = [*self._declined, *([(self.drafted, self.match)] if self.match else [])]
        for place, match in declined:
            if place < len(tokens):
                self.of_matches.see(match.confidence(), tokens[place] == match.token)

    def update(self, drafted: int, accepted: int) -> None:
        """Record an iteration's outcome: of `drafted` draft tokens, the first `accepted` ones were accepted."""
        judged = min(drafted, accepted + 1)
        for estimate, copies in ((self.of_draft, False), (self.of_matches, True)):
            places = [place for place in range(judged) if self.copied[place] == copies]
            estimate.update(len(places), sum(place < accepted for place in places))
        self.judged += judged
        self.accepted += accepted

    def mean(self) -> float:
        """The probability that the next token of the draft model is accepted."""
        return self.of_draft.mean()

    def next(self) -> float:
        """The probability that the next draft token is accepted."""
        return self.of_matches.of(self.match.confidence()) if self.match and self.copies else self.mean()

    def describe(self) -> str:
        """The measured acceptance of each source, in a few words."""
        return f"draft model: {self.of_draft.describe()}; copies: {self.of_matches.describe()}"


Estimate: TypeAlias = AcceptanceEstimate | CombinedEstimate


class CombinedDraftLength(AdaptiveDraftLength):
    """Chooses the source of each draft token, and stops when neither is worth its cost.

    With the tokens per second so far as the price of time, a source is worth, for the best number n of tokens,

        survival x (p1 + p1 p2 + ... + p1 ... pn)  -  tokens per second x seconds to draft and verify n tokens

    where copies take no time to draft. The rest is as in `AdaptiveDraftLength`: probes, and a bound on the loss.
    """

    MARGIN = 1.3  # copies must be worth more than their cost by this factor
    _acceptance: CombinedEstimate  # type: ignore[assignment]

    def __init__(self, costs: Costs, continues_copies: bool = True):
        self._continues_copies = continues_copies
        super().__init__(costs)

    def reset(self, repeatable: bool = False) -> None:
        super().reset(repeatable)
        of_draft = AcceptanceEstimate(self._prior_acceptance, prior_fades=True)
        self._acceptance = CombinedEstimate(of_draft, MatchEstimate(), self._continues_copies)

    def copies_next(self, drafted: int, match: Proposal | None) -> bool | None:
        """Whether to copy the token of `match` after `drafted` draft tokens, or ask the draft model (False). None: stop
        drafting."""
        estimate = self._acceptance
        if not drafted:
            estimate.begin()
            self._gains = np.cumsum(estimate.of_draft.ahead(LONGEST))
        estimate.foresee(match)
        if drafted >= LONGEST:
            return None
        if not drafted and (self._budget.left(self._plain_cost()) <= 0 or self._is_to_compare()):
            return None
        sources = [copies for copies in (True, False) if (match if copies else estimate.can_use_model)]
        plans = {copies: self._plan(copies, drafted) for copies in sources}
        rate = self._rate(drafted)
        worth = [copies for copies, (tokens, seconds) in plans.items() if (tokens > rate * seconds).any()]
        if match and len(worth) == 2:
            steps, rate = self._draft_steps(drafted), self._rate(1)
            further = max(float((tokens - rate * seconds).max()) for tokens, seconds in plans.values())
            step = rate * float(self._drafting.seconds[steps + 1] - self._drafting.seconds[steps])
            less = estimate.of_draft.mean() - estimate.of_matches.of(match.confidence())
            return less * (estimate.survival + max(further, 0.0)) < step
        if worth:
            return worth[0]
        return False if not drafted and estimate.is_due else None

    @property
    def estimate(self) -> CombinedEstimate:
        """What is known about the acceptance of both sources."""
        return self._acceptance

    def draft(self, proposal: Proposal, copied: bool) -> None:
        """Record a draft token and its source."""
        self._acceptance.draft(proposal, copied)

    def see(self, tokens: list[int]) -> None:
        """Record, before `update`, the iteration's tokens."""
        self._acceptance.see(tokens)

    def _plan(self, copies: bool, drafted: int) -> tuple[np.ndarray, np.ndarray]:
        """The expected tokens and seconds of drafting 1, 2, ... more tokens from a source, float64 [LONGEST - drafted]
        each."""
        left, match = LONGEST - drafted, self._acceptance.match
        seconds = self._verify.seconds[drafted + 2 :] - self._verify.seconds[drafted + 1]
        if copies:
            assert match
            gains = self._acceptance.of_matches.ahead_of(match.confidence(), left).cumsum() / self.MARGIN
        else:
            steps = self._draft_steps(drafted)
            seconds = seconds + self._drafting.seconds[steps + 1 : steps + left + 1] - self._drafting.seconds[steps]
            gains = self._gains[:left]
        return self._acceptance.survival * gains, seconds

    def _draft_steps(self, drafted: int) -> int:
        return self._acceptance.copied.count(False)

    def describe(self) -> str:
        return f"{super().describe()}; {self._acceptance.of_matches.describe()} copied from matches"
