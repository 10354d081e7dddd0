"""Draft-length policy for a batch: how many tokens to draft for each request verified in one forward pass.

Requests share the cost of drafting: a drafting round, which adds one token to each participating request, is one
forward pass of the draft model, and the main model's forward pass costs by its total number of tokens. With one
request, decoding is memory-bound and further tokens are nearly free; with many, every token costs, so drafting shrinks
to nothing by itself, and resumes as requests leave.
"""

from collections.abc import Sequence

import numpy as np

from speculative.drafting.budget import DraftBudget
from speculative.drafting.latency_curve import LatencyCurve, excess
from speculative.drafting.policy import LONGEST, STEPS, AdaptiveDraftLength


class DraftHistory:
    """Acceptance history of one request, by draft confidence, and the number of iterations since its last draft.

    `others`, the history of all requests, serves as prior.
    """

    BINS = AdaptiveDraftLength.BINS
    FADE = AdaptiveDraftLength.FADE
    PRIOR = AdaptiveDraftLength.PRIOR
    PRIOR_ACCEPTANCE = AdaptiveDraftLength.PRIOR_ACCEPTANCE
    PROBE_FIRST, PROBE_LAST = AdaptiveDraftLength.PROBE_FIRST, AdaptiveDraftLength.PROBE_LAST

    def __init__(self, others: "DraftHistory | None" = None):
        self._others = others
        self._accepted = np.zeros(self.BINS)
        self._judged = np.zeros(self.BINS)
        self._all_accepted = self._all_judged = 0.0
        self.judged = self.accepted = 0  # draft tokens up to the first rejection; without decay
        self._bins: list[int] = []  # confidence bins of this iteration's draft tokens
        self.survival = 1.0  # probability that all of them are accepted
        self.plain = 0  # consecutive iterations without a draft
        self._probe_every = self.PROBE_FIRST

    @property
    def drafted(self) -> int:
        """Draft tokens in this iteration."""
        return len(self._bins)

    @property
    def is_due(self) -> bool:
        """Whether a probe is due: there was no draft token for long."""
        return self.plain >= self._probe_every

    def acceptance(self) -> float:
        """The probability that the next draft token is accepted, given that those before it were."""
        prior = self._others.acceptance() if self._others else self.PRIOR_ACCEPTANCE
        return (self._all_accepted + self.PRIOR * prior) / (self._all_judged + self.PRIOR)

    def begin(self) -> None:
        """Start an iteration."""
        self._bins, self.survival = [], 1.0

    def draft(self, confidence: float) -> None:
        """Record a draft token and the draft's `confidence` in it, from 0 to 1."""
        self._bins.append(min(int(confidence * self.BINS), self.BINS - 1))
        self.survival *= self._acceptance_of(self._bins[-1])

    def update(self, accepted: int) -> None:
        """Record that `accepted` draft tokens of this iteration were accepted."""
        judged = list(zip(self._bins[: accepted + 1], [True] * accepted + [False], strict=False))
        for history in (self, self._others) if self._others else (self,):
            for bin_, was_accepted in judged:
                history._count(bin_, was_accepted)
        if not self._bins:
            self.plain += 1
        elif self.plain:  # this was a probe
            was_right = accepted == len(self._bins)
            self.plain = self._probe_every if was_right else 0  # after a success, probe again at once
            self._probe_every = self.PROBE_FIRST if was_right else min(2 * self._probe_every, self.PROBE_LAST)

    def _count(self, bin_: int, was_accepted: bool) -> None:
        self._accepted *= self.FADE
        self._judged *= self.FADE
        self._accepted[bin_] += was_accepted
        self._judged[bin_] += 1
        self.judged += 1
        self.accepted += was_accepted
        self._all_accepted = self._all_accepted * self.FADE + was_accepted
        self._all_judged = self._all_judged * self.FADE + 1

    def _acceptance_of(self, bin_: int) -> float:
        prior = self._others._acceptance_of(bin_) if self._others else self.acceptance()
        return (self._accepted[bin_] + self.PRIOR * prior) / (self._judged[bin_] + self.PRIOR)


class BatchDraftLength:
    """Drafts while the expected tokens are worth the expected time.

    `AdaptiveDraftLength` for the batch as a whole: a drafting round includes the requests, most promising first, that
    maximise

        expected additional tokens  -  rate to beat (tokens per second)  x  additional seconds to draft and verify

    provided it is above 0, looking one or several tokens ahead. The rate to beat is the best of drafting 0, 1, ...
    tokens for all requests alike, or the recently achieved rate if that is higher. A `DraftBudget` bounds the loss
    against plain decoding, however wrong the estimates are.
    """

    FADE = AdaptiveDraftLength.FADE
    UNASKED = 64  # iterations without any draft after which one token is drafted: costs change, too

    def __init__(self, main: LatencyCurve, draft: LatencyCurve, draft_further: LatencyCurve):
        """Latencies of forward passes: of the main model, of the draft model after the main model, and of the draft
        model after itself, when its weights are in the CPU caches."""
        self.main = main
        self.draft = draft
        self.draft_further = draft_further
        self._all = DraftHistory()
        self._rate = 0.0  # tokens per second to beat, in this iteration
        self._alike = 0.0  # best rate of drafting for all requests alike
        self._tokens = self._usual = 0.0  # recent tokens; and those of drafting for all alike in the same time
        self._seconds = 0.0  # of this iteration so far, by the cost model
        self._drafted = False  # in this iteration
        self._alone: tuple[int, float] | None = None  # its only drafting round: tokens, seconds / expected seconds
        self._plain = 0  # consecutive iterations without a draft
        self._budget = DraftBudget()
        self._texts = 0  # requests in this iteration
        self._forced = False  # requests with their own policy draft in this iteration: it is not evaluated
        self._without: float | None = None  # seconds that this iteration would take without a draft
        self._drafting = 0.0  # measured seconds of drafting in this iteration
        self._plain_seen = 0  # iterations without a draft
        self._plain_change = 1.0  # iterations without a draft: seconds taken / as measured at the start
        self._in_a_row = 0  # consecutive iterations with a draft
        self._lately = np.zeros(2)  # iterations with a draft: tokens, and those of plain decoding in the same time
        self._totals = np.zeros(4)  # requests in all iterations, tokens; both as in `_lately`, of all iterations

    def history(self) -> DraftHistory:
        """The history of a new request."""
        return DraftHistory(self._all)

    def begin(self, histories: Sequence[DraftHistory], texts: int) -> None:
        """Start an iteration with `texts` requests; this policy decides for those in `histories`."""
        self._seconds, self._drafted, self._alone = 0.0, False, None
        self._texts, self._without, self._drafting, self._forced = texts, None, 0.0, False
        acceptance = np.array([history.acceptance() for history in histories])
        n, K = len(histories), np.arange(LONGEST + 1)
        gained = texts + np.concatenate([[0], np.cumsum(acceptance[:, None] ** STEPS, axis=1).sum(axis=0)])
        drafting = np.minimum(K, 1) * self.draft(n) + np.maximum(K - 1, 0) * self._further(n)
        rates = gained / (self.main(texts + n * K) + drafting)
        self._alike = float(rates.max())
        self._rate = self._alike * max(1.0, self._tokens / self._usual if self._usual else 1.0)

    def choose(self, histories: Sequence[DraftHistory], tokens: int, anyway: int) -> list[int]:
        """The indices of the `histories` to draft another token for.

        The main model's next forward pass already has `tokens` tokens; `anyway` requests draft a token in any case.
        """
        self._forced = self._forced or anyway > 0
        if self._without is None:
            self._without = self._without_draft(tokens)
        if not histories or (self._is_to_compare() and not self._drafted):
            return []
        if self._budget.left(self._plain_change) <= 0:
            return []
        return self._wanted(histories, tokens, anyway)

    def _wanted(self, histories: Sequence[DraftHistory], tokens: int, anyway: int) -> list[int]:
        survival = np.array([history.survival for history in histories])
        acceptance = np.array([history.acceptance() for history in histories])
        chosen = self._worth(survival, acceptance, tokens, anyway)
        first = not any(history.drafted for history in histories)
        due = [i for i, history in enumerate(histories) if first and history.is_due and i not in chosen]
        if due:  # probe requests whose acceptance is believed to be poor, unless the batch is too full for any draft
            hoped = np.maximum(acceptance[due], DraftHistory.PRIOR_ACCEPTANCE)
            chosen += [due[i] for i in self._worth(survival[due], hoped, tokens + len(chosen), anyway + len(chosen))]
        if first and not chosen and not anyway and self._plain >= self.UNASKED:
            return [min(range(len(histories)), key=lambda i: histories[i].plain)]  # the fewest tokens to catch up
        return chosen

    def update_draft(self, tokens: int, seconds: float) -> None:
        """Record a drafting round that computed `tokens` tokens in `seconds`."""
        curve = self.draft_further if self._drafted else self.draft
        expected = curve(tokens)
        self._alone = None if self._drafted or not expected else (tokens, seconds / expected)
        self._drafted = True
        self._drafting += seconds
        self._seconds += expected
        curve.update(tokens, seconds)

    def update_main(self, verified: int, prompts: int, gained: int, seconds: float) -> None:
        """Record a main forward pass over `verified` tokens and `prompts` prompt tokens that gave `gained` tokens."""
        self._plain = 0 if self._drafted else self._plain + 1
        if self._alone:  # no further round was measured: scale its cost like the first round's
            tokens, ratio = self._alone
            self.draft_further.update(tokens, self.draft_further(tokens) * ratio)
        if verified:
            self._seconds += self.main(verified)
            self._tokens = self._tokens * self.FADE + gained
            self._usual = self._usual * self.FADE + self._alike * self._seconds
            self._compare_with_plain(verified + prompts, gained, self._drafting + seconds)
        self.main.update(verified + prompts, seconds)

    def _without_draft(self, tokens: int) -> float:
        """Seconds of a forward pass over `tokens` tokens without a draft: as measured, capped by the learned curve."""
        return min(self._plain_change * self.main.measured(tokens), float(self.main(tokens)))

    def _compare_with_plain(self, tokens: int, gained: int, seconds: float) -> None:
        """Record what the iteration lost or saved against plain decoding."""
        if not self._texts or self._forced:
            return
        if not self._drafted:
            self._in_a_row = 0
            self._plain_seen += 1
            expected = self._plain_change * self.main.measured(tokens)
            weight = max(AdaptiveDraftLength.CLOCK, 1 / (self._plain_seen + 1))
            self._plain_change *= 1 + weight * excess(seconds, expected)
            self._totals += (self._texts, gained, 1, 1)
            self._budget.update(self._plain_change, self._plain_change)
            return
        assert self._without is not None  # `choose` comes before every draft
        worth = gained / self._texts
        self._totals += (self._texts, gained, worth, seconds / self._without)
        # An outlier, such as the first forward pass of a size, which compiles its kernels, counts as twice as long.
        taken = min(seconds, 2 * self._seconds) / self._without
        self._in_a_row += 1
        self._lately = self._lately * self.FADE + (worth, taken)
        self._budget.update(self._plain_change, taken * self._plain_change, worth)

    def _is_to_compare(self) -> bool:
        """Whether an iteration without a draft is due, to time it: only if the gain is not clear."""
        worth, taken = self._lately
        if self._plain_seen < AdaptiveDraftLength.SURE and self._budget.is_low(self._plain_change):
            return True
        return self._in_a_row >= AdaptiveDraftLength.COMPARED and bool(worth < AdaptiveDraftLength.CLEAR_GAIN * taken)

    def _further(self, n: np.ndarray | int) -> np.ndarray:
        """Seconds of a further drafting round: never more than a first one."""
        return np.minimum(self.draft(n), self.draft_further(n))

    def _worth(self, survival: np.ndarray, acceptance: np.ndarray, tokens: int, anyway: int) -> list[int]:
        order = np.argsort(-survival * acceptance, kind="stable")
        gains = survival[order, None] * np.cumsum(acceptance[order, None] ** STEPS, axis=1)  # [texts, steps]
        n = np.arange(1, len(order) + 1)[:, None]
        further = self._further(anyway + n) - self._further(anyway)
        next_ = further if self._drafted else self.draft(anyway + n) - self.draft(anyway)
        seconds = next_ + (STEPS - 1) * further
        seconds = seconds + self.main(tokens + n * STEPS) - self.main(tokens)
        net = gains.cumsum(axis=0) - self._rate * seconds
        texts, _ = np.unravel_index(net.argmax(), net.shape)
        return order[: texts + 1].tolist() if net.max() > 0 else []

    def describe(self) -> str:
        """What the policy does and has achieved, in one line."""
        one, many = self.main(1) * 1000, self.main(16) * 1000
        return (
            f"adaptive draft length for the batch: {self._came_to()}; a first draft token takes "
            f"{self.draft(1) * 1000:.2f} ms, a further one {self.draft_further(1) * 1000:.2f} ms, the main model "
            f"{one:.1f} ms for one token, {many:.1f} ms for 16"
        )

    def _came_to(self) -> str:
        if not self._all.judged:
            return "no draft token verified yet"
        texts, gained, worth, taken = self._totals
        shown = f"per-token acceptance {self._all.accepted / self._all.judged:.2f} over {self._all.judged} draft tokens"
        if texts:
            shown += f", {gained / texts:.2f} tokens per request and forward pass"
            shown += f", speedup {worth / taken:.2f}x over plain decoding"
        return shown
