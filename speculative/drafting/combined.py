"""Two sources of draft tokens at once: suffix decoding and a draft model, each of which continues the other's draft.

A token copied from a match costs nothing to draft, but there is not always a match, and short ones are often wrong. So
each draft token comes from the source with the higher gain, by learned acceptance and measured costs. The source is
chosen before the draft model samples, from past tokens only, so the output stays lossless.
"""

from itertools import accumulate
from typing import TypeAlias

import numpy as np

from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.budget import OmittedCopies
from speculative.drafting.match_estimate import MatchEstimate
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs, describe_outcome, net_of_time
from speculative.drafting.proposers import DraftModelProposer, Transform
from speculative.drafting.suffix import SuffixProposer
from speculative.models.pass_width import PassWidth
from speculative.sampling.proposal import Proposal

TRUSTED = 0.7  # confidence from which a token is copied, if the draft length does not depend on acceptance and costs


class CombinedProposer:
    """Suffix decoding and a draft model."""

    def __init__(self, suffix: SuffixProposer, model: DraftModelProposer):
        self.suffix = suffix
        self.draft_model = model

    @property
    def model(self) -> object:
        """The draft model."""
        return self.draft_model.model

    def can_use_model(self, tokens: np.ndarray, copied: bool) -> bool:
        """Whether the draft model can propose the token after `tokens` (int64 [n]), some of which are `copied`."""
        return (not copied or self.draft_model.continues_copies) and self.draft_model.draft_ids(tokens) is not None

    def match(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        """The token to copy after `tokens` (int64 [n]), None without a match. It depends on `tokens` only."""
        return self.suffix.propose(tokens, transform, random)

    @staticmethod
    def is_trusted(match: Proposal | None) -> bool:
        """Whether to copy a token, if the draft length does not depend on acceptance and costs."""
        return match is not None and match.confidence() >= TRUSTED

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        match = self.match(tokens, transform, random)
        return match if self.is_trusted(match) else self.draft_model.propose(tokens, transform, random)

    def reset(self) -> None:
        self.suffix.reset()
        self.draft_model.reset()


class CombinedEstimate:
    """Acceptance of the draft tokens of both sources; to draft-length policies it is an `AcceptanceEstimate`."""

    def __init__(self, draft: AcceptanceEstimate, matches: MatchEstimate):
        self.draft_estimate = draft
        self.match_estimate = matches
        self._recent_judged = draft.PRIOR  # draft tokens, with decay
        self._recent_accepted = draft.PRIOR * draft.mean()
        self.judged = self.accepted = 0  # draft tokens up to the first rejected one of each iteration
        self.begin()

    def begin(self) -> None:
        """Start an iteration."""
        self.draft_estimate.begin()
        self.match_estimate.begin()
        self.copied: list[bool] = []  # whether each draft token is a copy
        self.match: Proposal | None = None  # the token that may be copied next
        self.can_use_model = True  # for the next token
        self.copies = False  # whether the next token is to be copied
        self._declined: list[tuple[int, Proposal]] = []  # tokens that were not copied, with their places in the draft

    @property
    def drafted(self) -> int:
        """Draft tokens in this iteration."""
        return len(self.copied)

    @property
    def steps(self) -> int:
        """Forward passes of the draft model in this iteration."""
        return self.copied.count(False)

    @property
    def drafted_acceptance(self) -> list[float]:
        """The acceptance of each draft token, if those before it are accepted."""
        of_draft, of_matches = (
            iter(estimate.drafted_acceptance) for estimate in (self.draft_estimate, self.match_estimate)
        )
        return [next(of_matches if copied else of_draft) for copied in self.copied]

    @property
    def survival(self) -> float:
        """The probability that all draft tokens are accepted."""
        return self.draft_estimate.survival * self.match_estimate.survival

    @property
    def is_due(self) -> bool:
        """Whether a probe of the draft model is due."""
        return self.can_use_model and self.draft_estimate.is_due

    @property
    def plain(self) -> int:
        """Consecutive iterations in which no token of the draft model was judged."""
        return self.draft_estimate.plain

    def set_next(self, match: Proposal | None, can_use_model: bool) -> None:
        """Record what may be drafted next: the token of `match`, one of the draft model, or either."""
        self.match, self.can_use_model = match, can_use_model

    def prefers_copy(self, step_worth: float, further: float = 0.0) -> bool:
        """Whether the match is worth more than the draft model's token, whose forward pass costs as much time as
        `step_worth` tokens. `further` tokens are expected after an accepted one, from either source."""
        if not self.match or not self.can_use_model:
            return self.match is not None
        advantage = self.draft_estimate.mean() - self.match_estimate.acceptance_of(self.match.confidence())
        return advantage * (self.survival + further) <= step_worth

    def draft(self, proposal: Proposal, copied: bool) -> None:
        """Record a draft token and its source."""
        if self.match and not copied:
            self._declined.append((self.drafted, self.match))
        (self.match_estimate if copied else self.draft_estimate).draft(proposal.confidence())
        self.copied.append(copied)
        self.match, self.copies = None, False

    def observe(self, tokens: list[int]) -> None:
        """Record, before `update`, the iteration's `tokens`, which show whether the declined copies were right."""
        declined = [*self._declined, *([(self.drafted, self.match)] if self.match else [])]
        for position, match in declined:
            if position < len(tokens):
                self.match_estimate.observe(match.confidence(), tokens[position] == match.token)

    def update(self, drafted: int, accepted: int) -> None:
        """Record an iteration's outcome: of `drafted` draft tokens, the first `accepted` ones were accepted."""
        judged = min(drafted, accepted + 1)
        for estimate, copies in ((self.draft_estimate, False), (self.match_estimate, True)):
            positions = [position for position in range(judged) if self.copied[position] == copies]
            estimate.update(len(positions), sum(position < accepted for position in positions))
        for position in range(judged):
            self._recent_judged = self._recent_judged * self.draft_estimate.DECAY + 1
            self._recent_accepted = self._recent_accepted * self.draft_estimate.DECAY + (position < accepted)
        self.judged += judged
        self.accepted += accepted

    def mean(self) -> float:
        """The probability that the next token of the draft model is accepted."""
        return self.draft_estimate.mean()

    def gains(self, longest: int) -> list[float]:
        """The expected tokens from the next 1, 2, ..., `longest` draft tokens if the first one is the draft model's and
        the others come from either source."""
        first, either = self.draft_estimate.mean(), self._recent_accepted / self._recent_judged
        return list(accumulate(first * either**further for further in range(longest)))

    def next(self) -> float:
        """The probability that the next draft token is accepted."""
        return self.match_estimate.acceptance_of(self.match.confidence()) if self.match and self.copies else self.mean()

    def describe(self) -> str:
        """The measured acceptance of each source, in a few words."""
        draft = self.draft_estimate.describe() if self.draft_estimate.judged else "not used yet"
        copies = self.match_estimate.describe() if self.match_estimate.judged else "none yet"
        return f"draft model: {draft}; copies: {copies}"


Estimate: TypeAlias = AcceptanceEstimate | CombinedEstimate


class CombinedDraftLength(AdaptiveDraftLength):
    """Chooses the size of the next forward pass, and the source of each draft token in it.

    The size is planned by the source that is worth more, and filled with tokens of a match, as in `LookupDraftLength`:
    where the draft model is not worth its time, drafts are those of suffix decoding alone. With p1, p2, ... the
    probabilities that the next tokens are accepted, the draft model is worth its time if, for some number n of tokens,

        survival x (p1 + p1 p2 + ... + p1 ... pn)  >  tokens per second x seconds to draft and verify n tokens

    where those that fit into the planned pass take no time to verify. If there is a match as well, it is copied unless

        (p of the draft model - p of the copy) x (survival + further tokens)  >  tokens per second x seconds of its step

    as whatever follows an accepted token follows from either source. If `has_leaves`, the plan includes leaves beside
    the draft model's tokens; copies after these take the place of leaves only if they are worth more. The rest is as in
    `AdaptiveDraftLength`: probes of the draft model, and a bound on the loss.
    """

    PRIOR_ACCEPTANCE = 0.5  # of the draft model's tokens: a wrong one may keep many right ones from being copied
    pass_width: PassWidth
    _acceptance: CombinedEstimate  # type: ignore[assignment]

    def __init__(self, costs: Costs):
        super().__init__(costs, self.PRIOR_ACCEPTANCE)
        self.pass_width = costs.pass_width()  # a decoder replaces it by its main model's

    def reset(self, repeatable: bool = False) -> None:
        super().reset(repeatable)
        self._omitted = OmittedCopies()
        self._omitted_copies = 0  # copies in this iteration that the budget did not allow
        self._was_correct = False  # whether the first of them was the next token

    def _new_estimate(self) -> CombinedEstimate:  # type: ignore[override]
        return CombinedEstimate(super()._new_estimate(), MatchEstimate())

    @property
    def estimate(self) -> CombinedEstimate:
        """The acceptance estimate of both sources."""
        return self._acceptance

    def begin(self) -> None:
        """Start an iteration."""
        self._acceptance.begin()
        self._step_seconds = []
        self._omitted_copies, self._was_correct = 0, False

    def copies_next(self, match: Proposal | None, can_use_model: bool = True) -> bool | None:
        """Whether to copy the token of `match` next, or ask the draft model (False). None: stop drafting."""
        estimate = self._acceptance
        estimate.set_next(match, can_use_model)
        drafted = estimate.drafted
        if not drafted and not self._plan_width(match, can_use_model):
            return None
        if drafted >= LONGEST - self._recomputed:
            return None
        free = self._width - 1 - self._recomputed - drafted
        model_value = max(self._model_value(self._rate(drafted))) if can_use_model else 0.0
        if (
            match
            and free > 0
            and self._copies_beat_leaves(match, free)
            and (model_value <= 0 or self._prefers_copy(match, free, model_value))
        ):
            return True
        if model_value > 0:
            return False
        return False if not drafted and estimate.is_due else None

    def draft(self, proposal: Proposal, copied: bool) -> None:
        """Record a draft token and its source."""
        self._acceptance.draft(proposal, copied)

    def observe(self, tokens: list[int]) -> None:
        """Record, before `update`, the iteration's tokens."""
        match = self._acceptance.match
        self._was_correct = bool(self._omitted_copies and match and tokens[0] == match.token)
        self._acceptance.observe(tokens)

    def update(
        self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float, leaf: bool = False
    ) -> None:
        super().update(drafted, accepted, draft_seconds, main_seconds, leaf)
        if drafted:
            self._omitted.forget()
        else:
            self._omitted.update(
                self._budget, self._omitted_copies, self._was_correct, self._plain_cost(), self._verify
            )

    def _plan_width(self, match: Proposal | None, can_use_model: bool) -> bool:
        """Plan the size of the next forward pass. Returns whether anything may be drafted."""
        rate, copies = self._rate(1), self._copies_value(match, LONGEST) if match else [0.0] * LONGEST
        if not self._may_draft():
            if self._budget.remaining(self._plain_cost()) <= 0:
                worth = net_of_time([0.0, *copies], rate, self._verify.seconds[1:])
                self._omitted_copies = worth.index(max(worth))
            return False
        self._gains = self._acceptance.gains(LONGEST)
        if can_use_model:
            self._plan_tree(net_of_time(self._gains, rate, self._drafting.seconds[1:]), copies)
        else:
            self._plan_pass(copies)
        return True

    def _prefers_copy(self, match: Proposal, free: int, model_value: float) -> bool:
        """Whether to copy the token of `match` although the draft model is worth `model_value`; `free` tokens fit into
        the planned pass."""
        steps = self._acceptance.steps
        step = self._drafting.seconds[steps + 1] - self._drafting.seconds[steps]
        further = max(model_value, self._copies_value(match, free)[-1])
        return self._acceptance.prefers_copy(self._rate(1) * step, further)

    def _copies_beat_leaves(self, match: Proposal, free: int) -> bool:
        """Whether copies of `match` are worth more than the leaves whose places they take; `free` tokens fit into the
        planned pass."""
        drafted, steps = self._acceptance.drafted, self._acceptance.steps
        all_leaves = self._leaves_value(drafted, steps)
        return any(
            copies > all_leaves - self._leaves_value(drafted + n, steps)
            for n, copies in enumerate(self._copies_value(match, free), 1)
        )

    def _copies_value(self, match: Proposal, longest: int) -> list[float]:
        """Value of 1, 2, ..., `longest` more draft tokens if they are copied, in tokens."""
        survival = self._acceptance.survival
        return [survival * gain for gain in self._acceptance.match_estimate.gains(match.confidence(), longest)]

    def _model_value(self, rate: float) -> list[float]:
        """Value of 1, 2, ..., LONGEST draft tokens in all, of which the next is the draft model's, in tokens, less that
        of the time to draft them and to verify those that do not fit into the planned pass, at `rate` tokens per
        second; one fewer if an accepted leaf is computed again."""
        drafted, steps, survival = self._acceptance.drafted, self._acceptance.steps, self._acceptance.survival
        passes, seconds = self._passes[drafted + 1 + self._recomputed :], self._drafting.seconds[steps:]
        before = self._leaves_value(drafted, steps) - rate * (passes[0] + seconds[0])
        return [
            survival * gain + self._leaves_value(drafted + n, steps + n) - rate * (passes[n] + seconds[n]) - before
            for n, gain in enumerate(self._gains[: len(passes) - 1], 1)
        ]

    def _draft_steps(self, drafted: int) -> int:
        return self._acceptance.steps

    def describe(self) -> str:
        one = self._plain_cost()
        estimate = self._acceptance
        outcome = describe_outcome(
            estimate.judged, estimate.accepted, self._iterations, self._all_seconds, one, self._accepted_leaves
        )
        return (
            f"draft model and suffix decoding: {outcome}; {estimate.describe()}; a draft step takes "
            f"{self._drafting.seconds[1] * 1000:.2f} ms, the main model {one * 1000:.1f} ms for one token"
        )
