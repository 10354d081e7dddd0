"""Draft-length policy for a batch: how many tokens to draft for each request verified in one forward pass.

Requests share the cost of drafting. A drafting round is one forward pass of the draft model and adds one token to each
participating request. The cost of the main model's forward pass depends on its total number of tokens. With one
request, decoding is memory-bound and further tokens are nearly free. With many, every token takes time. Drafting then
decreases to zero, and resumes as requests leave.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import add, mul
from typing import NamedTuple

from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.budget import ComparisonSchedule, DraftBudget
from speculative.drafting.combined import CombinedEstimate, Estimate
from speculative.drafting.latency_curve import TIME_WEIGHT, LatencyCurve, excess
from speculative.drafting.match_estimate import MatchEstimate
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength
from speculative.models.paged_model import rounded_up
from speculative.models.pass_width import PassWidth

MAX_PADDED = 64  # tokens of the widest forward pass that is padded to the size of another one
SIZES = [n for n in range(1, MAX_PADDED + 1) if rounded_up(n) == n]  # of forward passes


class Comparison:
    """Drafting compared with plain decoding, in batches of one number of requests: their costs are measured less
    closely than those of one request, and whether drafting helps differs from one number to another."""

    def __init__(self, plain_change: float = 1.0):
        self.budget = DraftBudget()
        self.plain_seen = 0  # iterations without a draft
        self.plain_change = plain_change  # iterations without a draft: seconds taken / as measured at the start
        self.schedule = ComparisonSchedule()
        self.recent_worth = self.recent_taken = 0.0  # of iterations with a draft, see `observe_drafted`

    @property
    def remaining(self) -> float:
        """The budget left, in plain iterations."""
        return self.budget.remaining(self.plain_change)

    @property
    def is_due(self) -> bool:
        """Whether to time an iteration without a draft now: only if the gain is not clear."""
        if self.plain_seen < AdaptiveDraftLength.MIN_PLAIN_SAMPLES and self.budget.is_low(self.plain_change):
            return True
        return self.schedule.is_due and self.recent_worth < AdaptiveDraftLength.CLEAR_GAIN * self.recent_taken

    def observe_plain(self, seconds: float, measured: float) -> None:
        """Learn from an iteration without a draft, which took `measured` seconds when costs were measured."""
        self.schedule.observe_plain()
        self.plain_seen += 1
        weight = max(TIME_WEIGHT, 1 / (self.plain_seen + 1))
        self.plain_change *= 1 + weight * excess(seconds, self.plain_change * measured)

    def observe_drafted(self, worth: float, taken: float) -> None:
        """Record an iteration with a draft: its tokens per request (`worth`), and its time in plain iterations
        (`taken`)."""
        self.schedule.observe_drafted()
        self.recent_worth = self.recent_worth * AdaptiveDraftLength.DECAY + worth
        self.recent_taken = self.recent_taken * AdaptiveDraftLength.DECAY + taken
        self.budget.update(self.plain_change, taken * self.plain_change, worth)


class _Candidate(NamedTuple):
    """A request that may draft another token."""

    survival: float  # the probability that its draft so far is accepted
    acceptance: float  # of the next token, if that is so
    uses_model: bool  # whether the draft model proposes it


class BatchDraftLength:
    """Drafts while the expected tokens are worth the expected time.

    `AdaptiveDraftLength` for the batch as a whole: a drafting round includes the requests, most promising first, that
    maximize

        expected additional tokens  -  rate to beat (tokens per second)  x  additional seconds to draft and verify

    if it is above 0, one or several tokens ahead. The rate to beat is the best of drafting 0, 1, ... tokens for all
    requests alike, or the recent rate if that is higher. A `DraftBudget` bounds the loss against plain decoding,
    however wrong the estimates are. OpenVINO compiles kernels in the first forward pass of a
    size; drafting needs many sizes, plain decoding one. As that time is spent only once, it is not judged.

    A forward pass of another size than the last takes longer, so its size is planned, and draft tokens that fit into it
    take no time to verify.
    """

    DECAY = AdaptiveDraftLength.DECAY
    PROBE_AFTER = 64  # iterations without any draft after which one token is drafted: costs change, too

    def __init__(self, main: LatencyCurve, draft: LatencyCurve, draft_further: LatencyCurve, main_change: float = 0.0):
        """Latencies of forward passes: of the main model, of the draft model after the main model, and of the draft
        model after itself (its weights are in the CPU caches). `main_change`: additional seconds of a forward pass of
        the main model of another size than the last."""
        self.main = main
        self.draft = draft
        self.draft_further = draft_further
        self.main_change = main_change
        self.pass_width = PassWidth(main.between(0, MAX_PADDED), main_change)
        # seconds of the planned forward pass, by the tokens that it needs; and more of one that needs others
        self._planned_seconds: list[float] = []
        self._unplanned_change = 0.0
        self._all = AcceptanceEstimate()
        self._matches = MatchEstimate()  # acceptance of copied tokens, if there is a draft model, too
        self._rate = 0.0  # tokens per second to beat, in this iteration
        self._uniform_rate = 0.0  # best rate of drafting for all requests alike
        self._tokens = self._uniform_tokens = 0.0  # recent tokens; and those of drafting for all alike in the same time
        self._seconds = 0.0  # of this iteration so far, by the cost model
        # in this iteration, of a first and a further drafting round for 0, 1, ... requests
        self._first_seconds = self._further_seconds = [0.0]
        self._drafted = False  # whether a token was drafted in this iteration
        self._computed = False  # whether the draft model has run in this iteration
        self._only_round: tuple[int, float] | None = None  # its only drafting round: tokens, seconds / expected seconds
        self._main_sizes: set[int] = set()  # of the forward passes so far, padding included
        self._draft_sizes: set[int] = set()
        self._compiles = False  # whether a forward pass of this iteration is the first one of its size
        self._plain = 0  # consecutive iterations without a draft
        self._comparisons: dict[int, Comparison] = {}
        self._comparison = Comparison()  # of this iteration
        self._num_requests = 0  # requests in this iteration
        self._forced = False  # requests with their own policy draft in this iteration: it is not evaluated
        self._plain_seconds = 0.0  # seconds that this iteration would take without a draft; 0: not computed yet
        self._drafting = 0.0  # measured seconds of drafting in this iteration
        # of all iterations: requests, tokens; tokens per request, time in plain iterations
        self._totals = [0.0, 0.0, 0.0, 0.0]

    def estimate(self, combined: bool = False) -> Estimate:
        """The estimate for a new request, `combined` for two sources; its prior is pooled over all requests."""
        estimate = AcceptanceEstimate(pool=self._all)
        return CombinedEstimate(estimate, MatchEstimate(pool=self._matches)) if combined else estimate

    def begin(self, estimates: Sequence[Estimate], num_requests: int) -> None:
        """Start an iteration with `num_requests` requests; this policy decides for those in `estimates`."""
        self._seconds, self._drafted, self._computed, self._only_round = 0.0, False, False, None
        self._num_requests, self._plain_seconds, self._drafting, self._forced = num_requests, 0.0, 0.0, False
        self._compiles = False
        self._comparison = self._comparisons.setdefault(num_requests, Comparison(self._comparison.plain_change))
        n = len(estimates)
        self._first_seconds = self.draft.between(0, max(num_requests, n))
        further = self.draft_further.between(0, max(num_requests, n))
        self._further_seconds = list(map(min, self._first_seconds, further))
        gained, drafting = float(num_requests), 0.0
        self._uniform_rate = gained / self.main(num_requests)
        for step, chances in enumerate(zip(*(_powers(estimate.mean()) for estimate in estimates), strict=True)):
            gained += sum(chances)
            drafting += self._further_seconds[n] if step else self._first_seconds[n]
            seconds = self.main(num_requests + n * (step + 1)) + drafting
            self._uniform_rate = max(self._uniform_rate, gained / seconds)
        self._rate = self._uniform_rate * max(1.0, self._tokens / self._uniform_tokens if self._uniform_tokens else 1.0)

    @property
    def step_worth(self) -> float:
        """Cost of the next forward pass of the draft model, in tokens of each request in it."""
        return self._rate * self.round_cost(self._num_requests) / max(self._num_requests, 1)

    @property
    def round_cost(self) -> LatencyCurve:
        """Seconds of the draft model's next forward pass in this iteration."""
        return self.draft_further if self._computed else self.draft

    def choose(self, estimates: Sequence[Estimate], tokens: int, model_users: int, forced: bool = False) -> list[int]:
        """The indices of the `estimates` to draft another token for.

        The main model's next forward pass already has `tokens` tokens. `model_users` requests use the draft model in
        any case. `forced`: some requests with their own policy draft, by copying or by the draft model."""
        self._forced = self._forced or forced or model_users > 0
        is_first_round = not self._plain_seconds
        if is_first_round:
            self._plain_seconds = self._plain_pass_seconds(tokens)
            self._planned_seconds, self._unplanned_change = [], 0.0
        if not estimates:
            return []
        is_due = self._comparison.is_due and not self._drafted and not self._forced  # a forced draft cannot be compared
        if is_due or self._comparison.remaining <= 0:
            if is_first_round:
                self.pass_width.plan_one()
            return []
        if is_first_round and tokens <= MAX_PADDED:
            self._plan_pass([estimate.mean() for estimate in estimates], tokens)
        return self._requests_to_draft(estimates, tokens, model_users)

    def _plan_pass(self, acceptance: Sequence[float], tokens: int) -> None:
        """Plan the size of the main model's next forward pass. It has `tokens` tokens, and draft tokens for requests
        that are accepted with the probabilities `acceptance`."""
        chances = [chance for each in acceptance for chance in _powers(each)]  # of each request's 1st, 2nd, ... token
        # the most promising first
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True) if tokens < MAX_PADDED else []
        gain, gains = 0.0, [0.0]  # expected gain of the first 0, 1, ... draft tokens
        rounds = [0] * LONGEST  # draft tokens that have the same drafting round
        for i in order[: MAX_PADDED - tokens]:
            step = i % LONGEST
            before, seconds = rounds[step], self._further_seconds if step else self._first_seconds
            rounds[step] += 1
            gain += chances[i] - self._rate * (seconds[before + 1] - seconds[before])
            gains.append(gain)
        most = list(accumulate(gains, max))  # of those that fit
        main = self.main.between(0, MAX_PADDED)
        worth = [-inf] * MAX_PADDED
        for size in SIZES:
            drafted = min(max(size - tokens, 0), len(most) - 1)
            worth[size - 1] = most[drafted] - self._rate * main[max(size, tokens)]
        if self.pass_width.plan(worth, self._rate * self.main_change) > tokens:
            self._planned_seconds, self._unplanned_change = self.pass_width.seconds_of_planned(main, self.main_change)

    def _pass_seconds(self, start: int, end: int) -> list[float]:
        """Seconds of the main model's next forward pass, if it needs `start`, `start` + 1, ... `end` tokens."""
        seconds = [of_size + self._unplanned_change for of_size in self.main.between(start, end)]
        planned = self._planned_seconds[start : end + 1]
        seconds[: len(planned)] = planned
        return seconds

    def _requests_to_draft(self, estimates: Sequence[Estimate], tokens: int, model_users: int) -> list[int]:
        candidates = [_Candidate(one.survival, one.next(), not one.copies) for one in estimates]
        chosen = self._best_requests(candidates, tokens, model_users)
        first = not any(estimate.drafted for estimate in estimates)
        due = [i for i, estimate in enumerate(estimates) if first and estimate.is_due and i not in chosen]
        if due:  # probe requests whose acceptance is believed to be poor, unless the batch is too full for any draft
            for i in due:
                estimates[i].copies = False  # the draft model is probed
            prior = AcceptanceEstimate.PRIOR_ACCEPTANCE
            probed = [_Candidate(estimates[i].survival, max(estimates[i].next(), prior), True) for i in due]
            others = model_users + sum(candidates[i].uses_model for i in chosen)
            more = self._best_requests(probed, tokens + len(chosen), others)
            chosen += [due[i] for i in more]
        is_due = first and not chosen and not model_users and self._plain >= self.PROBE_AFTER
        if is_due and (can_probe := [i for i, estimate in enumerate(estimates) if estimate.can_use_model]):
            probe = min(can_probe, key=lambda i: estimates[i].plain)  # the fewest tokens to catch up
            estimates[probe].copies = False
            return [probe]
        return chosen

    def update_draft(self, tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        """Record a drafting round: `tokens` tokens in `seconds`, after a search for matches in `search_seconds`."""
        curve = self.round_cost
        expected = curve(tokens)
        compiles = _is_new(rounded_up(tokens), self._draft_sizes)
        self._compiles = self._compiles or compiles
        self._only_round = None if self._computed or not expected or compiles else (tokens, seconds / expected)
        self._drafted, self._computed = True, self._computed or tokens > 0
        self._drafting += seconds + search_seconds
        self._seconds += expected
        if not compiles:
            curve.update(tokens, seconds)

    def update_main(self, verified: int, prompts: int, gained: int, seconds: float) -> None:
        """Record a main forward pass over `verified` and `prompts` prompt tokens that generated `gained` tokens."""
        size, changed = self.pass_width.last or rounded_up(verified + prompts), self.pass_width.is_changed
        compiles = _is_new(size, self._main_sizes)
        self._compiles = self._compiles or compiles
        self._plain = 0 if self._drafted else self._plain + 1
        if self._only_round:  # no further round was measured: scale its cost like the first round's
            tokens, ratio = self._only_round
            self.draft_further.update(tokens, self.draft_further(tokens) * ratio)
            self._only_round = None
        if verified:
            self._seconds += self.main(verified) if prompts else self.main(size) + self.main_change * changed
            self._tokens = self._tokens * self.DECAY + gained
            self._uniform_tokens = self._uniform_tokens * self.DECAY + self._uniform_rate * self._seconds
            self._compare_with_plain(verified + prompts, gained, self._drafting + seconds, changed)
        if not compiles:
            self.main.update(size, seconds - self.main_change * changed)
        self._drafted = False  # `begin` is not called before passes over prompts alone

    def _plain_pass_seconds(self, tokens: int) -> float:
        """Seconds of a forward pass over `tokens` tokens without a draft: as measured, capped by the learned curve."""
        return min(self._comparison.plain_change * self.main.measured(tokens), float(self.main(tokens)))

    def _compare_with_plain(self, tokens: int, gained: int, seconds: float, changed: bool) -> None:
        """Record the loss or gain of the iteration against plain decoding. `changed`: the main model's forward pass had
        another size than the one before."""
        comparison = self._comparison
        if self._forced:  # it cannot be compared, but the budget for drafting recovers as in a plain iteration
            comparison.budget.update(comparison.plain_change, comparison.plain_change)
            return
        if not self._num_requests or self._compiles:
            return
        if not self._drafted:
            if not changed:  # after a pass of another size, this one took longer than those of plain decoding
                comparison.observe_plain(seconds, self.main.measured(tokens))
            self._add_to_totals(gained, 1, 1)
            comparison.budget.update(comparison.plain_change, comparison.plain_change)
            return
        worth = gained / self._num_requests
        self._add_to_totals(gained, worth, seconds / self._plain_seconds)
        taken = min(seconds, 2 * self._seconds) / self._plain_seconds  # an outlier counts as twice as long
        comparison.observe_drafted(worth, taken)

    def _best_requests(self, candidates: Sequence[_Candidate], tokens: int, model_users: int) -> list[int]:
        """The indices of the most promising requests: as many as gain most by a draft token each, or by several."""
        order = sorted(range(len(candidates)), key=lambda i: -candidates[i].survival * candidates[i].acceptance)
        main = self._pass_seconds(tokens, tokens + len(order) * LONGEST)
        first_seconds = self._further_seconds if self._computed else self._first_seconds
        computed = model_users  # requests that need a forward pass of the draft model
        gains = [0.0] * LONGEST  # expected tokens of 1, 2, ... draft tokens of each request so far
        rate, most, chosen = self._rate, 0.0, 0
        for count, i in enumerate(order, start=1):
            survival, acceptance, uses_model = candidates[i]
            computed += uses_model
            first = first_seconds[computed] - first_seconds[model_users]
            further = self._further_seconds[computed] - self._further_seconds[model_users]
            accepted = accumulate(_powers(acceptance))
            gains = [gain + survival * tokens_gained for gain, tokens_gained in zip(gains, accepted, strict=True)]
            for step, gain in enumerate(gains):
                worth = gain - rate * (main[count * (step + 1)] - main[0] + first + step * further)
                if worth > most:
                    most, chosen = worth, count
        return order[:chosen]

    def _add_to_totals(self, gained: int, worth: float, taken: float) -> None:
        self._totals = list(map(add, self._totals, (self._num_requests, gained, worth, taken)))

    def describe(self) -> str:
        """Acceptance, speedup and measured costs so far, in one line."""
        one, many = self.main(1) * 1000, self.main(16) * 1000
        return (
            f"adaptive draft length for the batch: {self._outcome()}; a first draft token takes "
            f"{self.draft(1) * 1000:.2f} ms, a further one {self.draft_further(1) * 1000:.2f} ms, the main model "
            f"{one:.1f} ms for one token, {many:.1f} ms for 16"
        )

    def _outcome(self) -> str:
        outcome = self._all.describe()
        if self._matches.judged:
            outcome += f", {self._matches.describe()} copied from matches"
        num_requests, gained, worth, taken = self._totals
        if self._all.judged + self._matches.judged and num_requests:
            outcome += f", {gained / num_requests:.2f} tokens per request and forward pass"
            outcome += f", estimated speedup {worth / taken:.2f}x over plain decoding"
        return outcome


def _is_new(size: int, sizes: set[int]) -> bool:
    """Whether `size` is not yet one of `sizes`; adds it."""
    is_new = size not in sizes
    sizes.add(size)
    return is_new


def _powers(acceptance: float) -> list[float]:
    """`acceptance` to the powers of 1, 2, ... `LONGEST`."""
    return list(accumulate([acceptance] * LONGEST, mul))
