"""Draft-length policies: how many tokens to draft before the main model verifies them.

Before each draft token, a policy decides whether to draft another one. It may use the tokens drafted so far, and every
draft token is verified. So the decision depends on past tokens only, which keeps the output lossless. A deterministic
proposal also depends on past tokens only: `LookupDraftLength` and `CombinedDraftLength` use it for their decision.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Protocol

import numpy as np

from speculative.drafting.acceptance import AcceptanceEstimate, count_of_tokens, describe_acceptance
from speculative.drafting.budget import ComparisonSchedule, DraftBudget
from speculative.drafting.latency_curve import MIN_TIME_WEIGHT, TIME_WEIGHT, DraftSteps, LatencyTable, excess, monotone
from speculative.drafting.tree import LeafEstimate
from speculative.models.pass_width import PassWidth
from speculative.sampling.params import SamplingParams
from speculative.sampling.proposal import Leaf

Confidence = Callable[[], float]
"""The draft's confidence in its last token, from 0 to 1; computed when called."""

LONGEST = 16  # most draft tokens per iteration, for adaptive policies
FEWEST_JUDGED = 20  # draft tokens, for an estimate of the speedup
FASTER = 1.06  # a forward pass over one token that takes this many times as long as one over more is padded to it
LONG_PASS = 0.004  # seconds of a plain forward pass from which leaves gain more time than it takes to choose them
SAME = 1.02  # forward passes whose times differ by less count as equally fast


class DraftLengthPolicy(Protocol):
    """Decides the draft length of one request, token by token, and learns from the outcome of each iteration."""

    has_leaves: bool = False  # set by a decoder: whether it can verify leaves

    @property
    def tree(self) -> LeafEstimate | None:
        """What the policy learns of leaves; None if drafts have none."""
        return None

    def leaves(self) -> list[Leaf]:
        """The leaves of the draft that was made in this iteration."""
        return []

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        """Whether to draft another token after `drafted` ones, the last of which had `confidence` (None if none)."""

    def observe_step(self, seconds: float) -> None:
        """Record the time of a draft step of this iteration."""
        return

    def update(
        self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float, leaf: bool = False
    ) -> None:
        """Record the outcome of an iteration: of `drafted` tokens, one after another, the first `accepted` ones were
        accepted, and a `leaf` or not."""

    def reset(self, repeatable: bool = False) -> None:
        """Reset. With `repeatable`, decisions no longer depend on timings."""

    def describe(self) -> str:
        """The current decision of the policy, in one line."""


@dataclass
class FixedDraftLength(DraftLengthPolicy):
    """Always K tokens, one after another, and a number of leaves."""

    k: int
    leaf_count: int = 0

    def __post_init__(self) -> None:
        self._tree = LeafEstimate()

    @property
    def tree(self) -> LeafEstimate | None:
        return self._tree if self.leaf_count and self.has_leaves else None

    def leaves(self) -> list[Leaf]:
        return self._tree.best([0.5] * self.k, self.leaf_count)

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        return drafted < self.k

    def update(
        self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float, leaf: bool = False
    ) -> None: ...

    def reset(self, repeatable: bool = False) -> None:
        self.__post_init__()

    def describe(self) -> str:
        return f"always {count_of_tokens(self.k)}" + (f" and {self.leaf_count} leaves" if self.leaf_count else "")


@dataclass
class ConfidenceDraftLength(DraftLengthPolicy):
    """Drafts until the draft's confidence falls below `threshold` (GenAI's `assistant_confidence_threshold`)."""

    threshold: float
    longest: int = LONGEST

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        return drafted < self.longest and (not drafted or (confidence is not None and confidence() >= self.threshold))

    def update(
        self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float, leaf: bool = False
    ) -> None: ...

    def reset(self, repeatable: bool = False) -> None: ...

    def describe(self) -> str:
        return f"up to {self.longest} draft tokens, until the draft's confidence falls below {self.threshold:g}"


@dataclass(frozen=True)
class Costs:
    """Measured seconds of the first draft step of an iteration, of a main forward pass by its number of tokens (1
    included), and of a further draft step, with the draft's weights in the CPU caches (default: as the first); and the
    additional seconds of a main forward pass that has another number of tokens than the last one."""

    draft: float
    main: dict[int, float]
    draft_further: float | None = None
    main_change: float = 0.0

    def drafting(self) -> np.ndarray:
        """Seconds of 0, 1, ..., LONGEST draft steps."""
        further = self.draft if self.draft_further is None else self.draft_further
        return np.concatenate(([0.0], self.draft + further * np.arange(LONGEST)))

    def verify(self) -> np.ndarray:
        """Seconds of a main forward pass over 0, 1, ..., LONGEST + 1 tokens, interpolated between measured ones.

        More tokens never cost less, see `monotone`.
        """
        return np.interp(np.arange(LONGEST + 2), *monotone(self.main))

    def fastest(self) -> int:
        """The tokens of the fastest main forward pass: 1, unless one over more tokens is clearly faster.

        On an AMD EPYC, SmolLM2-135M takes 16 ms for one or two tokens, 14 ms for three to six.
        """
        fastest = min(self.main.values())
        if self.main[1] <= FASTER * fastest:
            return 1
        return min(n for n, seconds in self.main.items() if seconds <= SAME * fastest)

    def pass_width(self, pads: bool = True) -> PassWidth:
        """The size of the main model's forward passes; without `pads`, they have the size that is needed."""
        return PassWidth(self.verify().tolist(), self.main_change, pads, self.fastest())


def policy_from_params(params: SamplingParams) -> DraftLengthPolicy | None:
    """The policy that a request sets: a fixed length or a confidence threshold; None if it sets neither."""
    if params.num_assistant_tokens:
        chain = params.tree_depth or params.num_assistant_tokens
        return FixedDraftLength(chain, params.num_assistant_tokens - chain)
    if params.assistant_confidence_threshold:
        return ConfidenceDraftLength(params.assistant_confidence_threshold)
    return None


def net_of_time(gains: Iterable[float], rate: float, seconds: Iterable[float]) -> list[float]:
    """`gains` in tokens, less the tokens that the `seconds` of each are worth at `rate` tokens per second."""
    return [gain - rate * taken for gain, taken in zip(gains, seconds, strict=True)]


class AdaptiveDraftLength(DraftLengthPolicy):
    """Keeps drafting while a further token is worth its cost; decodes plainly while drafting is not worth it.

    Speculation trades expected tokens for expected time (Leviathan et al. 2023, section 3.3 and theorem 3.8). One more
    token, or a few more, are drafted while

        expected additional tokens  >  best rate so far (tokens per second) x additional seconds to draft and verify

    which is the stopping rule that maximizes tokens per second. Expected tokens come from an `AcceptanceEstimate`, the
    seconds from the measured times. If not even a first token is worth its cost, decoding is plain, and a token is
    drafted periodically to probe whether that has changed.

    If `has_leaves`, drafts are trees: a forward pass over n tokens has the chain and the leaves that are worth most.
    They are for models whose passes take `LONG_PASS` or more: choosing leaves takes about 0.3 ms.

    A `DraftBudget` bounds the loss against plain decoding, however wrong the estimates are.
    """

    DECAY = 0.99  # decay of the recent tokens and seconds per iteration
    MIN_PLAIN_SAMPLES = 4  # plain iterations after which measured losses are trusted
    CLEAR_GAIN = 1.5  # speedup above which plain decoding is not timed

    def __init__(self, costs: Costs, prior_acceptance: float = AcceptanceEstimate.PRIOR_ACCEPTANCE):
        """`prior_acceptance` is the prior of the acceptance rate."""
        self.costs = costs
        self.pass_width: PassWidth | None = None  # set by a decoder: that of its main model
        self._prior_acceptance = prior_acceptance
        self.reset()

    def reset(self, repeatable: bool = False) -> None:
        self._repeatable = repeatable
        self._drafting = DraftSteps(self.costs.drafting())
        self._step_seconds: list[float] = []  # of the draft steps of this iteration
        self._verify = LatencyTable(self.costs.verify(), self.costs.main_change)
        self._passes = self._verify.seconds  # of the next forward pass, by the tokens that it needs
        # of chains of 0, 1, ... draft tokens: seconds to draft and verify them, and value of the leaves beside them
        self._chain_seconds = [0.0] * (LONGEST + 1)
        self._chain_leaves = [0.0] * (LONGEST + 1)
        self._acceptance = self._new_estimate()
        self._tokens = self._seconds = 0.0  # gained and spent, by the cost model
        self._gains = [0.0] * LONGEST  # expected tokens of drafting 1, 2, ..., LONGEST more
        self._leaf_estimate = LeafEstimate()
        self._leaf_gains = [[0.0] * (LONGEST + 1)] * (LONGEST + 1)  # of m leaves beside a chain of k, see LeafEstimate
        self._chains = list(range(1, LONGEST + 1))  # the draft tokens in the best trees of 1, 2, ... tokens
        self._width = 1  # planned tokens of the next forward pass
        self._accepted_leaves = 0
        self._recomputed = 0  # 1 if the next forward pass computes an accepted leaf again, else 0
        self._budget = DraftBudget()
        self._plain_seconds = self._verify.seconds[1]  # of an iteration without a draft, learned from these only
        self._plain_seen = 0
        self._comparisons = ComparisonSchedule()
        self._recent_tokens = self._recent_seconds = 0.0  # of iterations with a draft, with decay
        self._drafted_last_time = False  # whether the draft model ran in the last iteration
        self._iterations, self._all_seconds = 0, 0.0  # since the last reset

    def _new_estimate(self) -> AcceptanceEstimate:
        return AcceptanceEstimate(self._prior_acceptance, prior_decays=True)

    def should_draft(self, drafted: int, confidence: Confidence | None) -> bool:
        if drafted == 0:
            self._step_seconds = []
            self._acceptance.begin()
            if not self._may_draft():
                return False
            acceptance = self.acceptance()
            self._gains = list(accumulate(acceptance**k for k in range(1, LONGEST + 1)))
            self._plan_tree(net_of_time(self._gains, self._rate(1), self._drafting.seconds[1:]))
            self._chain_seconds = list(map(add, self._passes[1 + self._recomputed :], self._drafting.seconds))
            self._chain_leaves = [self._leaves_value(k, k) for k in range(LONGEST + 1)]
            return self._is_worth_it(0) or self._acceptance.is_due
        assert confidence is not None  # that of the last draft token
        self._acceptance.draft(confidence())
        return drafted < LONGEST - self._recomputed and self._is_worth_it(drafted)

    def _may_draft(self) -> bool:
        """Whether the budget allows a draft and no plain iteration is due; otherwise the next pass is a plain one."""
        allowed = self._budget.remaining(self._plain_cost()) > 0 and not self._is_comparison_due()
        if not allowed and self.pass_width:
            self.pass_width.plan_one()
        return allowed

    @property
    def tree(self) -> LeafEstimate | None:
        return self._leaf_estimate if self._has_tree else None

    @property
    def _has_tree(self) -> bool:
        return self.has_leaves and self.costs.main[1] >= LONG_PASS

    def leaves(self) -> list[Leaf]:
        width = self.pass_width.planned if self.pass_width else 0
        free = width - 1 - self._recomputed - self._leaf_estimate.drafted
        return self._leaf_estimate.best(self._acceptance.drafted_acceptance, free)

    def _plan_tree(self, gains: list[float], leafless: list[float] | None = None) -> None:
        """Plan the size of the next forward pass; a chain of 1, 2, ..., LONGEST tokens is worth `gains`, in tokens. One
        of another source, which has no leaves, is worth `leafless`."""
        if self._has_tree:
            if self._iterations % 8 == 0:  # it changes little from one iteration to the next, and takes time
                self._leaf_gains = self._leaf_estimate.gains(self.acceptance(), LONGEST)
                self._chains = [
                    max(range(1, size + 1), key=lambda k: gains[k - 1] + self._leaf_gains[k][size - k])
                    for size in range(1, LONGEST + 1)
                ]
            gains = [
                gains[chain - 1] + self._leaf_gains[chain][size - chain] for size, chain in enumerate(self._chains, 1)
            ]
        self._plan_pass(gains if leafless is None else list(map(max, gains, leafless)))

    def _plan_pass(self, gains: list[float]) -> None:
        """Plan the size of the next forward pass; `gains` is what 1, 2, ..., LONGEST draft tokens are worth, in tokens.
        Draft tokens that fit into it take no time to verify."""
        seconds = self._verify.seconds
        self._passes, self._width = seconds, 1
        if not self.pass_width:
            return
        rate = self._rate(1)
        of_fitting = ([0.0] * (1 + self._recomputed) + gains)[: LONGEST + 1]
        worth = net_of_time(accumulate(of_fitting, max), rate, seconds[1:])
        self._width = self.pass_width.plan(worth, rate * self._verify.change)
        fitting, change = self.pass_width.seconds_of_planned(seconds, self._verify.change)
        self._passes = [*fitting, *(of_size + change for of_size in seconds[len(fitting) :])]

    def _leaves_value(self, drafted: int, steps: int) -> float:
        """Value of the leaves that fit into the planned pass beside `drafted` draft tokens, `steps` of them the draft
        model's, in tokens."""
        return self._leaf_gains[steps][max(self._width - 1 - self._recomputed - drafted, 0)] if self._has_tree else 0.0

    @property
    def _plain_size(self) -> int:
        """The size of a plain forward pass, padding included."""
        return self.pass_width.plain_size if self.pass_width else 1

    def _last_pass(self, drafted: int) -> tuple[int, bool, bool]:
        """The size of the last forward pass, padding included, whether the one before had another size, and whether
        that was a prompt's."""
        if not self.pass_width:
            return drafted + 1, False, False
        return self.pass_width.last or drafted + 1, self.pass_width.is_changed, self.pass_width.is_first

    def observe_step(self, seconds: float) -> None:
        self._step_seconds.append(seconds)

    def update(
        self, drafted: int, accepted: int, draft_seconds: float, main_seconds: float, leaf: bool = False
    ) -> None:
        steps, step_seconds = self._draft_steps(drafted), self._step_seconds
        self._step_seconds = []
        width, is_changed, is_first = self._last_pass(drafted)
        self._acceptance.update(drafted, accepted)
        if not self._repeatable:
            for step, of_step in enumerate(step_seconds):
                # after a plain iteration, the first step also processes the tokens that were decoded without the draft
                if step or self._drafted_last_time:
                    self._drafting.update(step, of_step)
            if is_changed:
                change = self._verify.change
                self._verify.update_change(width, main_seconds, self._plain_cost())
                self._verify.update(width, main_seconds - change, MIN_TIME_WEIGHT)
            else:
                self._verify.update(width, main_seconds)
        unavoidable = self._verify.change * (is_changed and is_first)  # without a draft, too
        verify = self._verify.seconds[width] + self._verify.change * is_changed - unavoidable
        expected = self._drafting.seconds[steps] + verify
        self._tokens = self._tokens * self.DECAY + accepted + leaf + 1
        self._seconds = self._seconds * self.DECAY + expected
        seconds = expected if self._repeatable else max(draft_seconds + main_seconds - unavoidable, 0.0)
        self._drafted_last_time = steps > 0
        is_plain = not drafted and width <= self._plain_size and (not is_changed or is_first)
        self._accepted_leaves += leaf
        self._recomputed = int(leaf)
        self._compare_with_plain(is_plain, accepted + leaf, expected * (1 + excess(seconds, expected)))
        self._iterations += 1
        self._all_seconds += seconds

    def _draft_steps(self, drafted: int) -> int:
        """The draft model's forward passes for `drafted` tokens in this iteration."""
        return drafted

    def _compare_with_plain(self, is_plain: bool, accepted: int, seconds: float) -> None:
        """Record what the iteration lost or saved against plain decoding."""
        if not is_plain:
            self._comparisons.observe_drafted()
            self._recent_tokens = self._recent_tokens * self.DECAY + accepted + 1
            self._recent_seconds = self._recent_seconds * self.DECAY + seconds
        else:
            self._comparisons.observe_plain()
            self._plain_seen += 1
            weight = max(TIME_WEIGHT, 1 / (self._plain_seen + 1))
            if not self._repeatable:
                self._plain_seconds *= 1 + weight * excess(seconds, self._plain_seconds)
                self._verify.seconds[1] = min(self._plain_seconds, self._verify.seconds[2])
        self._budget.update(self._plain_cost(), seconds, None if is_plain else accepted + 1)

    def _plain_cost(self) -> float:
        """Seconds of an iteration without a draft. Until it was timed often, no more than one with more tokens; on some
        processors a pass over one token does take longer than one over three."""
        if self._plain_seen >= self.MIN_PLAIN_SAMPLES:
            return self._plain_seconds
        return min(self._plain_seconds, self._verify.seconds[2])

    def _is_comparison_due(self) -> bool:
        """Whether an iteration without a draft is due, to time it: only if the gain is not clear. It is not clear if
        the plain time exceeds that of two tokens, as it was then measured while other programs ran."""
        unsure = self._plain_seen < self.MIN_PLAIN_SAMPLES and self._budget.is_low(self._plain_cost())
        is_clear = self._recent_tokens * self._plain_cost() >= self.CLEAR_GAIN * self._recent_seconds
        is_doubtful = self._plain_cost() > FASTER * self._verify.seconds[2]
        return unsure or (self._comparisons.is_due and (is_doubtful or not is_clear))

    def acceptance(self) -> float:
        """The probability that the next draft token is accepted, given that those before it were."""
        return self._acceptance.mean()

    def _rate(self, drafted: int) -> float:
        """Tokens per second to beat: plain decoding for a first draft token, then the recent rate if that is higher.

        The recent rate is not the bar for a first token: not drafting would not reach it either.
        """
        plain = 1 / self._verify.seconds[1]
        return max(plain, self._tokens / self._seconds) if drafted and self._seconds else plain

    def _is_worth_it(self, drafted: int) -> bool:
        """Whether one more draft token, or several, are worth their time."""
        survival, rate = self._acceptance.survival, self._rate(drafted)
        # the seconds of so many draft tokens in tokens, and the value of the leaves whose places further ones take
        before = self._chain_leaves[drafted] - rate * self._chain_seconds[drafted]
        return any(
            survival * gain + leaves - rate * seconds > before
            for gain, leaves, seconds in zip(
                self._gains, self._chain_leaves[drafted + 1 :], self._chain_seconds[drafted + 1 :], strict=False
            )
        )

    def describe(self) -> str:
        tokens = accumulate(self.acceptance() ** k for k in range(LONGEST + 1))
        seconds = map(add, self._verify.seconds[1:], self._drafting.seconds)
        rates = [gained / taken for gained, taken in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        one = self._plain_cost()
        costs = (
            f"a draft token takes {self._drafting.seconds[max(best, 1)] / max(best, 1) * 1000:.2f} ms, the main model "
            f"{one * 1000:.1f} ms for one token"
        )
        if best:
            costs += f" and {self._verify.seconds[best + 1] * 1000:.1f} ms for {best + 1}"
        decision = f"about {count_of_tokens(best)}" if best else "plain decoding, as drafting is not worth its cost"
        return f"{decision}: {self._outcome(one)}; {costs}"

    def _outcome(self, plain_seconds: float) -> str:
        judged, accepted = self._acceptance.judged, self._acceptance.accepted
        leaves = self._accepted_leaves
        return describe_outcome(judged, accepted, self._iterations, self._all_seconds, plain_seconds, leaves)


def describe_outcome(
    judged: int, accepted: int, iterations: int, seconds: float, plain_seconds: float, leaves: int = 0
) -> str:
    """The measured acceptance, tokens per forward pass and, after FEWEST_JUDGED draft tokens, speedup over plain
    decoding, in a few words.

    `judged` are the draft tokens up to the first rejected one of each iteration, `accepted` the accepted ones, and
    `leaves` those of draft trees. All iterations took `seconds`, a plain one takes `plain_seconds`.
    """
    acceptance = describe_acceptance(judged, accepted)
    if not judged:
        return acceptance
    tokens = iterations + accepted + leaves
    leaf_share = f" ({leaves / iterations:.2f} by leaves of the draft tree)" if leaves else ""
    outcome = f"{acceptance}, {tokens / iterations:.2f} tokens per forward pass{leaf_share}"
    if not seconds or judged < FEWEST_JUDGED:  # no time: the first pass after a prompt, without the change of its size
        return outcome
    return f"{outcome}, estimated speedup {tokens * plain_seconds / seconds:.2f}x over plain decoding"
