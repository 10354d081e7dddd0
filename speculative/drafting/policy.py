"""Draft-length policies: how many tokens to draft before the main model verifies them.

A policy is asked before each draft token whether to draft another. It may use the tokens drafted so far, and every
draft token is verified. Stopping then depends on the past only, which keeps the output lossless.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from speculative.drafting.budget import DraftBudget
from speculative.drafting.latency_curve import excess
from speculative.sampling.params import SamplingParams

Confidence = Callable[[], float]
"""The draft's confidence in its last token, from 0 to 1; computed when called."""

LONGEST = 16  # most draft tokens per iteration, for adaptive policies
STEPS = np.arange(1, LONGEST + 1)


class DraftLengthPolicy(Protocol):
    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        """Whether to draft another token after `drafted` ones, the last of which had `confidence`."""

    def update(self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float) -> None:
        """Record the outcome of an iteration."""

    def reset(self, repeatable: bool = False) -> None:
        """Reset. With `repeatable`, decisions no longer depend on timings."""

    def describe(self) -> str:
        """What the policy does now, in one line."""


@dataclass
class FixedDraftLength:
    """Always K tokens."""

    k: int

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        return drafted < self.k

    def update(self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float) -> None: ...

    def reset(self, repeatable: bool = False) -> None: ...

    def describe(self) -> str:
        return f"always {self.k} draft tokens"


@dataclass
class ConfidenceDraftLength:
    """Drafts until the draft's confidence falls below `threshold` (GenAI's `assistant_confidence_threshold`)."""

    threshold: float
    longest: int = LONGEST

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        return drafted < self.longest and (confidence is None or drafted == 0 or confidence() >= self.threshold)

    def update(self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float) -> None: ...

    def reset(self, repeatable: bool = False) -> None: ...

    def describe(self) -> str:
        return f"up to {self.longest} draft tokens, until the draft's confidence falls below {self.threshold:g}"


@dataclass(frozen=True)
class Costs:
    """Measured seconds: of an iteration's first draft step, of a main forward pass over n tokens by n (1 included), and
    of a further draft step, with the draft's weights in the CPU caches (default: the same as the first)."""

    draft: float
    main: dict[int, float]
    draft_further: float | None = None

    def drafting(self) -> np.ndarray:
        """Seconds of 0, 1, ..., LONGEST draft steps."""
        further = self.draft if self.draft_further is None else self.draft_further
        return np.concatenate(([0.0], self.draft + further * np.arange(LONGEST)))

    def verify(self) -> np.ndarray:
        """Seconds of a main forward pass over 0, 1, ..., LONGEST + 1 tokens, interpolated between measured ones.

        More tokens never cost less: if they seem to, the smaller size was measured under load, and is lowered.
        """
        n = sorted(self.main)
        seconds = np.minimum.accumulate([self.main[i] for i in reversed(n)])[::-1]
        return np.interp(np.arange(LONGEST + 2), n, seconds)


def policy_from_params(params: SamplingParams) -> DraftLengthPolicy | None:
    """The policy that a request sets: a fixed length or a confidence threshold; None if it sets neither."""
    if params.num_assistant_tokens:
        return FixedDraftLength(params.num_assistant_tokens)
    if params.assistant_confidence_threshold:
        return ConfidenceDraftLength(params.assistant_confidence_threshold)
    return None


class AdaptiveDraftLength:
    """Keeps drafting while a further token is worth its cost; decodes plainly while drafting is not worth it.

    Speculation trades expected tokens for expected time (Leviathan et al. 2023, section 3.3 and theorem 3.8). One more
    token, or a few more, are drafted while

        expected additional tokens  >  best rate so far (tokens per second) x additional seconds to draft and verify

    which is the stopping rule that maximises tokens per second. The acceptance probability of a draft token is learned
    from the draft's confidence (as in Mamou et al. 2024, arXiv 2405.04304), with exponential decay. If not even a first
    token is worth its cost, decoding is plain, and a token is drafted periodically to probe whether that has changed.

    A `DraftBudget` bounds the loss against plain decoding, however wrong the estimates are.
    """

    BINS = 8  # of the draft's confidence
    FADE = 0.99  # decay of the statistics per verified draft token
    PRIOR = 4.0  # weight of the prior, in draft tokens
    PRIOR_ACCEPTANCE = 0.7
    PROBE_FIRST, PROBE_LAST = 8, 64  # plain iterations between probes; doubled after each unsuccessful one
    CLOCK = 0.1  # weight of the newest time: load, heat and longer contexts change the costs
    CLOCK_OTHERS = 0.02  # least weight for other numbers of tokens; more for near ones
    COMPARED = 64  # consecutive iterations with a draft after which one without times plain decoding
    SURE = 4  # plain iterations after which measured losses are trusted
    CLEAR_GAIN = 1.5  # speedup above which plain decoding is not timed

    def __init__(self, costs: Costs, prior_acceptance: float = PRIOR_ACCEPTANCE, budget: float = DraftBudget.START):
        """`prior_acceptance` is the prior of the acceptance rate; `budget` is the initial `DraftBudget`."""
        self.costs = costs
        self._prior_acceptance = prior_acceptance
        self._initial_budget = budget
        self.reset()

    def reset(self, repeatable: bool = False) -> None:
        self._repeatable = repeatable
        self._draft_cost = self.costs.drafting()
        self._verify_cost = self.costs.verify()
        self._accepted = np.zeros(self.BINS)
        self._judged = np.zeros(self.BINS)
        self._all_accepted, self._all_judged = self.PRIOR * self._prior_acceptance, self.PRIOR
        self._tokens = self._seconds = 0.0  # gained and spent, by the cost model
        self._plain = 0  # consecutive iterations without a draft
        self._probe_every = self.PROBE_FIRST
        self._bins: list[int] = []  # confidence bins of this iteration's draft tokens
        self._survival = 1.0  # probability that all of them are accepted
        self._gains = np.zeros(LONGEST)
        self._budget = DraftBudget(self._initial_budget)
        self._plain_seconds = float(self._verify_cost[1])  # of an iteration without a draft, learned from these only
        self._plain_seen = 0
        self._in_a_row = 0  # consecutive iterations with a draft
        self._is_comparing = False  # plain decoding is to be timed
        self._lately = np.zeros(2)  # tokens and seconds of iterations with a draft, with decay
        self._measured = Measured()

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        if drafted == 0 or confidence is None:
            self._bins, self._survival = [], 1.0
            self._gains = np.cumsum(self.acceptance() ** np.arange(1, LONGEST + 1))
            wanted = self._is_worth_it(0) or self._plain >= self._probe_every
            return wanted and self._budget.left(self._plain_cost()) > 0 and not self._is_to_compare()
        bin_ = min(int(confidence() * self.BINS), self.BINS - 1)
        self._bins.append(bin_)
        self._survival *= self._acceptance_of(bin_)
        return drafted < LONGEST and self._is_worth_it(drafted)

    def update(self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float) -> None:
        judged = self._bins[: min(drafted, accepted + 1)]
        for bin_, was_accepted in zip(judged, [True] * accepted + [False], strict=False):
            self._accepted *= self.FADE
            self._judged *= self.FADE
            self._accepted[bin_] += was_accepted
            self._judged[bin_] += 1
            self._all_accepted = self._all_accepted * self.FADE + was_accepted
            self._all_judged = self._all_judged * self.FADE + 1
        if not self._repeatable and not self._is_switch(drafted):
            distance = np.abs(np.arange(LONGEST + 2) - (drafted + 1))
            weight = np.maximum(self.CLOCK * 0.6**distance, self.CLOCK_OTHERS)
            self._verify_cost *= 1 + weight * excess(main_seconds, self._verify_cost[drafted + 1])
            # Fewer tokens never cost more: lowers sizes that were measured under load and have not been seen since.
            fewer = self._verify_cost[: drafted + 1]
            np.minimum(fewer, self._verify_cost[drafted + 1], out=fewer)
            if drafted:
                self._draft_cost *= 1 + self.CLOCK * excess(draft_seconds, self._draft_cost[drafted])
        self._tokens = self._tokens * self.FADE + accepted + 1
        self._seconds = self._seconds * self.FADE + self._draft_cost[drafted] + self._verify_cost[drafted + 1]
        if not drafted:
            self._plain += 1
        elif self._plain:  # this was a probe
            self._plain = self._probe_every if accepted == drafted else 0  # after a success, probe again at once
            self._probe_every = self.PROBE_FIRST if accepted == drafted else min(2 * self._probe_every, self.PROBE_LAST)
        expected = float(self._draft_cost[drafted] + self._verify_cost[drafted + 1])
        seconds = expected if self._repeatable else draft_seconds + main_seconds
        self._compare_with_plain(drafted, accepted, expected * (1 + excess(seconds, expected)))
        self._measured.add(min(drafted, accepted + 1), accepted, seconds)

    def _compare_with_plain(self, drafted: int, accepted: int, seconds: float) -> None:
        """Record what the iteration lost or saved against plain decoding. A switch counts as drafting."""
        is_switch = self._is_switch(drafted)
        if drafted:
            self._in_a_row += 1
            self._lately = self._lately * self.FADE + (accepted + 1, seconds)
        elif is_switch:
            self._in_a_row = 0
        else:
            self._plain_seen += 1
            weight = max(self.CLOCK, 1 / (self._plain_seen + 1))
            if not self._repeatable:
                self._plain_seconds *= 1 + weight * excess(seconds, self._plain_seconds)
                self._verify_cost[1] = self._plain_cost()
        self._is_comparing = is_switch and self._is_comparing
        self._budget.update(self._plain_cost(), seconds, accepted + 1 if drafted or is_switch else None)

    def _is_switch(self, drafted: int) -> bool:
        """Whether an iteration is the first plain one after drafting. OpenVINO prepares a forward pass again if it has
        another number of tokens than the one before, which takes up to half of a plain one's time: it is no measure of
        plain decoding, and would not be needed without drafts."""
        return not drafted and self._in_a_row > 0

    def _plain_cost(self) -> float:
        """Seconds of an iteration without a draft: as measured, but no more than one with more tokens."""
        return min(self._plain_seconds, float(self._verify_cost[2]))

    def _is_to_compare(self) -> bool:
        """Whether an iteration without a draft is due, to time it: only if the gain is not clear."""
        tokens, seconds = self._lately
        unsure = self._plain_seen < self.SURE and self._budget.is_low(self._plain_cost())
        due = self._in_a_row >= self.COMPARED and bool(tokens * self._plain_cost() < self.CLEAR_GAIN * seconds)
        self._is_comparing = self._is_comparing or unsure or due  # until one is measured that is no switch
        return self._is_comparing

    def acceptance(self) -> float:
        """The probability that the next draft token is accepted, given that those before it were."""
        return self._all_accepted / self._all_judged

    def _acceptance_of(self, bin_: int) -> float:
        return (self._accepted[bin_] + self.PRIOR * self.acceptance()) / (self._judged[bin_] + self.PRIOR)

    def _rate(self, drafted: int) -> float:
        """Tokens per second to beat: plain decoding for a first draft token, then the recent rate if that is higher.

        The recent rate is not the bar for a first token: not drafting would not reach it either.
        """
        plain = 1 / self._verify_cost[1]
        return max(plain, self._tokens / self._seconds) if drafted and self._seconds else plain

    def _is_worth_it(self, drafted: int) -> bool:
        """Whether one more draft token, or several, are worth their time."""
        left = LONGEST - drafted
        verify = self._verify_cost[drafted + 2 :] - self._verify_cost[drafted + 1]
        seconds = verify + self._draft_cost[drafted + 1 :] - self._draft_cost[drafted]
        return bool((self._survival * self._gains[:left] > self._rate(drafted) * seconds).any())

    def describe(self) -> str:
        tau = 1 + np.concatenate([[0], np.cumsum(self.acceptance() ** STEPS)])
        best = int((tau / (self._verify_cost[1:] + self._draft_cost)).argmax())
        one = self._plain_cost()
        costs = (
            f"a draft token takes {self._draft_cost[max(best, 1)] / max(best, 1) * 1000:.2f} ms, the main model "
            f"{one * 1000:.1f} ms for one token"
        )
        if best:
            costs += f" and {self._verify_cost[best + 1] * 1000:.1f} ms for {best + 1}"
        does = f"about {best} draft tokens" if best else "plain decoding, as drafting is not worth its cost"
        return f"{does}: {self._measured.text(one)}; {costs}"


@dataclass
class Measured:
    """Totals over all iterations since loading."""

    judged: int = 0  # draft tokens up to the first rejected one of each iteration
    accepted: int = 0
    iterations: int = 0
    seconds: float = 0.0

    def add(self, judged: int, accepted: int, seconds: float) -> None:
        self.judged += judged
        self.accepted += accepted
        self.iterations += 1
        self.seconds += seconds

    def text(self, plain_seconds: float) -> str:
        if not self.judged:
            return "no draft token verified yet"
        tokens = self.iterations + self.accepted
        return (
            f"per-token acceptance {self.accepted / self.judged:.2f} over {self.judged} draft tokens, "
            f"{tokens / self.iterations:.2f} tokens per forward pass, "
            f"speedup {tokens * plain_seconds / self.seconds:.2f}x over plain decoding"
        )
