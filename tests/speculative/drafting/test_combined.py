"""Two sources of draft tokens: the choice between them, on texts that repeat much or nothing, with simulated costs."""

import numpy as np
import pytest

from speculative.decoder import Decoder
from speculative.drafting.acceptance import AcceptanceEstimate, MatchEstimate
from speculative.drafting.combined import CombinedDraftLength, CombinedEstimate, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import SuffixProposer
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot
from tests.speculative.drafting.test_lookup_policy import text

COSTS = Costs(draft=1.2, main={1: 10.0, 5: 12.0, 17: 18.0})  # ms


class Simulation:
    """Decodes given token ids, with a draft model whose next token is right with the probability `acceptance`."""

    def __init__(self, policy, tokens, acceptance, seed=0):
        self.policy, self.tokens, self.acceptance = policy, tokens, acceptance
        self.random = np.random.default_rng(seed)
        self.suffix = SuffixProposer(vocab_size=1000)
        self.drafting, self.verify = COSTS.drafting(), COSTS.verify()

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
        while len(draft) <= n + LONGEST:
            drafted, match = len(draft) - n, None
            if isinstance(self.policy, AdaptiveDraftLength) and not isinstance(self.policy, CombinedDraftLength):
                copies = False if self.policy.should_draft(drafted, confidence) else None
            elif (match := self.match(draft)) and isinstance(self.policy, LookupDraftLength):
                copies = True
                if not self.policy.should_draft(drafted, match.confidence):
                    return draft, steps, match.token
            else:
                combined = isinstance(self.policy, CombinedDraftLength)
                copies = self.policy.copies_next(drafted, match) if combined else None
            if copies is None:
                break
            proposal = match if copies else self.model(len(draft))
            if isinstance(self.policy, CombinedDraftLength):
                self.policy.draft(proposal, copies)
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
            spent = self.random.normal(1, 0.05, 2) * (self.drafting[steps], self.verify[drafted + 1])
            if isinstance(self.policy, CombinedDraftLength):
                self.policy.see(tokens[n : n + accepted + 1].tolist())
            elif declined is not None and accepted == drafted:
                self.policy.learn_declined(tokens[n + accepted] == declined)
            self.policy.update(drafted, accepted, *spent)
            seconds, n = seconds + spent.sum(), n + accepted + 1
        return (n - begin) * self.verify[1] / seconds


def speedups(policy, copied, acceptance, texts=6):
    made = [text(np.random.default_rng(seed), copied) for seed in range(texts)]
    return np.mean([Simulation(policy(COSTS), one, acceptance, seed).speedup() for seed, one in enumerate(made)])


@pytest.mark.parametrize("copied", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8])
def test_two_sources_are_as_fast_as_the_better_one_and_faster_where_both_help(copied, acceptance):
    lookup, model, both = (
        speedups(policy, copied, acceptance) for policy in (LookupDraftLength, AdaptiveDraftLength, CombinedDraftLength)
    )
    print(f"copied {copied}, acceptance {acceptance}: {lookup:.2f}, {model:.2f}, both {both:.2f}")
    assert both > 0.97 * max(lookup, model)
    if copied and acceptance > 0.05:
        assert both > 1.08 * max(lookup, model)


def copy_of(token, confidence=0.8):
    return Proposal(token, OneHot(token, 100), lambda: confidence)


def of_model(token):
    return Proposal(token, None, lambda: 0.8)


def test_each_source_learns_from_its_own_tokens():
    estimate = CombinedEstimate(AcceptanceEstimate(), MatchEstimate())
    for proposal, copied in ((copy_of(1), True), (of_model(2), False), (copy_of(3), True), (of_model(4), False)):
        estimate.foresee(proposal if copied else None)
        estimate.draft(proposal, copied)
    estimate.see([1, 2, 9])
    estimate.update(4, 2)  # the second copy was wrong, so the last token was not judged
    assert (estimate.of_matches.judged, estimate.of_matches.accepted) == (2, 1)
    assert (estimate.of_draft.judged, estimate.of_draft.accepted) == (1, 1)
    assert (estimate.judged, estimate.accepted) == (3, 2)


@pytest.mark.parametrize(("token", "is_right"), [(7, True), (8, False)])
@pytest.mark.parametrize("declined", ["for the draft model's", "at the end of the draft"])
def test_copies_that_were_declined_are_learned_from_too(token, is_right, declined):
    estimate = CombinedEstimate(AcceptanceEstimate(), MatchEstimate())
    before = estimate.of_matches.of(0.8)
    estimate.foresee(copy_of(token))
    drafted = declined.startswith("for")
    if drafted:
        estimate.draft(of_model(7), copied=False)
    estimate.see([7, 5] if drafted else [7])
    estimate.update(drafted, drafted)
    assert (estimate.of_matches.of(0.8) > before) == is_right


def test_matches_that_are_often_wrong_lower_the_hopes_of_longer_ones():
    estimate = MatchEstimate()
    before = estimate.ahead_of(0.85, 1)
    for _ in range(10):
        estimate.see(0.36, False)
    assert estimate.ahead_of(0.85, 1) < 0.7 * before


def test_after_a_copy_an_eagle3_head_does_not_draft():
    """It would need a forward pass for each copied token."""
    for continues, expected in ((True, [True, False]), (False, [True, None])):
        policy = CombinedDraftLength(COSTS, continues_copies=continues)
        chosen = [policy.copies_next(0, copy_of(1, 0.95))]
        policy.draft(copy_of(1, 0.95), copied=True)
        assert [*chosen, policy.copies_next(1, None)] == expected


def test_policies_of_other_sources_are_refused():
    suffix = SuffixProposer(vocab_size=100)
    both = CombinedProposer(suffix, DraftModelProposer(None, 100))
    with pytest.raises(ValueError, match="declining random proposals changes the output"):
        Decoder(None, both, LookupDraftLength(COSTS))
    with pytest.raises(ValueError, match="it needs a CombinedProposer"):
        Decoder(None, suffix, CombinedDraftLength(COSTS))


def test_seeded_choices_do_not_depend_on_timings():
    def choices(slower):
        policy = CombinedDraftLength(COSTS)
        policy.reset(repeatable=True)
        random, made = np.random.default_rng(1), []
        for _ in range(60):
            drafted = 0
            while True:
                match = copy_of(1, 0.5) if random.random() < 0.5 else None
                made.append(policy.copies_next(drafted, match))
                if made[-1] is None:
                    break
                policy.draft(match if made[-1] else of_model(1), made[-1])
                drafted += 1
            accepted = int(random.integers(drafted + 1))
            policy.see([1] * (accepted + 1))
            policy.update(drafted, accepted, slower * drafted, slower)
        return made

    assert choices(1.0) == choices(50.0) and {True, False, None} == set(choices(1.0))
