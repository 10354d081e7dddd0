"""The draft-length policy of prompt lookup, on texts that repeat much or nothing, with simulated costs."""

import re

import numpy as np
import pytest

from speculative.decoder import Decoder
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import LONGEST, Costs, FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import LEVELS, SuffixProposer

# ms, measured: each size of forward pass after one of the same size, and what another size takes longer
EMBEDDED = Costs(draft=0.0, main={1: 2.7, 3: 4.4, 9: 5.3, 17: 6.5}), 1.3
SMOLLM2 = Costs(draft=0.0, main={1: 21, 3: 26, 5: 30, 17: 58}), 10.0
LLAMA = Costs(draft=0.0, main={1: 87, 3: 104, 9: 130, 17: 170}), 25.0
MODELS = pytest.mark.parametrize(
    ("costs", "switch"), [EMBEDDED, SMOLLM2, LLAMA], ids=["embedded", "SmolLM2", "TinyLlama"]
)


def text(random, copied, n=600, vocabulary=300):
    """Token ids of which the share `copied` lies in runs copied from before. The others are drawn by Zipf's law, so
    that short matches are frequent and mostly followed by another token."""
    tokens = []
    while len(tokens) < n:
        if len(tokens) > 40 and random.random() < copied:
            begin, length = int(random.integers(len(tokens) - 30)), int(random.integers(8, 40))
            tokens += tokens[begin : begin + length]
        else:
            tokens += (random.zipf(1.3, 20) % vocabulary).tolist()
    return np.array(tokens[:n])


def decode(policy, tokens, costs, switch, random, noise=0.05):
    """Decode `tokens` after the first 50, and return the speedup over plain decoding and the draft tokens."""
    verify = costs.verify()
    proposer = SuffixProposer(vocab_size=1000)
    begin = n = 50
    seconds, before, drafts = 0.0, 0, 0
    while n < len(tokens) - LONGEST - 1:
        draft, declined = tokens[:n], None
        while len(draft) <= n + LONGEST and (proposal := proposer.propose(draft, None, None)):
            if not policy.should_draft(len(draft) - n, proposal.confidence):
                declined = proposal.token
                break
            draft = np.append(draft, proposal.token)
        drafted = len(draft) - n
        accepted = int((draft[n:] == tokens[n : n + drafted]).cumprod().sum())
        spent = float((verify[drafted + 1] + switch * (drafted != before)) * random.normal(1, noise))
        if declined is not None and accepted == drafted and isinstance(policy, LookupDraftLength):
            policy.learn_declined(tokens[n + accepted] == declined)
        policy.update(drafted, accepted, 0.0, spent)
        before, seconds, drafts, n = drafted, seconds + spent, drafts + drafted, n + accepted + 1
    return (n - begin) * verify[1] / seconds, drafts


def speedups(make, copied, costs, switch, texts=8):
    results = []
    for seed in range(texts):
        random = np.random.default_rng(seed)
        results.append(decode(make(), text(random, copied), costs, switch, random)[0])
    return np.array(results)


@MODELS
@pytest.mark.parametrize("dearer", [1.0, 1.2, 1.5])  # forward passes over several tokens, than measured
def test_a_text_that_repeats_nothing_is_decoded_as_fast_as_without_drafts(costs, switch, dearer):
    true = Costs(0.0, {n: seconds * (dearer if n > 1 else 1) for n, seconds in costs.main.items()})

    class Policy(LookupDraftLength):
        def __init__(self):
            super().__init__(costs)

    results = speedups(Policy, 0.0, true, switch)
    assert results.mean() > 0.99 and results.min() > 0.97


@MODELS
@pytest.mark.parametrize("copied", [0.1, 0.3, 0.6])
def test_copied_text_is_decoded_faster_than_with_any_fixed_length(costs, switch, copied):
    adaptive = speedups(lambda: LookupDraftLength(costs), copied, costs, switch, texts=3).mean()
    fixed = [speedups(lambda k=k: FixedDraftLength(k), copied, costs, switch, texts=3).mean() for k in (0, 2, 5, 10)]
    assert adaptive > 1.02 * max(fixed)


@MODELS
def test_drafting_resumes_where_a_text_begins_to_repeat(costs, switch):
    """The drafts that were not made are followed in the text, so nothing has to be drafted to find out."""
    random = np.random.default_rng(3)
    policy = LookupDraftLength(costs)
    policy._balance = policy.LEAST
    speedup, drafts = decode(policy, text(random, 0.0, n=2000), costs, switch, random)
    assert speedup > 0.99
    policy._balance = policy.LEAST
    speedup, drafts = decode(policy, text(random, 0.6), costs, switch, random)
    fresh, _ = decode(LookupDraftLength(costs), text(np.random.default_rng(4), 0.6), costs, switch, random)
    assert drafts > 100 and speedup > 0.8 * fresh


def test_a_plain_forward_pass_measured_as_too_slow_is_corrected():
    """Drafting seems to gain if plain decoding is believed to take a third longer than it does."""
    costs, switch = LLAMA
    policy = LookupDraftLength(Costs(0.0, dict.fromkeys(costs.main, 120.0)))
    random = np.random.default_rng(7)
    decode(policy, text(random, 0.0, n=400), costs, switch, random)
    assert decode(policy, text(random, 0.0, n=2000), costs, switch, random)[0] > 0.985


def test_the_first_draft_after_plain_decoding_pays_for_the_way_back():
    """Tokens at 0.45 and more gain 1.8 at most and cost 0.3 x 1.3; the way back costs as much again, or 2 x 1.3."""
    policy = LookupDraftLength(Costs(0.0, {1: 1.0, 17: 1.0}))
    assert policy.should_draft(0, lambda: 0.45)
    policy._switch = 2.0
    assert not policy.should_draft(0, lambda: 0.45)
    policy._was_plain = False
    assert policy.should_draft(0, lambda: 0.45)


def test_the_balance_has_bounds():
    policy = LookupDraftLength(Costs(0.0, {1: 1.0, 17: 1.0}))
    for tokens, bound in ((0, policy.LEAST), (LONGEST, policy.MOST)):
        for _ in range(20):
            policy.update(LONGEST, tokens, 0.0, 2.0)
        assert policy._balance == bound


def test_acceptance_is_learned_from_proposals_that_were_declined():
    policy = LookupDraftLength(Costs(0.0, {1: 1.0, 17: 40.0}))  # never worth it
    for _ in range(100):
        assert not policy.should_draft(0, lambda: LEVELS[0])
        policy.learn_declined(True)
        policy.update(0, 0, 0.0, 1.0)
    acceptance = policy._accepted / policy._judged
    assert acceptance[0] > 0.8 and acceptance[1:].tolist() == pytest.approx(LEVELS[1:].tolist())


def test_what_follows_a_rejected_token_is_not_learned():
    policy = LookupDraftLength(Costs(0.0, {1: 1.0, 17: 1.1}))
    for drafted, level in enumerate(LEVELS[2:]):
        assert policy.should_draft(drafted, lambda: level)  # noqa: B023
    policy.update(4, 1, 0.0, 1.1)
    moved = policy._accepted / policy._judged - LEVELS
    assert moved[2] > 0 > moved[3] and not moved[[0, 1, 4, 5]].any()


@pytest.mark.parametrize("drafted", [0, 5])
def test_a_declined_proposal_of_an_aborted_iteration_is_forgotten(drafted):
    policy = LookupDraftLength(Costs(0.0, {1: 1.0, 17: 1.1}))
    for n in range(drafted + 1):
        policy.should_draft(n, lambda: 0.97)
    policy.should_draft(0, lambda: LEVELS[0])  # another request
    policy.update(1, 1, 0.0, 1.0)
    moved = policy._accepted / policy._judged - LEVELS
    assert moved[0] > 0 and not moved[1:].any()


def test_repeatable_decisions_do_not_depend_on_the_clock():
    costs, switch = SMOLLM2

    def drafts(noise):
        policy = LookupDraftLength(costs)
        policy.reset(repeatable=True)
        return decode(policy, text(np.random.default_rng(5), 0.3), costs, switch, np.random.default_rng(6), noise)[1]

    assert drafts(0.0) == drafts(0.5) > 0


def test_after_a_reset_nothing_of_other_texts_is_left():
    costs, switch = SMOLLM2

    def drafts(policy):
        policy.reset(repeatable=True)
        return decode(policy, text(np.random.default_rng(5), 0.3), costs, switch, np.random.default_rng(6))

    used = LookupDraftLength(costs)
    decode(used, text(np.random.default_rng(8), 0.0), costs, switch, np.random.default_rng(9))
    assert drafts(used) == drafts(LookupDraftLength(costs))


def test_the_first_plain_forward_pass_after_a_draft_is_no_measure_of_plain_decoding():
    costs, switch = SMOLLM2
    policy = LookupDraftLength(costs)
    plain, before = policy._plain(), policy._switch
    for _ in range(50):
        policy.update(4, 2, 0.0, float(policy._verify.seconds[5]))
        policy.update(0, 0, 0.0, plain + switch)
    assert policy._plain() == pytest.approx(plain)
    assert policy._switch == pytest.approx(switch, rel=0.05) != before


def test_the_description_says_what_was_measured():
    policy = LookupDraftLength(SMOLLM2[0])
    assert "no draft token verified yet" in policy.describe() and "speedup" not in policy.describe()
    for n in range(3):
        policy.should_draft(n, lambda: 0.97)
    policy.update(3, 3, 0.0, 21.0)
    assert re.search(r"acceptance 1.00 over 3 draft tokens, 4.00 tokens per forward pass, speedup", policy.describe())


def test_random_proposals_must_not_be_declined():
    proposer = DraftModelProposer(None, 10)
    with pytest.raises(ValueError, match="is for prompt lookup"):
        Decoder(None, proposer, LookupDraftLength(SMOLLM2[0]))
