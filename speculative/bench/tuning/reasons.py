"""Why scripts/tune.py recommends a method: sentences with the measured gains, acceptance and costs."""

import statistics

import openvino as ov

from speculative.bench import harness
from speculative.bench import quality as text_quality
from speculative.bench.load.metrics import counted
from speculative.bench.tuning.choice import WORTH_IT, Figures, TuningChoice, contest_of, steps_to, tokens_each
from speculative.bench.tuning.session import Session
from speculative.bench.tuning.settings import PropertySet, Setting, shown
from speculative.drafting.policy import LONGEST, Costs
from speculative.pair import recommendation, weights
from speculative.pair.recommendation import SUFFIX
from speculative.sequence import metrics

MEMORY_BOUND = 1.25  # verify ratio up to which a forward pass is limited by reading weights from memory
HARDLY = 0.5  # draft tokens per forward pass below which a setting's acceptance rate says little
FEW = 0.2  # accepted share of draft tokens below which acceptance is the reason for no gain
UNLIKELY = 1.15  # gain / block efficiency beyond what engine differences explain
FEW_TEXTS = 4  # below this number of prompts, the gain on others may differ much


def gains(tuning: Session, measured: list[Figures], choice: TuningChoice, is_remeasured: bool) -> list[str]:
    """The speed of the best method that drafts, and its gain over the others."""
    best, best_alone = choice.drafted, choice.alone
    what = "this draft" if best.setting.draft else "suffix decoding"
    lines = [
        f"Use {what}: {best.setting} decodes {statistics.median(best.throughputs):.1f} tokens/s, "
        f"{_times(best.speedups)} the main model alone with its defaults{_rounds(tuning, best, is_remeasured)}."
    ]
    if best_alone.setting != tuning.baseline:
        lines.append(
            f"Speedup over the fastest method without {_draft_source(tuning)} ({best_alone.setting}): "
            f"{_times(best.over(best_alone))}."
        )
    by_setting = {one.setting: one for one in measured}
    sample = by_setting.get(tuning.sample_setting)
    if sample and sample is not best:
        defaults = "speculative_decoding_lm.py with its defaults (K = 5)"
        if best.setting.copies:
            defaults = f"{recommendation.SAMPLE_OF[SUFFIX]} with its defaults"
        lines.append(
            f"Speedup over samples/{defaults}: {_times(best.over(sample))}{_in_steps(by_setting, sample, best)}."
        )
    tau = tokens_each(tuning, best)
    gain = statistics.median(best.over(best_alone))
    if gain > UNLIKELY * tau:
        lines.append(
            f"A speedup of {gain:.2f}x over the fastest method without {_draft_source(tuning)} is more than {tau:.1f} "
            "tokens per main-model forward pass can explain: the machine's speed changed during the measurement. Tune "
            "again when it is idle, or with more --minutes."
        )
    other = max(choice.of_engine.values(), key=lambda one: one.speedup)
    if is_remeasured and other.speedup > best.speedup:
        lines.append(
            f"{other.setting} was faster in the new rounds ({other.speedup:.2f}x), but the rounds before them decided: "
            "give more --minutes to compare both."
        )
    return lines


def why_it_helps(tuning: Session, best: Figures) -> str:
    """Acceptance rate, cost ratio, verify ratio, and the main limit on the gain."""
    if best.setting.copies:
        return f"Why: {_copied(tuning, best)}."
    if best.setting.is_combined:
        return f"Why: {_combined(tuning, best)}."
    facts = _facts(tuning, best)
    if not facts:
        return "Why: the costs of this draft could not be measured."
    tau, acceptance, k, c, v = facts
    predicted = metrics.predicted_speedup(tau, k, c, v)
    speedup_without = {
        f"acceptance ({(k + 1) / tau:.2f}x as fast if all draft tokens were accepted)": (k + 1) / tau,
        f"the draft's cost ({(v + k * c) / v:.2f}x as fast if it were free)": (v + k * c) / v,
        f"verification ({(v + k * c) / (1 + k * c):.2f}x as fast if {k + 1} tokens cost as much as one)": (
            (v + k * c) / (1 + k * c)
        ),
    }
    model = ov.Core().read_model(tuning.arguments.main / "openvino_model.xml")
    read = weights.read(model).bytes_per_step
    plain = tuning.costs[best.setting.models, best.setting.draft].main[1]
    bound = "limited by memory bandwidth, so verifying several tokens is cheap" if v <= MEMORY_BOUND else (
        "not limited by memory bandwidth alone, so each token to verify takes time"
    )  # fmt: skip
    return (
        f"Why: {acceptance:.0%} of the draft tokens are accepted, so a main-model forward pass yields {tau:.1f} "
        f"tokens; a draft step costs {c:.2f} of a main-model step (c) and verifying {k + 1} tokens {v:.2f} of one (v), "
        f"which predicts {predicted:.1f}x. The main model reads {read / 1e9:.2f} GB per forward pass, "
        f"{read / plain / 1e9:.0f} GB/s ({bound}). The main limit is "
        f"{max(speedup_without, key=speedup_without.__getitem__)}."
    )


def why_it_does_not(tuning: Session, best: Figures, best_alone: Figures, gains: list[float]) -> str:
    """The measured speed, and how acceptance and costs explain it."""
    measured: Costs = tuning.costs[tuning.default, best.setting.draft]
    c, v = measured.draft / measured.main[1], measured.main[2] / measured.main[1]
    alpha, tau = tuning.alpha[best.setting.draft], tokens_each(tuning, best)
    spread = f" ({min(gains):.2f}-{max(gains):.2f} over {len(gains)} rounds)" if len(gains) > 1 else ""
    measured_speed = (
        f"{best.setting} decodes at {statistics.median(gains):.2f}x{spread} the fastest method without "
        f"{_draft_source(tuning)} ({best_alone.setting}, {statistics.median(best_alone.throughputs):.1f} tokens/s)"
    )
    if best.setting.copies:
        return f"Run the main model alone: suffix decoding gains too little: {measured_speed}; {_copied(tuning, best)}."
    costs = f"a draft step costs {c:.2f} of a main-model step and verifying two tokens {v:.2f} of one"
    contest = contest_of(tuning, best.setting)
    runs = contest.methods[best.setting].runs() if contest else []
    proposed, accepted_tokens = [n for run in runs for n in run.proposed], [n for run in runs for n in run.accepted]
    drafted = sum(proposed) / len(proposed) if proposed else 0.0
    accepted = metrics.acceptance_rate(proposed, accepted_tokens) if drafted >= HARDLY else None
    combined = best.setting.is_combined  # many of the accepted tokens are copies
    accepted = alpha if accepted is None or combined else accepted
    if accepted < FEW and (tau < WORTH_IT or combined):
        copies = ", copies included" if combined else ""
        return (
            f"Do not use this draft: hardly any of its tokens are accepted (probability {accepted:.2f}), so a "
            f"main-model forward pass yields {tau:.2f} tokens{copies}, which bounds the speedup. Measured: "
            f"{measured_speed}; {costs}."
        )
    too_little = "even its best setting gains too little"
    if tau < WORTH_IT and drafted < HARDLY:
        too_little = f"its best setting drafts only {drafted:.2f} tokens per main-model forward pass"
    break_even = max(v + c - 1, 0)
    consequence = f"break-even is at a probability of {break_even:.2f}"
    if break_even >= 1:
        consequence = "drafting one token would not be faster even if it were always accepted"
    return (
        f"Do not use this draft: {too_little}: {measured_speed}. A draft token is accepted with probability "
        f"{alpha:.2f}; {costs}, so {consequence}."
    )


def gain_of_another(tuning: Session, choice: TuningChoice) -> list[str]:
    """The gain over plain decoding's sample, if another method of those not in question is faster."""
    if choice.alone.setting == choice.sample_alone.setting:
        return []
    verb = "decodes at" if choice.alone.setting.copies else "is the Python code below:"
    ratios = choice.alone.over(choice.sample_alone)
    return [
        f"The fastest method without {_draft_source(tuning)}, {choice.alone.setting}, {verb} {_times(ratios)} "
        f"samples/greedy_causal_lm.py ({choice.sample_alone.setting})."
    ]


def _draft_source(tuning: Session) -> str:
    """The source of draft tokens in question."""
    return "suffix decoding" if None in tuning.drafts else "a draft model"


def _times(ratios: list[float]) -> str:
    """Median and range over the rounds."""
    spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}x{spread}"


def _rounds(tuning: Session, one: Figures, is_remeasured: bool) -> str:
    """How many rounds and different prompts were measured, and whether before or after the choice."""
    rounds, contest = len(one.speedups), contest_of(tuning, one.setting)
    texts = len({prompt.tobytes() for prompt in contest.prompts}) if contest else 1
    measured = f"{counted(texts, 'prompt')} in {counted(rounds, 'round')}"
    if texts < FEW_TEXTS or rounds == 1:
        measured += ", too few to rely on: give more --minutes, or more --prompts"
    when = "measured after the choice" if is_remeasured else "the rounds that decided the choice, which overestimate it"
    return f" ({measured}; {when})"


def _in_steps(by_setting: dict[Setting, Figures], sample: Figures, best: Figures) -> str:
    """Which changes contributed, each relative to the step before."""
    gains, before = [], sample
    for after in steps_to(by_setting, sample, best):
        one, two = before.setting, after.setting
        changed = [str(two.models)] * (one.models != two.models)
        changed += [f"with {two.draft_name}"] * (one.draft_name != two.draft_name)
        changed += [two.length] * (one.draft_length != two.draft_length)
        changed += ["our engine"] * (one.engine != two.engine)
        changed += [shown(two.scheduler)] * (two.scheduler not in ((), one.scheduler))
        gains.append(f"{' and '.join(changed)} {statistics.median(after.over(before)):.2f}x")
        before = after
    return f": {', '.join(gains)}" if gains else ""


def _copied(tuning: Session, one: Figures) -> str:
    """How much suffix decoding drafts, how much of that is accepted, and what verification costs."""
    seconds = tuning.costs[tuning.default, None].main
    costs = f"verifying two tokens costs {seconds[2] / seconds[1]:.2f} of a main-model step"
    return _drafting(tuning, one, "it copies", "it found nothing worth copying", costs)


def _combined(tuning: Session, one: Figures) -> str:
    """How much a draft and suffix decoding draft together, how much of that is accepted, and what both cost."""
    measured = tuning.costs.get((one.setting.models, one.setting.draft))
    costs = "their costs could not be measured"
    if measured:
        costs = (
            f"a draft step costs {measured.draft / measured.main[1]:.2f} of a main-model step, a copied token nothing, "
            f"and verifying two tokens {measured.main[2] / measured.main[1]:.2f} of one"
        )
    return _drafting(tuning, one, "draft and suffix decoding draft", "nothing was drafted", costs)


def _drafting(tuning: Session, one: Figures, drafts: str, nothing: str, costs: str) -> str:
    """How many tokens a setting `drafts` and how many are accepted, or `nothing`, and the `costs`; these alone if it
    was not in a contest."""
    contest = contest_of(tuning, one.setting)
    if not contest:
        return costs
    row = harness.row(contest.methods[one.setting], contest.methods[tuning.baseline])
    if row["acceptance_rate"] is None:
        return f"{nothing}; {costs}"
    return (
        f"{drafts} {row['mean_draft_length']:.2f} tokens per main-model forward pass, of which "
        f"{row['acceptance_rate']:.0%} are accepted, so a pass yields {row['block_efficiency']:.2f} tokens; {costs}"
    )


def _facts(tuning: Session, one: Figures) -> tuple[float, float, int, float, float] | None:
    """tau, acceptance rate, mean K (rounded), cost ratio, verify ratio."""
    measured = tuning.costs.get((one.setting.models, one.setting.draft))
    contest = contest_of(tuning, one.setting)
    if not measured or not contest:
        return None
    row = harness.row(contest.methods[one.setting], contest.methods[tuning.baseline])
    verify = measured.verify()
    k = min(max(1, round(row["mean_draft_length"] or 0.0)), LONGEST)
    return (
        row["block_efficiency"] or 1.0,
        row["acceptance_rate"] or 0.0,
        k,
        measured.draft / verify[1],
        verify[k + 1] / verify[1],
    )


def effect_on_quality(tuning: Session, models: PropertySet) -> list[str]:
    """The effect on the text, and the property sets that exceed the quality limits."""
    quality = tuning.quality.get(models)
    if not quality:
        return []
    lines = [f"Output quality: {models}: {quality} (grade: {quality.grade})."]
    default = tuning.quality.get(tuning.default)
    if models != tuning.default and default:
        lines[0] += f" With OpenVINO's defaults: {default} (grade: {default.grade})."
    differences = _first_differences(tuning, models)
    if differences:
        lines.append(differences)
    marked = [one for one in tuning.quality if not tuning.quality[one].fits(default)]
    if marked:
        names = "; ".join(f"{one}: {tuning.quality[one]}" for one in marked)
        allowed = "allowed by --allow-quality-loss" if tuning.arguments.allow_quality_loss else (
            "not recommended without --allow-quality-loss"
        )  # fmt: skip
        lines.append(f"These exceed the quality limits ({allowed}): {names}.")
    return lines


def _first_differences(tuning: Session, models: PropertySet) -> str:
    """How the texts decoded in the last stage compare with their f32 references."""
    references = {reference.prompt.tobytes(): reference for reference in tuning.references}
    total, found = 0, []
    for contest in (tuning.choosing, tuning.remeasured):
        for method in (method for setting, method in contest.methods.items() if setting.models == models):
            for prompt, run in zip(contest.prompts, method.runs(), strict=True):
                reference = references.get(prompt.tobytes())
                if reference:
                    total += 1
                    difference = text_quality.first_difference(reference, run.tokens)
                    found += [difference] if difference else []
    if not total:
        return ""
    real = sum(margin > text_quality.NEAR_TIE for _, margin in found)
    match = f"{total - len(found)} of {total} texts match f32 on every compared token"
    if not found:
        return f"{match}."
    return f"{match}; the first difference is a near-tie in {len(found) - real} and real in {real}."
