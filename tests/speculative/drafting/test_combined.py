"""Two sources of draft tokens: the choice between them, on texts that repeat much or nothing, with simulated costs."""

import numpy as np
import pytest

from speculative.decoder import Decoder
from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.budget import DraftBudget
from speculative.drafting.combined import TRUSTED, CombinedDraftLength, CombinedEstimate, CombinedProposer
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.match_estimate import MatchEstimate
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs, FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import MATCH_ACCEPTANCE, SuffixProposer
from speculative.models.pass_width import PassWidth
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot
from tests.speculative.drafting.test_lookup_policy import text

COSTS = Costs(draft=1.2, main={1: 10.0, 5: 12.0, 17: 18.0})  # ms
MODELS = {  # ms, measured; a forward pass of another size than the last takes longer
    "embedded": Costs(0.55, {1: 3.15, 2: 3.76, 4: 4.0, 6: 4.44, 11: 4.61, 17: 5.67}, main_change=1.93),
    "SmolLM2": Costs(1.2, {1: 21, 3: 26, 5: 30, 17: 58}, main_change=10.0),
    "SmolLM2 on AMD": Costs(1.0, {1: 15.8, 6: 16.9, 8: 18, 12: 24, 17: 27}, main_change=6.0),
    "TinyLlama": Costs(8.0, {1: 87, 3: 104, 9: 130, 17: 170}, main_change=25.0),
}


class Simulation:
    """Decodes given token ids, with a draft model whose next token is right with the probability `acceptance`."""

    def __init__(self, policy, tokens, acceptance, seed=0, costs=COSTS):
        self.costs = costs
        self.width = PassWidth(costs.verify(), costs.main_change)
        if not isinstance(policy, FixedDraftLength):
            policy.pass_width = self.width
        self.policy, self.tokens, self.acceptance = policy, tokens, acceptance
        self.random = np.random.default_rng(seed)
        self.suffix = SuffixProposer(vocab_size=1000)
        self.drafting, self.verify = costs.drafting(), costs.verify()

    def match(self, draft):
        return self.suffix.propose(draft, None, None)

    def model(self, place):
        """The draft model's token for `place`: (token, confidence)."""
        right = self.random.random() < self.acceptance
        confidence = np.clip(self.random.normal(0.75 if right else 0.45, 0.15), 0, 1)
        return Proposal(int(self.tokens[place]) + 1000 * (not right), None, lambda: confidence)

    def draft(self, draft):
        """Draft tokens after `draft`: the text with them, the draft model's forward passes, and the declined token."""
        n, steps, confidence = len(draft), 0, None
        if isinstance(self.policy, CombinedDraftLength):
            self.policy.begin()
        while len(draft) <= n + LONGEST:
            drafted, match = len(draft) - n, None
            if not isinstance(self.policy, (LookupDraftLength, CombinedDraftLength)):
                copies = False if self.policy.should_draft(drafted, confidence) else None
            elif isinstance(self.policy, LookupDraftLength):
                copies, match = True, self.match(draft)
                if not self.policy.should_draft(drafted, match and match.confidence):
                    return draft, steps, match and match.token
            else:
                match = self.match(draft)
                copies = self.policy.copies_next(match)
            if copies is None:
                break
            proposal = match if copies else self.model(len(draft))
            if isinstance(self.policy, CombinedDraftLength):
                self.policy.draft(proposal, copies)
            if not copies:
                self.policy.observe_step(self.costs.draft * self.random.normal(1, 0.05))
            confidence, steps = proposal.confidence, steps + (not copies)
            draft = np.append(draft, proposal.token)
        return draft, steps, None

    def speedup(self):
        """The speedup over plain decoding, after the first 50 tokens."""
        tokens, begin, seconds = self.tokens, 50, 0.0
        n = begin
        while n < len(tokens) - LONGEST - 2:
            draft, steps, declined = self.draft(tokens[:n])
            drafted = len(draft) - n
            accepted = int((draft[n:] == tokens[n : n + drafted]).cumprod().sum())
            main = self.verify[self.width.width_for(drafted + 1)] + self.costs.main_change * self.width.is_changed
            spent = self.random.normal(1, 0.05, 2) * (self.drafting[steps], main)
            if isinstance(self.policy, CombinedDraftLength):
                self.policy.observe(tokens[n : n + accepted + 1].tolist())
            elif declined is not None and accepted == drafted:
                self.policy.observe_declined(tokens[n + accepted] == declined)
            self.policy.update(drafted, accepted, *spent)
            seconds, n = seconds + spent.sum(), n + accepted + 1
        return (n - begin) * self.verify[1] / seconds


def speedups(policy, copied, acceptance, costs=COSTS, texts=6):
    made = [text(np.random.default_rng(seed), copied) for seed in range(texts)]
    return np.mean([Simulation(policy(costs), one, acceptance, seed, costs).speedup() for seed, one in enumerate(made)])


@pytest.mark.parametrize("copied", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8])
def test_two_sources_match_the_better_one_and_beat_it_if_both_help(copied, acceptance):
    lookup, model, both = (
        speedups(policy, copied, acceptance) for policy in (LookupDraftLength, AdaptiveDraftLength, CombinedDraftLength)
    )
    print(f"copied {copied}, acceptance {acceptance}: {lookup:.2f}, {model:.2f}, both {both:.2f}")
    assert both > 0.97 * max(lookup, model)
    if copied and acceptance > 0.05:
        assert both > (1.08 if copied < 0.9 else 1.03) * max(lookup, model)


@pytest.mark.parametrize("costs", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.75, 0.9])
def test_adaptive_length_matches_fixed_lengths_with_costly_size_changes(costs, acceptance):
    adaptive = speedups(AdaptiveDraftLength, 0.0, acceptance, costs, texts=3)
    fixed = [speedups(lambda _, k=k: FixedDraftLength(k), 0.0, acceptance, costs, texts=3) for k in (0, 1, 2, 3, 5, 8)]
    print(f"adaptive {adaptive:.3f}, fixed {np.round(fixed, 3)}: {adaptive / max(fixed):.3f}")
    assert adaptive > 0.93 * max(fixed) and adaptive > 0.97


@pytest.mark.parametrize("costs", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.75])
def test_two_sources_match_the_better_one_with_costly_size_changes(costs, acceptance):
    policies = LookupDraftLength, AdaptiveDraftLength, CombinedDraftLength
    lookup, model, both = (speedups(policy, 0.5, acceptance, costs, texts=3) for policy in policies)
    print(f"{lookup:.3f}, {model:.3f}, both {both:.3f}: {both / max(lookup, model):.3f}")
    assert both > 0.95 * max(lookup, model)


@pytest.mark.parametrize("costs", MODELS.values(), ids=MODELS)
def test_useless_draft_model_does_not_slow_down_suffix_decoding(costs):
    lookup, both = (speedups(policy, 0.9, 0.05, costs, texts=2) for policy in (LookupDraftLength, CombinedDraftLength))
    print(f"{lookup:.3f}, both {both:.3f}: {both / lookup:.3f}")
    assert both > 0.98 * lookup


def copy_of(token, confidence=0.8):
    return Proposal(token, OneHot(token, 100), lambda: confidence)


def of_model(token):
    return Proposal(token, None, lambda: 0.8)


def test_each_source_learns_from_its_own_tokens():
    estimate = CombinedEstimate(AcceptanceEstimate(), MatchEstimate())
    for proposal, copied in ((copy_of(1), True), (of_model(2), False), (copy_of(3), True), (of_model(4), False)):
        estimate.set_next(proposal if copied else None, can_use_model=True)
        estimate.draft(proposal, copied)
    estimate.observe([1, 2, 9])
    estimate.update(4, 2)  # the second copy was wrong, so the last token was not judged
    assert (estimate.match_estimate.judged, estimate.match_estimate.accepted) == (2, 1)
    assert (estimate.draft_estimate.judged, estimate.draft_estimate.accepted) == (1, 1)
    assert (estimate.judged, estimate.accepted) == (3, 2)


@pytest.mark.parametrize(("token", "is_right"), [(7, True), (8, False)])
@pytest.mark.parametrize("declined", ["for the draft model's", "at the end of the draft"])
def test_declined_copies_are_learned_from(token, is_right, declined):
    estimate = CombinedEstimate(AcceptanceEstimate(), MatchEstimate())
    before = estimate.match_estimate.acceptance_of(0.8)
    estimate.set_next(copy_of(token), can_use_model=True)
    drafted = declined.startswith("for")
    if drafted:
        estimate.draft(of_model(7), copied=False)
    estimate.observe([7, 5] if drafted else [7])
    estimate.update(drafted, drafted)
    assert (estimate.match_estimate.acceptance_of(0.8) > before) == is_right


def test_wrong_short_matches_lower_the_value_of_longer_ones():
    estimate = MatchEstimate()
    before = estimate.gains(0.85, 1)[0]
    for _ in range(10):
        estimate.observe(0.36, False)
    assert estimate.gains(0.85, 1)[0] < 0.7 * before


def test_interrupted_reset_leaves_a_policy_of_both_sources(monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt

    policy = CombinedDraftLength(COSTS)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("speculative.drafting.combined.CombinedEstimate", ctrl_c)
        policy.reset()
    policy.begin()
    assert policy.copies_next(copy_of(1)) is True


def test_copying_continues_if_the_draft_model_cannot_draft():
    """For example beyond its context length, however good its draft tokens were."""
    policy = CombinedDraftLength(COSTS)
    for _ in range(50):
        policy.begin()
        policy.copies_next(None)
        policy.draft(of_model(1), copied=False)
        policy.update(1, 1, 1.0, 10.0)
    policy.begin()
    assert policy.copies_next(copy_of(1, 0.74)) is False
    assert policy.copies_next(copy_of(1, 0.74), can_use_model=False) is True
    assert policy.copies_next(None, can_use_model=False) is None


def test_pass_is_planned_by_copies_if_the_draft_model_cannot_draft():
    policy = CombinedDraftLength(COSTS)
    policy.begin()
    assert policy.copies_next(copy_of(1), can_use_model=False) is True


def test_copies_omitted_in_one_iteration_are_not_charged_to_the_next():
    policy, left = CombinedDraftLength(COSTS), []
    for budget, match in ((-1.0, copy_of(1, 0.97)), (5.0, None)):
        policy._budget = DraftBudget(budget)
        policy.begin()
        assert policy.copies_next(match, can_use_model=False) is None
        policy.observe([2])
        policy.update(0, 0, 0.0, 10.0)
        left.append(policy._budget.remaining(10.0) - budget)
    assert left[0] < -0.1 < 0 < left[1]


def test_proposer_copies_trusted_matches_only():
    class Model:
        def propose(self, *_):
            return of_model(7)

    both = CombinedProposer(SuffixProposer(vocab_size=100), Model())
    repeated, new = np.tile(np.arange(10), 4), np.arange(20, 40)
    assert both.propose(repeated, None, None).token == 0 and both.propose(new, None, None).token == 7
    assert both.is_trusted(copy_of(1, TRUSTED)) and not both.is_trusted(copy_of(1, TRUSTED - 0.01))


def test_two_token_match_is_copied_before_draft_model_is_measured():
    """A long copied passage starts with such a match. One wrong token of the draft model would end the copy."""
    policy = CombinedDraftLength(COSTS)
    policy.begin()
    assert policy.copies_next(copy_of(1, MATCH_ACCEPTANCE[1])) is True
    policy.begin()
    assert policy.copies_next(copy_of(1, MATCH_ACCEPTANCE[0])) is False


def test_iteration_without_draft_does_not_change_the_estimates():
    """For example the last iteration of a text, in which no draft is possible."""
    policy = CombinedDraftLength(COSTS)
    policy.begin()
    policy.copies_next(copy_of(1, 0.2))
    policy.draft(of_model(1), copied=False)
    policy.observe([1, 5])
    policy.update(1, 1, 1.0, 10.0)
    before = policy.estimate.match_estimate.acceptance_of(0.2), policy.describe()
    policy.begin()
    policy.observe([7])
    assert (policy.estimate.match_estimate.acceptance_of(0.2), policy.describe()) == before
    assert policy._draft_steps(0) == 0


def test_description_names_both_sources():
    policy = CombinedDraftLength(COSTS)
    assert "no draft token verified yet; draft model: not used yet; copies: none yet" in policy.describe()
    policy.begin()
    policy.copies_next(copy_of(1))
    policy.draft(copy_of(1), copied=True)
    policy.update(1, 1, 0.0, 10.0)
    assert "draft model: not used yet; copies: per-token acceptance 1.00 over 1 draft token" in policy.describe()


def test_policies_for_other_sources_are_rejected():
    suffix = SuffixProposer(vocab_size=100)
    both = CombinedProposer(suffix, DraftModelProposer(None, 100))
    with pytest.raises(ValueError, match="declining random proposals changes the output"):
        Decoder(None, both, LookupDraftLength(COSTS))
    with pytest.raises(ValueError, match="of a CombinedProposer, and of no other draft"):
        Decoder(None, suffix, CombinedDraftLength(COSTS))
    with pytest.raises(ValueError, match="of a CombinedProposer, and of no other draft"):
        Decoder(None, both, AdaptiveDraftLength(COSTS))


def test_seeded_decisions_do_not_depend_on_timings():
    def choices(slower):
        policy = CombinedDraftLength(COSTS)
        policy.reset(repeatable=True)
        random, made = np.random.default_rng(1), []
        for _ in range(60):
            policy.begin()
            drafted = 0
            while True:
                match = copy_of(1, 0.5) if random.random() < 0.5 else None
                made.append(policy.copies_next(match))
                if made[-1] is None:
                    break
                policy.draft(match if made[-1] else of_model(1), made[-1])
                drafted += 1
            accepted = int(random.integers(drafted + 1))
            policy.observe([1] * (accepted + 1))
            policy.update(drafted, accepted, slower * drafted, slower)
        return made

    assert choices(1.0) == choices(50.0) and {True, False, None} == set(choices(1.0))


def batch(draft=3.0):
    curves = {1: 10.0, 64: 30.0}, {1: draft, 64: 2 * draft}, {1: draft, 64: 2 * draft}
    return BatchDraftLength(*map(LatencyCurve, curves))


def iterate(policy, estimate, match, right):
    """An iteration of a batch of one: True if it copied, False if it used the draft model, None if neither."""
    estimate.begin()
    policy.begin([estimate], 1)
    estimate.set_next(match, can_use_model=True)
    estimate.copies = estimate.prefers_copy(policy.step_worth)
    chosen, copied = policy.choose([estimate], 1, 0), None
    if chosen:
        copied = estimate.copies
        policy.update_draft(0 if copied else 1, 0.0 if copied else 3.0)
        estimate.draft(match if copied else of_model(2), copied)
    accepted = int(bool(chosen) and right)
    estimate.observe([match.token if right else 99] * (accepted + 1))
    estimate.update(len(chosen), accepted)
    policy.update_main(1 + len(chosen), 0, 1 + accepted, 10.0 + 0.3 * len(chosen))
    return copied


def test_batch_policy_probes_draft_model_despite_bad_matches():
    policy = batch()
    estimate = policy.estimate(combined=True)
    made = [iterate(policy, estimate, copy_of(1, 0.2), right=False) for _ in range(200)]
    assert made[50:].count(True) < 5 and 1 <= made[50:].count(False) < 20


def test_batch_policy_copies_good_matches():
    policy = batch()
    estimate = policy.estimate(combined=True)
    made = [iterate(policy, estimate, copy_of(1, 0.9), right=True) for _ in range(60)]
    assert made.count(True) > 50


def test_copying_request_is_not_charged_for_draft_model_passes():
    """The first request that needs a draft-model forward pass is charged for it."""
    chosen = []
    for anyway in (0, 1):
        policy = batch(draft=9.0)
        estimate = policy.estimate(combined=True)
        policy.begin([estimate], 2)
        estimate.set_next(None, can_use_model=True)
        chosen.append(policy.choose([estimate], 2, anyway, forced=True))
    assert chosen == [[], [0]]
