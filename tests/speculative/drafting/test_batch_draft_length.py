"""The draft-length policy of a batch, on simulated costs: its decisions do not depend on a clock."""

import re

import numpy as np
import pytest

from speculative.drafting.batch_policy import MAX_PADDED, BatchDraftLength, Comparison
from speculative.drafting.budget import DraftBudget
from speculative.drafting.latency_curve import KNOTS, LatencyCurve
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs
from speculative.models.paged_model import rounded_up


def long(value):
    """A parameter of `make test-all`."""
    return pytest.param(value, marks=pytest.mark.long)


def large(n):
    """A 1.1 B model on two cores, in ms: weights are read once for 6 tokens or so, then every token costs."""
    return np.maximum(30 + 0.5 * n, 12 + 4.5 * n) * (np.asarray(n) > 0)


def slow(n):
    """Every token costs as much as the first, so drafting cannot gain anything."""
    return 40.0 * np.asarray(n)


def small(n):
    """Its draft model."""
    return (1.8 + 0.2 * n) * (np.asarray(n) > 0)


def curve(cost):
    return LatencyCurve({int(n): float(cost(n)) for n in KNOTS})


def rule_of(first=small, further=None):
    return BatchDraftLength(curve(large), curve(first), curve(further or first))


def without_learning(rule):
    """A policy that does not learn costs or losses from measured times."""
    rule.draft.update = rule.draft_further.update = lambda *_: None
    rule._compare_with_plain = lambda *_: None
    return rule


class Text:
    def __init__(self, rule, chances):
        self.estimate, self.chances = rule.estimate(), chances


def decode(rule, texts, iterations, random, main=large, draft=small, further=None, prompts=0, change=0.0):
    """Tokens per second, and draft tokens by iteration. The draft's confidence equals its acceptance probability. A
    forward pass of the main model of another size than the last takes `change` more."""
    gained = seconds = 0
    drafted = []
    for _ in range(iterations):
        for text in texts:
            text.estimate.begin()
        rule.begin([text.estimate for text in texts], len(texts))
        accepted, right = [0] * len(texts), [True] * len(texts)
        tokens = len(texts)
        spent = 0.0
        while True:
            able = [i for i, text in enumerate(texts) if text.estimate.drafted < LONGEST]
            chosen = [able[j] for j in rule.choose([texts[i].estimate for i in able], tokens + prompts, 0)]
            if not chosen:
                break
            for i in chosen:
                chance = texts[i].chances[int(random.random() * len(texts[i].chances))]
                right[i] = right[i] and random.random() < chance
                accepted[i] += right[i]
                texts[i].estimate.draft(chance)
            cost = (further or draft) if tokens > len(texts) else draft
            took = float(cost(len(chosen))) * random.normal(1, 0.1)
            rule.update_draft(len(chosen), took)
            tokens, spent = tokens + len(chosen), spent + took
        width = rule.pass_width.width_for(rounded_up(tokens + prompts))
        took = (float(main(width)) + change * rule.pass_width.is_changed) * random.normal(1, 0.05)
        rule.update_main(tokens, prompts, sum(accepted) + len(texts), took)
        for text, n in zip(texts, accepted, strict=True):
            text.estimate.update(text.estimate.drafted, n)
        gained, seconds = gained + sum(accepted) + len(texts), seconds + spent + took
        drafted.append(tokens - len(texts))
    return gained / seconds, drafted


def best_alike(chances, texts, main=large, draft=small, further=None):
    """Tokens per second of the best fixed draft length, the same for all requests and iterations."""
    K = np.arange(LONGEST + 1)
    tau = np.cumsum(np.mean(chances) ** K)
    drafting = draft(texts) * (K > 0) + (further or draft)(texts) * np.maximum(K - 1, 0)
    return (texts * tau / (main(texts * (K + 1)) + drafting)).max()


@pytest.mark.parametrize("texts", [1, 3, 12])
@pytest.mark.parametrize("chances", [[0.0], [0.6], [0.95], [0.2, 0.95]], ids=str)
def test_as_fast_as_the_best_common_draft_length(texts, chances):
    rule = rule_of()
    rate, _ = decode(rule, [Text(rule, chances) for _ in range(texts)], 500, np.random.default_rng(0))
    assert rate > 0.95 * best_alike(chances, texts)


def test_faster_than_any_common_draft_length_if_requests_differ():
    rule = rule_of()
    texts = [Text(rule, [chance]) for chance in (0.05, 0.05, 0.95, 0.95)]
    rate, _ = decode(rule, texts, 500, np.random.default_rng(1))
    K = np.arange(LONGEST + 1)
    tau = 2 * np.cumsum(0.05**K) + 2 * np.cumsum(0.95**K)
    alike = (tau / (large(4 * (K + 1)) + K * small(4))).max()
    assert rate > 1.1 * alike


def test_drafting_shrinks_under_load_and_recovers():
    """From one request to many and back, with continuing acceptance estimates."""
    random = np.random.default_rng(2)
    rule = rule_of()
    texts = [Text(rule, [0.8]) for _ in range(24)]
    by_load = {}
    for n in (1, 4, 24, 4, 1):
        _, drafted = decode(rule, texts[:n], 200, random)
        by_load.setdefault(n, []).append(np.mean(drafted[50:]) / n)
    assert by_load[1][0] > 2.5 > by_load[4][0] > 0.1 > by_load[24][0]
    assert by_load[1][1] == pytest.approx(by_load[1][0], abs=1)
    assert by_load[4][1] == pytest.approx(by_load[4][0], abs=0.4)


def test_single_request_is_drafted_as_by_the_single_request_policy():
    random = np.random.default_rng(3)
    rule = rule_of()
    _, drafted = decode(rule, [Text(rule, [0.7])], 1000, random)
    single = AdaptiveDraftLength(Costs(float(small(1)), {n: float(large(n)) for n in range(1, LONGEST + 2)}))
    lengths = []
    for _ in range(1000):
        n = accepted = 0
        while single.should_draft(n, lambda: 0.7):
            accepted += accepted == n and random.random() < 0.7
            n += 1
        single.update(n, accepted, n * float(small(1)), float(large(n + 1)))
        lengths.append(n)
    assert np.mean(drafted[200:]) == pytest.approx(np.mean(lengths[200:]), abs=0.7)


def test_useless_draft_costs_little_and_is_probed_occasionally():
    random = np.random.default_rng(4)
    rule = rule_of()
    texts = [Text(rule, [0.0]) for _ in range(2)]
    decode(rule, texts, 300, random)
    rate, drafted = decode(rule, texts, 700, random)
    assert rate > 0.98 * 2 / large(2) and 0 < sum(drafted) < 40
    texts[0].chances = texts[1].chances = [0.95]
    _, drafted = decode(rule, texts, 300, random)
    assert np.mean(drafted[-50:]) > 4


@pytest.mark.parametrize("cost_factor", [1.0, long(1.2), 1.5])  # true over measured cost of passes with drafts
@pytest.mark.parametrize("chances", [long([0.0]), [0.15], long([0.02, 0.3])], ids=str)
@pytest.mark.parametrize("texts", [1, 4])
def test_at_most_one_percent_slower_than_plain_decoding(cost_factor, chances, texts):
    """Within 2,000 tokens, even if the measured costs are wrong. The mean of 3 runs, because times vary."""

    def main(n):
        return large(n) * np.where(np.asarray(n) > texts, cost_factor, 1.0)

    rates = []
    for seed in range(3):
        rule = rule_of()
        each = [Text(rule, chances) for _ in range(texts)]
        rates.append(decode(rule, each, 2000, np.random.default_rng(seed), main=main)[0])
    assert np.mean(rates) > 0.99 * texts / large(texts)


def little(n):
    """SmolLM2-135M on an AMD EPYC, in ms; a change of size takes 4.4 more."""
    return np.interp(n, [0, 1, 2, 4, 8, 16, 32, 64], [0, 8.2, 9.1, 9.8, 11.4, 13.6, 18, 27])


@pytest.mark.parametrize(("texts", "gain"), [(1, 1.05), (4, 1.03)])
def test_pass_keeps_its_size_if_a_change_is_expensive(texts, gain):
    """Padding or draft tokens fill the pass: as fast as a fixed length, which never changes the size."""
    chances, rates = [0.2, 0.8], []
    for known in (0.0, 4.4):
        rule = BatchDraftLength(curve(little), curve(small), curve(small), known)
        each = [Text(rule, chances) for _ in range(texts)]
        rates.append(decode(rule, each, 1000, np.random.default_rng(5), little, change=4.4)[0])
    assert rates[1] > gain * rates[0] and rates[1] > 0.95 * best_alike(chances, texts, little)


def test_wide_pass_is_not_padded():
    rule = BatchDraftLength(curve(large), curve(small), curve(small), 1000.0)
    sizes = [rule.pass_width.width_for(n) for n in (8, 4, MAX_PADDED + 16, MAX_PADDED + 16, 4)]
    assert sizes == [8, 8, MAX_PADDED + 16, MAX_PADDED + 16, 4] and rule.pass_width.is_changed


def test_description_reports_measurements():
    rule = rule_of()
    assert "no draft token verified yet" in rule.describe()
    texts = [Text(rule, [0.9]) for _ in range(2)]
    rate, _ = decode(rule, texts, 400, np.random.default_rng(9))
    found = re.search(
        r"acceptance ([\d.]+) over (\d+) draft .*, ([\d.]+) tokens .* ([\d.]+)x over plain", rule.describe()
    )
    accepted, judged, gained, speedup = map(float, found.groups())
    assert accepted == pytest.approx(0.9, abs=0.03) and judged > 1000 and gained > 2.5
    assert speedup == pytest.approx(rate / (2 / large(2)), rel=0.05)


def test_drafts_are_shorter_while_prompts_fill_the_pass():
    rule = rule_of()
    texts = [Text(rule, [0.65])]
    _, alone = decode(rule, texts, 200, np.random.default_rng(5))
    _, joined = decode(rule, texts, 200, np.random.default_rng(5), prompts=64)
    assert np.mean(joined[20:]) < np.mean(alone[20:]) - 0.5


def test_wrong_costs_are_corrected_from_measured_times():
    """A main model that is much slower for many tokens than measured, until the machine recovers."""
    random = np.random.default_rng(6)
    rule = rule_of()
    texts = [Text(rule, [0.8]) for _ in range(2)]
    _, before = decode(rule, texts, 300, random)
    _, drafted = decode(rule, texts, 800, random, main=slow)
    assert np.mean(drafted[-300:]) < 0.6
    _, drafted = decode(rule, texts, 2000, random)
    assert np.mean(drafted[-100:]) > 0.6 * np.mean(before[50:])


def test_kernel_compilation_for_new_sizes_does_not_stop_drafting():
    """The first forward pass of each size takes five times as long, once."""
    random, rule, seen = np.random.default_rng(9), rule_of(), set()

    def main(n):
        times = 1 if n in seen else 5
        seen.add(n)
        return times * large(n)

    texts = [Text(rule, [0.5, 0.95]) for _ in range(4)]
    for n in (1, 2, 3, 4):
        _, drafted = decode(rule, texts[:n], 80, random, main=main)
    assert len(seen) > 8 and np.mean(drafted[-20:]) > 2


def test_prompt_only_passes_do_not_change_draft_costs():
    rule = rule_of(further=lambda n: (0.8 + 0.2 * n) * (np.asarray(n) > 0))
    rule._draft_sizes, rule._main_sizes = {1}, set(range(2000))
    estimate = rule.estimate()
    estimate.begin()
    rule.begin([estimate], 1)
    assert rule.choose([estimate], 1, 0) == [0]
    estimate.draft(0.9)
    rule.update_draft(1, 0.5 * rule.draft(1))
    rule.update_main(2, 0, 2, rule.main(2))
    learned = rule.draft_further(1)
    for n in range(1, 4):
        rule.update_main(0, 256, 0, rule.main(256))
        assert rule.draft_further(1) == learned and rule._plain == n


def test_draft_measured_as_too_slow_is_probed_again():
    """The costs were measured under background load, at twenty times their true values."""
    random = np.random.default_rng(7)
    rule = rule_of(lambda n: 20 * small(n))
    texts = [Text(rule, [0.9])]
    _, first = decode(rule, texts, 50, random)
    assert not any(first)
    _, drafted = decode(rule, texts, 3000, random)
    assert np.mean(drafted[-100:]) > 2


@pytest.mark.parametrize(("texts", "chance", "mistaken"), [(1, 0.9, "dear"), (4, 0.6, "cheap")])
def test_first_draft_step_may_cost_more_than_further_steps(texts, chance, mistaken):
    """A policy that assumes the first step's cost for all steps, or the further steps' cost, is slower somewhere."""

    def first(n):
        return 3 * small(n) + 4 * (np.asarray(n) > 0)

    def rate(rule):
        each = [Text(rule, [chance]) for _ in range(texts)]
        return decode(rule, each, 400, np.random.default_rng(8), draft=first, further=small)[0]

    right = rate(rule_of(first, small))
    wrong = {"dear": rate(without_learning(rule_of(first))), "cheap": rate(without_learning(rule_of(small)))}
    assert right > 0.95 * best_alike([chance], texts, draft=first, further=small)
    assert right > 0.98 * max(wrong.values()) and right > 1.05 * wrong[mistaken]


def test_only_requests_with_confident_next_token_are_drafted():
    nothing = LatencyCurve({1: 0.0})
    rule = BatchDraftLength(LatencyCurve({1: 15.0, 101: 515.0}), nothing, nothing)
    right, wrong = rule.estimate(), rule.estimate()
    for estimate, confidence, accepted in ((right, 0.97, 1), (wrong, 0.2, 0)) * 50:
        estimate.begin()
        estimate.draft(confidence)
        estimate.update(1, accepted)
    for first, second, chosen in ((0.97, 0.2, [0]), (0.2, 0.97, [1]), (0.2, 0.2, []), (0.97, 0.97, [0, 1])):
        both = [rule.estimate(), rule.estimate()]
        rule.begin(both, 2)
        for estimate, confidence in zip(both, (first, second), strict=True):
            estimate.set_next(confidence)
        assert sorted(rule.choose(both, tokens=2, model_users=0)) == chosen


def test_budget_recovers_beside_requests_with_their_own_policy():
    rule = rule_of()
    estimate = rule.estimate()
    rule.begin([estimate], 2)
    comparison = rule._comparison
    comparison.budget.update(1.0, 14.0, 0.0)
    for _ in range(3000):
        estimate.begin()
        rule.begin([estimate], 2)
        rule.choose([estimate], 2, 1, forced=True)
        rule.pass_width.width_for(4)
        rule.update_main(4, 0, 3, float(large(4)))
    assert comparison.remaining > 0


def test_time_of_plain_decoding_is_learned():
    comparison, learned = Comparison(), []
    for seconds in [2.6] * 50 + [2.0] * 50:
        comparison.observe_plain(seconds, measured=2.0)
        learned.append(comparison.plain_change)
    assert [learned[0], learned[49], learned[99]] == pytest.approx([1.15, 1.3, 1.0], rel=0.01)


def test_loss_of_a_draft_is_withdrawn_in_plain_iterations():
    comparison = Comparison(plain_change=2.0)
    comparison.observe_drafted(worth=1.0, taken=3.0)
    assert comparison.remaining == pytest.approx(DraftBudget.START - 2 + 3 * DraftBudget.SHARE)


@pytest.mark.parametrize(("tokens", "is_due"), [(1.4, True), (1.6, False)])
def test_draft_is_compared_with_plain_decoding_unless_the_gain_is_clear(tokens, is_due):
    comparison = Comparison()
    for _ in range(300):
        comparison.observe_drafted(worth=tokens, taken=1.0)
    assert comparison.is_due == is_due
    comparison.observe_plain(1.0, measured=1.0)
    assert not comparison.is_due


def test_time_of_a_padded_pass_is_learned_for_its_size():
    rule = BatchDraftLength(curve(large), curve(small), curve(small), 1000.0)
    rule.begin([], 4)
    assert [rule.pass_width.width_for(n) for n in (16, 16, 4)] == [16] * 3
    for _ in range(2):  # the first time of a size is not learned
        rule.update_main(4, 0, 4, 1.5 * large(16))
    assert rule.main(16) / large(16) > 1.04 > rule.main(4) / large(4)


def test_due_comparison_does_not_stop_drafts_beside_requests_with_their_own_policy():
    """Such iterations cannot be compared with plain decoding: the comparison waits until these requests have left."""
    rule = rule_of()
    estimate = rule.estimate()
    for forced, drafts in ((False, []), (True, [0])):
        estimate.begin()
        rule.begin([estimate], 2)
        while not rule._comparison.is_due:
            rule._comparison.observe_drafted(worth=1.0, taken=1.0)
        assert rule.choose([estimate], 2, 0, forced) == drafts


def test_probe_is_for_a_request_that_can_use_the_draft_model():
    rule = BatchDraftLength(curve(slow), curve(slow), curve(slow))
    beyond, able = rule.estimate(combined=True), rule.estimate(combined=True)
    for estimate in (beyond, able):
        estimate.begin()
        estimate.set_next(None, can_use_model=estimate is able)
    rule.begin([beyond, able], 2)
    rule._plain, able.copies = rule.PROBE_AFTER, True
    assert rule._requests_to_draft([beyond, able], 2, 0) == [1] and not able.copies
    assert rule._requests_to_draft([beyond], 2, 0) == []
