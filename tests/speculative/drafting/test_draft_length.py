"""The draft-length policies, on simulated costs: their decisions do not depend on a clock."""

import re

import numpy as np
import pytest
from openvino_genai import GenerationConfig

from speculative.drafting.budget import ComparisonSchedule, DraftBudget, OmittedCopies
from speculative.drafting.latency_curve import LatencyTable
from speculative.drafting.policy import (
    LONGEST,
    AdaptiveDraftLength,
    ConfidenceDraftLength,
    Costs,
    FixedDraftLength,
    describe_outcome,
    policy_from_params,
)
from speculative.sampling.params import SamplingParams

COSTS = Costs(draft=2.0, main={1: 43, 2: 44, 3: 45, 4: 46, 5: 47, 6: 49, 8: 52, 11: 58, 17: 72})  # a 1.1 B model, ms
SECONDS = COSTS.verify()


def long(value):
    """A parameter of `make test-all`."""
    return pytest.param(value, marks=pytest.mark.long)


def decode(rule, chances, new_tokens, random, draft=2.0, noise=0.1, first=0.0, main=SECONDS, switch=0.0):
    """Tokens per second of a text whose draft tokens are each accepted with a probability from `chances`, and the
    iterations.

    The draft's confidence is calibrated. Times vary. `switch` is the extra time of a forward pass whose number of
    tokens differs from that of the pass before.
    """
    tokens = seconds = before = 0
    iterations = []
    while tokens < new_tokens:
        accepted, drafted, chance = 0, 0, None
        drafting = 0.0
        while rule.should_draft(drafted, lambda: chance):  # noqa: B023
            chance = float(random.choice(chances))
            accepted += accepted == drafted and random.random() < chance
            step = (draft + first * (drafted == 0)) * random.normal(1, noise)
            rule.observe_step(step)
            drafted, drafting = drafted + 1, drafting + step
        width = rule.pass_width.width_for(drafted + 1) if getattr(rule, "pass_width", None) else drafted + 1
        spent = (
            drafting,
            (main[width] + switch * (width != before)) * random.normal(1, noise / 2),
        )
        before = width
        rule.update(drafted, accepted, *spent)
        tokens += accepted + 1
        seconds += sum(spent)
        iterations.append((drafted, accepted))
    return tokens / seconds, iterations


def best_fixed(chances, costs=COSTS):
    """Tokens per second of the best fixed draft length: Leviathan et al. 2023, with a cost of verification."""
    tau = np.cumsum(np.mean(chances) ** np.arange(LONGEST + 1))
    return (tau / (costs.verify()[1:] + costs.drafting())).max()


@pytest.mark.parametrize(
    "chances", [[0.0], [0.1], [0.3], [0.5], [0.75], [0.9], [0.97], [0.2, 0.95], [0.05, 0.6, 0.99]], ids=str
)
def test_adaptive_length_is_as_fast_as_the_best_fixed_length(chances):
    for repeatable in (False, True):
        speeds = []
        for seed in range(3):
            rule = AdaptiveDraftLength(COSTS)
            rule.reset(repeatable)
            speeds.append(decode(rule, chances, 3000, np.random.default_rng(seed))[0])
        assert np.mean(speeds) > 0.96 * best_fixed(chances)


@pytest.mark.parametrize("chance", [0.5, 0.75, 0.9])
def test_expensive_first_draft_step_does_not_shorten_drafts(chance):
    """The main model evicts the draft from the CPU caches, so its first step is slow."""
    costs = Costs(draft=12.0, main=COSTS.main, draft_further=2.0)
    speed, _ = decode(AdaptiveDraftLength(costs), [chance], 6000, np.random.default_rng(6), first=10.0)
    assert speed > 0.96 * best_fixed([chance], costs)


def test_adaptive_beats_fixed_lengths_if_confidence_is_informative():
    random = np.random.default_rng(1)
    chances = [0.05, 0.99, 0.99]
    assert decode(AdaptiveDraftLength(COSTS), chances, 6000, random)[0] > 1.05 * best_fixed(chances)


def test_useless_draft_costs_little_and_is_probed_occasionally():
    random = np.random.default_rng(2)
    alone, _ = decode(FixedDraftLength(0), [0.0], 2000, random)
    rule = AdaptiveDraftLength(COSTS)
    speed, iterations = decode(rule, [0.0], 2000, random)
    assert speed > 0.98 * alone and "not worth its cost" in rule.describe()
    drafted = [k for k, _ in iterations[500:]]
    assert 0 < sum(drafted) < 40
    _, iterations = decode(rule, [0.95], 2000, random)  # the text becomes predictable for the draft
    assert np.mean([k for k, _ in iterations[-50:]]) > 3


def test_wrong_costs_are_corrected_from_measured_times():
    """A draft step takes as long as a main-model step, but was measured at a twentieth of that."""
    random = np.random.default_rng(3)
    alone, _ = decode(FixedDraftLength(0), [0.6], 2000, random)
    rule = AdaptiveDraftLength(COSTS)
    decode(rule, [0.6], 500, random, draft=40.0)
    assert decode(rule, [0.6], 2000, random, draft=40.0)[0] > 0.95 * alone


@pytest.mark.parametrize("cost_factor", [1.0, long(1.2), 1.5])  # true over measured cost of passes over several tokens
@pytest.mark.parametrize("chances", [long([0.0]), long([0.1]), [0.2], [0.02, 0.3]], ids=str)
@pytest.mark.parametrize("draft", [2.0, long(4.0)])
def test_at_most_one_percent_slower_than_plain_decoding(cost_factor, chances, draft):
    """Even if the measured costs are wrong. The mean of several runs, because times vary."""
    main = SECONDS * np.where(np.arange(len(SECONDS)) > 1, cost_factor, 1.0)
    speeds = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        speed, _ = decode(AdaptiveDraftLength(COSTS), chances, 2000, random, draft=draft, main=main)
        speeds.append(speed * SECONDS[1])
    assert np.mean(speeds) > 0.99


STEEP = Costs(  # a small model on a processor with AMX, ms: a second token takes nearly as long as the first
    draft=0.5, draft_further=0.4, main={1: 3.3, 2: 5.7, 3: 6.1, 4: 6.6, 5: 7.9, 6: 8.0, 8: 8.0, 11: 8.2, 17: 9.4}
)


@pytest.mark.parametrize("chances", [[0.9], [0.75], [0.3, 1.0, 1.0, 1.0]], ids=str)
def test_good_draft_is_kept_after_a_few_rejections(chances):
    """If few draft tokens gain nothing and many gain much, one rejected draft costs as much as three tokens."""
    best = best_fixed(chances, STEEP)
    speeds = [
        decode(AdaptiveDraftLength(STEEP), chances, 2000, np.random.default_rng(seed), 0.4, 0.1, 0.1, STEEP.verify())[0]
        for seed in range(12)
    ]
    assert np.mean(speeds) > 0.96 * best and min(speeds) > 0.85 * best


HEAD = Costs(  # SmolLM2-135M with an EAGLE-3 head on an AMD EPYC, ms
    draft=1.2, draft_further=0.5, main={1: 8.2, 2: 9.1, 3: 9.5, 5: 10.0, 9: 11.6, 17: 14.0}, main_change=4.4
)


@pytest.mark.parametrize(("texts", "least"), [([0.6, 0.1, 0.6], 1.06), ([0.5, 0.15, 0.5], 1.02), ([0.45], 1.13)])
def test_small_gain_is_kept_despite_texts_that_lose(texts, least):
    """If drafting gains overall, it is not given up for good after a text on which it loses, and the gain is not spent
    on comparing it with plain decoding too often. Plain decoding has speed 1."""
    speeds = []
    for seed in range(12):
        rule, random, seconds = AdaptiveDraftLength(HEAD), np.random.default_rng(seed), 0.0
        rule.pass_width = HEAD.pass_width()
        for chance in texts * (24 // len(texts)):
            speed, _ = decode(rule, [chance], 90, random, 0.5, 0.1, 0.7, HEAD.verify(), HEAD.main_change)
            seconds += 90 / speed
        speeds.append(24 * 90 * HEAD.main[1] / seconds)
    assert min(speeds) > least


@pytest.mark.parametrize("chances", [[0.75], [0.5, 0.95]], ids=str)
def test_good_draft_is_kept_if_plain_decoding_was_measured_too_fast(chances):
    """The costs were measured on an idle machine that is busy now: every iteration with a draft seems to lose."""
    true = Costs(draft=4.0, draft_further=3.4, main={1: 105, 2: 140, 3: 155, 4: 165, 5: 180, 6: 182, 8: 190, 17: 220})
    quiet = Costs(draft=4.0, draft_further=3.4, main={1: 60, 2: 66, 3: 70, 4: 73, 5: 75, 6: 77, 8: 82, 17: 110})
    best = best_fixed(chances, true)
    speeds = [
        decode(AdaptiveDraftLength(quiet), chances, 1000, np.random.default_rng(seed), 3.4, 0.1, 0.6, true.verify())[0]
        for seed in range(8)
    ]
    assert np.mean(speeds) > 0.93 * best


def test_text_that_becomes_predictable_is_noticed():
    random = np.random.default_rng(8)
    rule = AdaptiveDraftLength(COSTS)
    decode(rule, [0.0], 3000, random)
    _, iterations = decode(rule, [0.95], 1000, random)
    assert np.mean([k for k, _ in iterations[-50:]]) > 3


def test_description_reports_measurements():
    rule = AdaptiveDraftLength(COSTS)
    assert "no draft token verified yet" in rule.describe() and "speedup" not in rule.describe()
    rule.update(0, 0, 0.0, 43.0)  # plain
    for times in (1, 3):
        for _ in range(times):
            rule.update(4, 4, 8.0, 47.0)  # all four accepted
            rule.update(4, 1, 8.0, 47.0)  # the second was rejected, and the others were not verified
        why = rule.describe()
        assert ("speedup" in why) == (times == 3)  # not after the first six tokens
    assert "per-token acceptance 0.83 over 24 draft tokens, 3.22 tokens per forward pass, estimated speedup 2." in why
    assert "expected" not in why
    best, cost, tokens = re.fullmatch(r"about (\d+) draft tokens?: .* and ([\d.]+) ms for (\d+)", why).groups()
    assert int(tokens) == int(best) + 1 and cost == f"{rule._verify.seconds[int(tokens)] * 1000:.1f}"


def test_fewer_tokens_never_cost_more():
    """Plain steps are rare while drafting gains, and the first pass of a shape is slow: not the real cost."""
    rule = AdaptiveDraftLength(COSTS)
    for _ in range(20):
        rule.update(0, 0, 0.0, 2 * SECONDS[1])
    assert rule._verify.seconds[1] > 1.5 * SECONDS[1]
    rule.update(4, 2, 8.0, SECONDS[5])
    assert max(rule._verify.seconds[:5]) <= rule._verify.seconds[5] < 1.5 * SECONDS[5]


def test_costs_are_interpolated_by_number_of_tokens():
    costs = Costs(draft=3.0, draft_further=1.0, main={1: 10, 2: 9, 4: 13})  # the machine was busy at the first
    assert costs.drafting()[:4].tolist() == [0, 3, 4, 5]
    assert costs.verify()[1:6].tolist() == [9, 9, 11, 13, 13]
    assert [len(costs.drafting()), len(costs.verify())] == [LONGEST + 1, LONGEST + 2]


def test_plain_pass_costs_no_more_than_one_over_two_tokens_until_timed():
    """It was measured under load, and is not repeated while drafting gains."""
    rule = AdaptiveDraftLength(COSTS)
    for _ in range(30):
        rule.update(1, 1, 2.0, 30.0)
    assert rule._plain_cost() == rule._verify.seconds[2] < 33
    for _ in range(rule.MIN_PLAIN_SAMPLES):
        rule.update(0, 0, 0.0, 43.0)
    assert rule._plain_cost() == pytest.approx(43)


def test_rate_to_beat_is_that_of_timed_plain_decoding():
    rule = AdaptiveDraftLength(COSTS)
    for _ in range(3):
        rule.update(0, 0, 0.0, 0.8 * SECONDS[1])
    assert rule._rate(0) == 1 / rule._plain_cost() > 1.1 / SECONDS[1]
    for _ in range(20):
        rule.update(LONGEST, 0, 32.0, SECONDS[-1])
    assert rule._rate(1) == rule._rate(0)  # not the lower one of drafts that lose


def test_rate_to_beat_by_further_tokens_is_the_recent_one():
    rule = AdaptiveDraftLength(COSTS)
    rule.reset(repeatable=True)
    for accepted, leaf in ((4, False), (2, True)):
        rule.update(4, accepted, 0.0, 0.0, leaf)
    tokens, seconds = 5 * rule.DECAY + 4, (rule.DECAY + 1) * (COSTS.drafting()[4] + SECONDS[5])
    assert rule._rate(1) == pytest.approx(tokens / seconds) and rule._rate(0) == 1 / SECONDS[1]


@pytest.mark.parametrize(("accepted", "leaf"), [(1, False), (0, True)])
def test_saved_time_is_added_to_the_budget(accepted, leaf):
    rule = AdaptiveDraftLength(COSTS)
    rule.reset(repeatable=True)
    rule.update(1, accepted, 0.0, 0.0, leaf)
    taken = (COSTS.draft + SECONDS[2]) / SECONDS[1]  # for two tokens, in plain passes
    assert rule._budget.remaining(SECONDS[1]) == pytest.approx(DraftBudget.START + 2 - taken * (1 - DraftBudget.SHARE))


def test_change_of_size_after_a_prompt_is_not_charged():
    """Plain decoding has it, too."""
    rule, seconds = AdaptiveDraftLength(HEAD), []
    rule.reset(repeatable=True)
    rule.pass_width = HEAD.pass_width()
    for drafted in (4, 4, 16, 16):
        rule.pass_width.width_for(drafted + 1)
        rule.update(drafted, 0, 0.0, 0.0)
        seconds.append(rule._all_seconds)
    five, seventeen = HEAD.drafting()[[4, 16]] + HEAD.verify()[[5, 17]]
    assert np.diff([0.0, *seconds]) == pytest.approx([five, five, seventeen + HEAD.main_change, seventeen])


@pytest.mark.parametrize("drafted", [0, 3, LONGEST])
def test_measured_time_changes_the_cost_of_its_size_most(drafted):
    rule = AdaptiveDraftLength(COSTS)
    draft, verify = rule._drafting.seconds, np.array(rule._verify.seconds)
    for _ in range(drafted):
        rule.observe_step(COSTS.draft)
    rule.update(drafted, 0, draft[drafted], verify[drafted + 1])  # as expected
    assert rule._drafting.seconds == draft and rule._verify.seconds == verify.tolist()
    rule.update(drafted, 0, draft[drafted], 1.5 * verify[drafted + 1])
    assert np.argmax(np.array(rule._verify.seconds[1:]) / verify[1:]) == drafted  # the other entry is of no tokens


def test_each_of_the_first_draft_steps_is_learned_by_its_own_time():
    """The first one follows the main model's forward pass, which evicts the draft from the CPU caches."""
    rule = AdaptiveDraftLength(COSTS)
    for _ in range(60):
        for seconds in (4.0, 3.0, 1.0, 1.0):
            rule.observe_step(seconds)
        rule.update(4, 4, 9.0, SECONDS[5])
    assert np.diff(rule._drafting.seconds)[:6] == pytest.approx([4, 3, 1, 1, 1, 1], rel=0.01)


def test_draft_steps_of_an_iteration_that_is_not_judged_are_not_learned():
    """For example an iteration with tokens that a grammar forces: it is not recorded."""
    rule = AdaptiveDraftLength(COSTS)
    rule.update(1, 1, 2.0, SECONDS[2])
    rule.observe_step(50.0)
    assert rule.should_draft(0, None)
    rule.observe_step(COSTS.draft)
    rule.update(1, 1, 2.0, SECONDS[2])
    assert rule._drafting.seconds == COSTS.drafting().tolist()


def test_first_step_after_plain_decoding_is_not_learned():
    """It also processes the tokens that were decoded without the draft."""
    rule = AdaptiveDraftLength(COSTS)
    for _ in range(60):
        rule.update(0, 0, 0.0, SECONDS[1])
        rule.observe_step(100.0)
        rule.update(1, 1, 100.0, SECONDS[2])
    assert rule._drafting.seconds[1] == COSTS.draft


def test_probes_get_rarer_until_one_succeeds():
    rule = AdaptiveDraftLength(Costs(draft=30.0, main=COSTS.main), prior_acceptance=0.0)
    rule.reset(repeatable=True)

    def plain_before_a_probe():
        for plain in range(100):
            if rule.should_draft(0, None):
                return plain
            rule.update(0, 0, 0.0, 0.0)

    gaps = []
    for accepted in (0, 0, 0, 0, 0, 1, 0, 0):
        gaps.append(plain_before_a_probe())
        rule.update(1, accepted, 0.0, 0.0)
    assert gaps == [8, 16, 32, 64, 64, 64, 0, 16]


def test_reset_forgets_everything():
    def iterations(rule):
        rule.reset(repeatable=True)
        return decode(rule, [0.4, 0.9], 300, np.random.default_rng(9))[1]

    used = AdaptiveDraftLength(COSTS)
    decode(used, [0.0], 500, np.random.default_rng(10))
    assert iterations(used) == iterations(AdaptiveDraftLength(COSTS))


def test_budget_is_spent_refilled_and_capped():
    budget = DraftBudget(2.0)
    budget.update(plain=1.0, seconds=3.1, tokens=1)
    assert budget.remaining(1.0) == pytest.approx(2 - 2.1 + 3.1 * DraftBudget.SHARE)
    for _ in range(30):
        budget.update(plain=1.0, seconds=1.0)
    assert budget.remaining(1.0) == pytest.approx(2 - 2.1 + 33.1 * DraftBudget.SHARE)
    budget.update(plain=1.0, seconds=1.0, tokens=1000)
    assert budget.remaining(1.0) == DraftBudget.MAX
    budget.update(plain=1.0, seconds=DraftBudget.MAX + 1, tokens=1)
    assert -0.5 < budget.remaining(1.0) < 0.5


def test_recent_losses_are_revalued_by_the_plain_pass_time():
    budget = DraftBudget(8.0)
    for _ in range(3):
        budget.update(plain=1.0, seconds=4.0, tokens=3)
    assert budget.remaining(1.0) < 6 and budget.remaining(2.0) > 10


def test_budget_is_low_if_half_of_it_is_lost():
    budget = DraftBudget(8.0)
    assert not budget.is_low(1.0)
    for lost, is_low in ((3.0, False), (2.0, True)):
        budget.update(plain=1.0, seconds=lost, tokens=0)
        assert budget.is_low(1.0) == is_low


def test_comparisons_with_plain_decoding_get_rarer():
    schedule, gaps = ComparisonSchedule(), []
    for _ in range(5):
        gaps.append(0)
        while not schedule.is_due and gaps[-1] < 1000:
            schedule.observe_drafted()
            gaps[-1] += 1
        schedule.observe_plain()
    assert gaps == [64, 128, 256, 512, 512]


@pytest.mark.parametrize(("correct", "tokens"), [([False], 1), ([True, False], 2), ([True, True, True], 4)])
def test_omitted_copies_are_accounted_as_if_they_were_made(correct, tokens):
    omitted, budget, expected = OmittedCopies(), DraftBudget(-1.0), DraftBudget(-1.0)
    verify = LatencyTable(10.0 + np.arange(10), change=4.0)
    for copies, was_correct in zip((3, 5, 5), correct, strict=False):
        assert budget.remaining(11.0) == -1
        omitted.update(budget, copies, was_correct, 11.0, verify)
    expected.update(11.0, 14.0 + 4.0 * OmittedCopies.CHANGE_SHARE, tokens)
    omitted.update(budget, 0, False, 11.0, verify)  # nothing was omitted
    assert budget.remaining(11.0) == expected.remaining(11.0)


def test_repeatable_decisions_ignore_the_clock():
    def run(noise):
        rule = AdaptiveDraftLength(COSTS)
        rule.reset(repeatable=True)
        iterations, random = [], np.random.default_rng(4)
        for _ in range(200):
            drafted = 0
            while rule.should_draft(drafted, lambda: 0.7):
                drafted += 1
            rule.update(drafted, min(drafted, int(random.integers(0, 5))), noise * drafted, noise)
            iterations.append(drafted)
        return iterations

    assert run(0.001) == run(50.0)


def test_fixed_and_confidence_policies():
    assert [FixedDraftLength(2).should_draft(i, lambda: 0.0) for i in range(4)] == [True, True, False, False]
    rule = ConfidenceDraftLength(0.5, longest=3)
    assert rule.should_draft(0, None) and rule.should_draft(1, lambda: 0.5) and not rule.should_draft(1, lambda: 0.49)
    assert not rule.should_draft(3, lambda: 1.0)


@pytest.mark.parametrize(("seen", "counts_as"), [(100, 2), (9, 2), (0.001, 0.5), (1.5, 1.5)])
def test_single_outlier_time_counts_at_most_twofold(seen, counts_as):
    def after(times):
        rule = AdaptiveDraftLength(COSTS)
        rule._drafted_last_time = True
        rule.observe_step(times * COSTS.draft)
        rule.update(3, 1, times * rule._drafting.seconds[3], times * rule._verify.seconds[4])
        return [*rule._drafting.seconds, *rule._verify.seconds]

    assert after(seen) == after(counts_as) != after(1.0)


def test_single_outlier_time_does_not_exhaust_the_budget():
    def left(times):
        rule = AdaptiveDraftLength(COSTS)
        rule.update(3, 1, times * rule._drafting.seconds[3], times * rule._verify.seconds[4])
        return rule._budget.remaining(rule._plain_cost())

    assert left(100) == left(9) > 0


def test_plain_pass_measured_under_load_is_measured_again():
    """Otherwise drafting seems to gain so much that it is never compared with plain decoding again."""
    costs = Costs(draft=2.0, main={1: 10.0, 2: 10.4, 17: 16.4})
    rule, random = AdaptiveDraftLength(costs), np.random.default_rng(0)
    while rule._plain_seen < rule.MIN_PLAIN_SAMPLES:
        rule.update(0, 0, 0.0, 10.0)
    for _ in range(40):
        rule.update(0, 0, 0.0, 25.0)
    assert rule._plain_cost() > 20
    decode(rule, [0.6], 15000, random, main=costs.verify())
    assert rule._plain_cost() < 13 and float(re.search(r"speedup (.*?)x", rule.describe())[1]) < 1.8


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, None),
        (dict(num_assistant_tokens=3), FixedDraftLength(3)),
        (dict(assistant_confidence_threshold=0.25), ConfidenceDraftLength(0.25)),
    ],
    ids=str,
)
def test_request_config_selects_the_policy(config, policy):
    assert policy_from_params(SamplingParams.resolve(GenerationConfig(**config))) == policy


SMOLLM2 = Costs(draft=1.0, main={1: 21.4, 3: 26.4, 5: 30.0, 17: 60.0})  # ms, measured with the same number of tokens
SWITCH = 10.0  # extra ms of a forward pass whose number of tokens differs from that of the one before


@pytest.mark.parametrize("chance", [0.6, 0.9])
def test_good_draft_keeps_its_gain_with_changing_pass_sizes(chance):
    best = best_fixed([chance], SMOLLM2)  # of a fixed number of tokens, which never changes
    options = {"draft": 1.0, "main": SMOLLM2.verify(), "switch": SWITCH}
    speeds = [
        decode(AdaptiveDraftLength(SMOLLM2), [chance], 1500, np.random.default_rng(seed), **options)[0]
        for seed in range(6)
    ]
    assert np.mean(speeds) > 0.8 * best


def test_outcome_without_measured_time_has_no_speedup():
    """One forward pass was faster than the cost of its size change in the cost model."""
    assert describe_outcome(4, 2, 1, 0.0, 0.01) == (
        "per-token acceptance 0.50 over 4 draft tokens, 3.00 tokens per forward pass"
    )
    assert "speedup 1.50x" in describe_outcome(40, 20, 10, 0.2, 0.01)
