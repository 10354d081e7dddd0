"""How many tokens to draft before the main model checks them.

A rule is asked before each draft token whether to draft one more. It may look at the tokens drafted so far, and a token
once drafted is always verified: stopping is then a function of the past alone, which leaves the result unbiased.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Confidence = Callable[[], float]
"""How sure the draft was of its last token, from 0 to 1; computed when called."""

LONGEST = 16  # draft tokens in an iteration, for the rules that choose


class DraftLength(Protocol):
    def more(self, drafted: int, confidence: Confidence | None) -> bool:
        """Draft one more, behind `drafted` ones of which the last had `confidence`?"""

    def learn(self, drafted: int, accepted: int) -> None:
        """Tell the outcome of an iteration."""

    def forget(self) -> None:
        """Start as if new, for results that can be repeated."""

    def why(self) -> str:
        """What the rule does now, in one line."""


@dataclass
class FixedDraftLength:
    """Always K tokens."""

    k: int

    def more(self, drafted: int, confidence: Confidence | None) -> bool:
        return drafted < self.k

    def learn(self, drafted: int, accepted: int) -> None: ...

    def forget(self) -> None: ...

    def why(self) -> str:
        return f"always {self.k} draft tokens"


@dataclass
class ConfidenceDraftLength:
    """Tokens until the draft is less sure than `threshold` of one (GenAI's `assistant_confidence_threshold`)."""

    threshold: float
    longest: int = LONGEST

    def more(self, drafted: int, confidence: Confidence | None) -> bool:
        return drafted < self.longest and (drafted == 0 or confidence() >= self.threshold)

    def learn(self, drafted: int, accepted: int) -> None: ...

    def forget(self) -> None: ...

    def why(self) -> str:
        return f"up to {self.longest} draft tokens, until the draft is less sure than {self.threshold}"


@dataclass(frozen=True)
class Costs:
    """Measured seconds: of one draft step, and of one main inference on n tokens by n (some n from 1 on)."""

    draft: float
    main: dict[int, float]

    def verify(self) -> np.ndarray:
        """Seconds of one main inference on 0, 1, ..., LONGEST + 1 tokens; between the measured ones, interpolated."""
        n = sorted(self.main)
        return np.interp(np.arange(LONGEST + 2), n, [self.main[i] for i in n])


class AdaptiveDraftLength:
    """As many tokens as another one is expected to pay for; none while drafting does not pay.

    Speculation is a race of expected tokens against expected time (Leviathan et al. 2023, section 3.3 and theorem 3.8).
    One more token, or a few more, are drafted while

        tokens they are expected to add  >  best rate so far (tokens a second) x seconds they add to draft and verify

    which is the stopping rule that maximises tokens per second. The chance that a draft token is accepted is learnt
    from how sure the draft is of it (as in Mamou et al. 2024, arXiv 2405.04304), old outcomes fading. Where not even a
    first token pays, decoding is plain, and a token is drafted now and then to see whether that has changed.
    """

    BINS = 8  # of the draft's confidence
    FADE = 0.98  # of what was learnt, with each draft token judged
    PRIOR = 4.0  # judged tokens that the first guess counts for
    PRIOR_ACCEPTANCE = 0.7
    PROBE_FIRST, PROBE_LAST = 8, 64  # plain iterations between two probes; doubled after each that did not pay

    def __init__(self, costs: Costs):
        self._costs = costs
        self._verify = costs.verify()
        self.forget()

    def forget(self) -> None:
        self._accepted = np.zeros(self.BINS)
        self._judged = np.zeros(self.BINS)
        self._all_accepted = self._all_judged = 0.0
        self._tokens = self._seconds = 0.0  # gained and spent, by the model of costs
        self._plain = 0  # iterations without a draft in a row
        self._probe_every = self.PROBE_FIRST
        self._bins: list[int] = []  # of the tokens drafted in this iteration
        self._survival = 1.0  # the chance that all of them are accepted

    def more(self, drafted: int, confidence: Confidence | None) -> bool:
        if drafted == 0:
            self._bins, self._survival = [], 1.0
            return self._pays(0) or self._plain >= self._probe_every
        bin_ = min(int(confidence() * self.BINS), self.BINS - 1)
        self._bins.append(bin_)
        self._survival *= self._acceptance_of(bin_)
        return drafted < LONGEST and self._pays(drafted)

    def learn(self, drafted: int, accepted: int) -> None:
        for bin_, was_accepted in zip(self._bins[: accepted + 1], [True] * accepted + [False], strict=False):
            self._accepted *= self.FADE
            self._judged *= self.FADE
            self._accepted[bin_] += was_accepted
            self._judged[bin_] += 1
            self._all_accepted = self._all_accepted * self.FADE + was_accepted
            self._all_judged = self._all_judged * self.FADE + 1
        self._tokens = self._tokens * self.FADE + accepted + 1
        self._seconds = self._seconds * self.FADE + drafted * self._costs.draft + self._verify[drafted + 1]
        if not drafted:
            self._plain += 1
        elif self._plain:  # this was a probe
            self._plain = self._probe_every if accepted == drafted else 0  # a success is tried again at once
            self._probe_every = self.PROBE_FIRST if accepted == drafted else min(2 * self._probe_every, self.PROBE_LAST)

    def acceptance(self) -> float:
        """The chance that the next draft token is accepted if those before it were."""
        return (self._all_accepted + self.PRIOR * self.PRIOR_ACCEPTANCE) / (self._all_judged + self.PRIOR)

    def _acceptance_of(self, bin_: int) -> float:
        return (self._accepted[bin_] + self.PRIOR * self.acceptance()) / (self._judged[bin_] + self.PRIOR)

    def _rate(self) -> float:
        """Tokens a second to beat: what was reached lately, and plain decoding at least."""
        plain = 1 / self._verify[1]
        return max(plain, self._tokens / self._seconds) if self._seconds else plain

    def _pays(self, drafted: int) -> bool:
        """Whether one more token, or any number more, gains more than its time is worth."""
        more = np.arange(1, LONGEST - drafted + 1)
        gained = self._survival * np.cumsum(self.acceptance() ** more)
        seconds = more * self._costs.draft + self._verify[drafted + 1 + more] - self._verify[drafted + 1]
        return bool((gained > self._rate() * seconds).any())

    def why(self) -> str:
        draft, one = self._costs.draft * 1000, self._verify[1] * 1000
        alpha = self.acceptance()
        k = np.arange(LONGEST + 1)
        tau = np.cumsum(alpha**k)
        speedup = tau * self._verify[1] / (self._verify[k + 1] + k * self._costs.draft)
        best = int(speedup.argmax())
        facts = (
            f"a draft token takes {draft:.2f} ms and is accepted with {alpha:.2f}, "
            f"the main model takes {one:.1f} ms for one token and {self._verify[best + 1] * 1000:.1f} ms for {best + 1}"
        )
        if best == 0:
            return f"plain decoding, as drafting does not pay: {facts}"
        return f"about {best} draft tokens, expected {speedup[best]:.2f}x plain decoding: {facts}"
