"""How many tokens to draft for each of several texts that are verified in one inference.

Texts share what drafting costs: a round of drafting, in which one token is drafted for each text that takes part, is
one inference of the draft model, and the main model's inference costs by the tokens in it, whosever they are. With
one text, weights are read for a few tokens and more are nearly free; with many, every token costs, and drafting
shrinks to nothing by itself, and comes back as texts leave.
"""

from collections.abc import Sequence

import numpy as np

from speculative.drafting.budget import DraftBudget
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import LONGEST, STEPS, AdaptiveDraftLength


class DraftHistory:
    """How often the draft was right in one text, by how sure it was, and how long it has not been asked.

    What is not known of this text is taken from `others`, the history of all.
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
        self.judged = self.accepted = 0  # not fading
        self._bins: list[int] = []  # of the tokens drafted in this iteration
        self.survival = 1.0  # the chance that all of them are accepted
        self.plain = 0  # iterations without a draft in a row
        self._probe_every = self.PROBE_FIRST

    @property
    def drafted(self) -> int:
        """Tokens in this iteration."""
        return len(self._bins)

    @property
    def is_due(self) -> bool:
        """Whether a draft token would tell something new: there was none for long."""
        return self.plain >= self._probe_every

    def acceptance(self) -> float:
        """The chance that the next draft token is accepted if those before it were."""
        prior = self._others.acceptance() if self._others else self.PRIOR_ACCEPTANCE
        return (self._all_accepted + self.PRIOR * prior) / (self._all_judged + self.PRIOR)

    def begin(self) -> None:
        """An iteration begins."""
        self._bins, self.survival = [], 1.0

    def draft(self, confidence: float) -> None:
        """A token was drafted, and the draft was so sure of it, from 0 to 1."""
        self._bins.append(min(int(confidence * self.BINS), self.BINS - 1))
        self.survival *= self._acceptance_of(self._bins[-1])

    def learn(self, accepted: int) -> None:
        """So many of the tokens drafted in this iteration were accepted."""
        judged = list(zip(self._bins[: accepted + 1], [True] * accepted + [False], strict=False))
        for history in (self, self._others) if self._others else (self,):
            for bin_, was_accepted in judged:
                history._count(bin_, was_accepted)
        if not self._bins:
            self.plain += 1
        elif self.plain:  # this was a probe
            was_right = accepted == len(self._bins)
            self.plain = self._probe_every if was_right else 0  # a success is tried again at once
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
    """Drafts as long as the tokens expected of it are worth the seconds expected for it.

    The rule of `AdaptiveDraftLength`, for the batch as a whole: of all texts those take part in a round of drafting,
    the most promising first, for which

        tokens they are expected to add  -  rate to beat (tokens a second)  x  seconds they add to draft and verify

    is largest and above 0, for one more token of each or several. The rate to beat is the best of drafting 0, 1, ...
    tokens for all alike or, if that is more, what was reached lately. A `DraftBudget` bounds what drafting loses
    against plain decoding, however wrong the model of costs and chances is.
    """

    FADE = AdaptiveDraftLength.FADE
    UNASKED = 64  # iterations without any draft after which one token is drafted: costs change, too

    def __init__(self, main: LatencyCurve, draft: LatencyCurve, draft_further: LatencyCurve):
        """What inferences cost: of the main model, of the draft model behind it, and of the draft model behind itself,
        when it is in the processor's caches."""
        self.main = main
        self.draft = draft
        self.draft_further = draft_further
        self._all = DraftHistory()
        self._rate = 0.0  # tokens a second to beat, in this iteration
        self._alike = 0.0  # the best of drafting for all alike
        self._tokens = self._usual = 0.0  # gained lately; and by drafting for all alike in the same time
        self._seconds = 0.0  # of this iteration so far, by the model of costs
        self._drafted = False  # in this iteration
        self._alone: tuple[int, float] | None = None  # its only round of drafting: tokens, seconds / expected seconds
        self._plain = 0  # iterations in a row in which nothing was drafted
        self._budget = DraftBudget()
        self._texts = 0  # in this iteration
        self._forced = False  # in this iteration, texts with a rule of their own draft, too: nothing to judge this by
        self._without: float | None = None  # seconds that this iteration would take without a draft
        self._drafting = 0.0  # seconds of drafting in this iteration, by the clock
        self._plain_seen = 0  # iterations without a draft
        self._plain_change = 1.0  # iterations without a draft: seconds taken / as measured at the start
        self._in_a_row = 0  # iterations with a draft
        self._lately = np.zeros(2)  # tokens gained by iterations with a draft, and those that plain decoding had gained
        self._totals = np.zeros(4)  # texts in all iterations, tokens gained; both as in `_lately`, of all iterations

    def history(self) -> DraftHistory:
        """That of a new text."""
        return DraftHistory(self._all)

    def begin(self, histories: Sequence[DraftHistory], texts: int) -> None:
        """An iteration begins with `texts` texts; for those of `histories` this rule decides."""
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
        """For which of `histories` (their places) to draft one more token.

        `tokens` are in the main model's next inference already; for `anyway` texts a token is drafted in any case.
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
        if due:  # where the draft is thought to be poor; where the batch is what forbids it, there is nothing to see
            hoped = np.maximum(acceptance[due], DraftHistory.PRIOR_ACCEPTANCE)
            chosen += [due[i] for i in self._worth(survival[due], hoped, tokens + len(chosen), anyway + len(chosen))]
        if first and not chosen and not anyway and self._plain >= self.UNASKED:
            return [min(range(len(histories)), key=lambda i: histories[i].plain)]  # which has the least to read
        return chosen

    def learn_draft(self, tokens: int, seconds: float) -> None:
        """A round of drafting computed so many tokens in so long."""
        curve = self.draft_further if self._drafted else self.draft
        expected = curve(tokens)
        self._alone = None if self._drafted or not expected else (tokens, seconds / expected)
        self._drafted = True
        self._drafting += seconds
        self._seconds += expected
        curve.learn(tokens, seconds)

    def learn_main(self, verified: int, prompts: int, gained: int, seconds: float) -> None:
        """The main model's inference took so long, for so many tokens of texts and of prompts, and gained so many."""
        self._plain = 0 if self._drafted else self._plain + 1
        if self._alone:  # what further rounds take was not seen: as much more or less as the first did
            tokens, ratio = self._alone
            self.draft_further.learn(tokens, self.draft_further(tokens) * ratio)
        if verified:
            self._seconds += self.main(verified)
            self._tokens = self._tokens * self.FADE + gained
            self._usual = self._usual * self.FADE + self._alike * self._seconds
            self._compare_with_plain(verified + prompts, gained, self._drafting + seconds)
        self.main.learn(verified + prompts, seconds)

    def _without_draft(self, tokens: int) -> float:
        """Seconds of an inference on so many tokens, none of them drafted: as measured, but never more than learnt."""
        return min(self._plain_change * self.main.measured(tokens), float(self.main(tokens)))

    def _compare_with_plain(self, tokens: int, gained: int, seconds: float) -> None:
        """What the iteration lost or saved against plain decoding."""
        if not self._texts or self._forced:
            return
        if not self._drafted:
            self._in_a_row = 0
            self._plain_seen += 1
            ratio = seconds / (self._plain_change * self.main.measured(tokens))
            weight = max(AdaptiveDraftLength.CLOCK, 1 / (self._plain_seen + 1))
            self._plain_change *= 1 + weight * (min(max(ratio, 0.5), 2.0) - 1)
            self._totals += (self._texts, gained, 1, 1)
            self._budget.learn(self._plain_change, self._plain_change)
            return
        taken, worth = seconds / self._without, gained / self._texts
        self._totals += (self._texts, gained, worth, taken)
        hiccup = max(1.0, seconds / (2 * self._seconds))  # the first inference of a size compiles its kernels
        taken /= hiccup
        self._in_a_row += 1
        self._lately = self._lately * self.FADE + (worth, taken)
        self._budget.learn(self._plain_change, taken * self._plain_change, worth)

    def _is_to_compare(self) -> bool:
        """Whether an iteration without a draft is due, to see what that takes: where the gain is not clear."""
        worth, taken = self._lately
        if (
            self._plain_seen < AdaptiveDraftLength.SURE
            and self._budget.left(self._plain_change) < DraftBudget.START / 2
        ):
            return True
        return self._in_a_row >= AdaptiveDraftLength.COMPARED and worth < AdaptiveDraftLength.CLEAR_GAIN * taken

    def _further(self, n: np.ndarray | int) -> np.ndarray:
        """Seconds of a further round: never more than of a first one."""
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

    def why(self) -> str:
        """What the rule does, and what it came to, in one line."""
        one, many = self.main(1) * 1000, self.main(16) * 1000
        return (
            f"as many draft tokens as pay in the batch: {self._came_to()}; a first draft token takes "
            f"{self.draft(1) * 1000:.2f} ms, a further one {self.draft_further(1) * 1000:.2f} ms, the main model "
            f"{one:.1f} ms for one token, {many:.1f} ms for 16"
        )

    def _came_to(self) -> str:
        if not self._all.judged:
            return "no draft token was judged yet"
        texts, gained, worth, taken = self._totals
        shown = f"{self._all.accepted / self._all.judged:.2f} of {self._all.judged} judged draft tokens accepted"
        if texts:
            shown += f", {gained / texts:.2f} tokens of a text an inference"
            shown += f", {worth / taken:.2f}x plain decoding by the clock"
        return shown
