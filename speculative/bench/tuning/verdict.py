"""The recommendation of scripts/tune.py: decision, reason, command and Python code, from its measurements.

A draft's gain is measured against the fastest method without one: GenAI's pipeline with any scheduler, this project's
engine, or suffix decoding. If no draft is given, suffix decoding takes its place. The rounds that decide are not the
rounds reported, as the fastest of many is partly the luckiest.
"""

import shlex
import statistics
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import openvino as ov

from speculative.bench import harness
from speculative.bench import quality as text_quality
from speculative.bench.cluster.hosts import Place
from speculative.bench.result import (
    CandidateRow,
    CandidateSettings,
    FailedCandidate,
    MethodRow,
    ModelFingerprint,
    QualityFigures,
    Recommendation,
    RecommendedSettings,
)
from speculative.bench.tuning.session import Candidate, Contest, Session
from speculative.bench.tuning.settings import PropertySet, Setting, shown
from speculative.drafting.policy import LONGEST, Costs
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.pair import recommendation, weights
from speculative.pair.engines import GENAI, NATIVE
from speculative.pair.recommendation import SUFFIX
from speculative.sequence import metrics

WORTH_IT = 1.05  # minimum speedup of drafting over the fastest method without, to recommend it
AS_GOOD = 0.99  # fraction of the fastest within which the fewest properties win
MEMORY_BOUND = 1.25  # verify ratio up to which a forward pass is limited by reading weights from memory
HARDLY = 0.5  # draft tokens per forward pass below which a setting's acceptance rate says little
FEW = 0.2  # accepted share of draft tokens below which acceptance is the reason for no gain
UNLIKELY = 1.15  # speedup / block efficiency beyond what engine differences explain
PROMPT = "def fib(n):"  # in the printed commands


@dataclass
class Verdict:
    """The decision. `settings` has the keys of recommended.json."""

    main: Path
    draft: Path | None
    choice: Setting
    best: str
    reason: str
    sentences: list[str]
    settings: dict[str, RecommendedSettings]
    quality: QualityFigures
    measured_on: dict[str, str]

    def as_dict(self) -> Recommendation:
        return {
            "program": "scripts/tune.py",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "use_draft": self.best in (GENAI, NATIVE),
            "best": self.best,
            "reason": self.reason,
            "sentences": self.sentences,
            "settings": self.settings,
            "quality": self.quality,
            "main": _fingerprint(self.main),
            "draft": _fingerprint(self.draft) if self.draft else None,
            "measured_on": self.measured_on,
        }


@dataclass
class Figures:
    """Results of one setting relative to the main model alone with its defaults, from the last stage or a halving
    round."""

    setting: Setting
    throughputs: list[float]  # by round
    speedups: list[float]

    @property
    def speedup(self) -> float:
        return statistics.median(self.speedups)

    def over(self, other: "Figures") -> list[float]:
        """Throughput ratio to `other`, per round."""
        return [one / two for one, two in zip(self.throughputs, other.throughputs, strict=True)]


@dataclass
class TuningChoice:
    """The fastest methods in a set of rounds."""

    drafted: Figures  # with a draft model, or by suffix decoding if none is given
    alone: Figures  # fastest of the others
    sample_alone: Figures  # fastest that samples/greedy_causal_lm.py can run: GenAI without a scheduler config
    of_engine: dict[str, Figures]  # fastest of `drafted`, per engine

    @property
    def settings(self) -> list[Setting]:
        chosen = (self.drafted, self.alone, self.sample_alone, *self.of_engine.values())
        return [one.setting for one in chosen]

    def with_figures(self, found: dict[Setting, Figures]) -> "TuningChoice":
        """The same choice with other results."""
        drafted, alone, sample_alone, *own = (found[setting] for setting in self.settings)
        return TuningChoice(drafted, alone, sample_alone, dict(zip(self.of_engine, own, strict=True)))

    def unless_slower_than(self, usual: Figures | None) -> "TuningChoice":
        """The same choice, but drafting with the sample's defaults (`usual`) if they were faster in every round."""
        if not usual or max(self.drafted.over(usual)) >= 1:
            return self
        return replace(self, drafted=usual, of_engine={**self.of_engine, usual.setting.engine: usual})


def figures(tuning: Session) -> list[Figures]:
    """The results the choice is based on."""
    if tuning.choosing.methods:
        return figures_of(tuning.choosing, tuning.baseline)
    left = [one for one in tuning.candidates.values() if one.speedup and not one.dropped]
    return [Figures(one.setting, [one.throughput], [one.speedup]) for one in left if one.throughput is not None]


def figures_of(contest: Contest, baseline: Setting) -> list[Figures]:
    if not contest.methods:
        return []
    alone = contest.methods[baseline]
    rounds = range(len(alone.rounds))
    return [
        Figures(
            setting,
            [method.throughput(i) for i in rounds],
            [method.throughput(i) / alone.throughput(i) for i in rounds],
        )
        for setting, method in contest.methods.items()
    ]


def choose(tuning: Session) -> TuningChoice | None:
    """The fastest methods; None if nothing was decoded by drafting, or nothing without it."""
    found = [
        one for one in figures(tuning) if tuning.fits(one.setting.models) and str(one.setting) not in tuning.failed
    ]
    drafted = [one for one in found if tuning.drafts_with(one.setting)]
    alone = [one for one in found if not tuning.drafts_with(one.setting)]
    sample_alone = [one for one in alone if one.setting.engine == GENAI and not one.setting.scheduler]
    if not sample_alone or not drafted:
        return None
    own = {engine: [one for one in drafted if one.setting.engine == engine] for engine in (GENAI, NATIVE)}
    of_engine = {engine: fastest(found) for engine, found in own.items() if found}
    best = fastest(drafted)
    of_engine[best.setting.engine] = best
    return TuningChoice(best, fastest(alone), fastest(sample_alone), of_engine)


def to_remeasure(tuning: Session) -> list[Setting]:
    """The choice and everything its gain is reported against."""
    choice = choose(tuning)
    if not choice:
        return []
    found = {one.setting: one for one in figures(tuning)}
    usual = tuning.usual
    steps = [one.setting for one in _steps(found, found[usual], choice.drafted)] if usual in found else []
    return list(dict.fromkeys([tuning.baseline, *choice.settings, *([usual] if steps else []), *steps]))


def judge(tuning: Session) -> Verdict | None:
    """The verdict; None if nothing was decoded."""
    choice = choose(tuning)
    if not choice:
        return None
    remeasured = {one.setting: one for one in figures_of(tuning.remeasured, tuning.baseline)}
    is_remeasured = set(choice.settings) <= set(remeasured)
    found = list(remeasured.values()) if is_remeasured else figures(tuning)
    if is_remeasured:
        choice = choice.with_figures(remeasured).unless_slower_than(remeasured.get(tuning.usual))
    best, best_alone = choice.drafted, choice.alone
    gains = best.over(best_alone)
    use_draft = is_worth_it(tuning, best, best_alone)
    chosen = best if use_draft else best_alone
    worth_it = [one for one in choice.of_engine.values() if use_draft and is_worth_it(tuning, one, best_alone)]
    settings: dict[str, RecommendedSettings] = {}
    for one in (choice.sample_alone, *worth_it, chosen):
        settings.setdefault(one.setting.kept_as, _settings(one))
    reason = _why(tuning, best) if use_draft else _why_not(tuning, best, best_alone, gains)
    sentences = _sentences(tuning, found, choice, is_remeasured) if use_draft else [reason]
    sentences += [reason] if use_draft else _alone_in_sample(tuning, choice)
    sentences += _text(tuning, chosen.setting.models)
    sentences += _command(tuning, chosen.setting, choice)
    if tuning.note:
        sentences.append(f"Note: {tuning.note}.")
    quality = tuning.quality.get(chosen.setting.models)
    return Verdict(
        tuning.arguments.main,
        best.setting.draft,
        chosen.setting,
        chosen.setting.kept_as,
        reason,
        sentences,
        settings,
        _quality(quality),
        measured_on(tuning.place, chosen.setting.models),
    )


def is_worth_it(tuning: Session, one: Figures, best_alone: Figures) -> bool:
    """Whether a method that drafts gains enough over the fastest one without: 5 % in the median round, and some even in
    the worst round. A draft cannot save more time than forward passes: a larger gain is noise."""
    gains = one.over(best_alone)
    return statistics.median(gains) >= WORTH_IT and min(gains) > 1 and _tokens_each(tuning, one) >= WORTH_IT


def fastest(found: list[Figures]) -> Figures:
    """The fastest; among near-equals, the one with the fewest properties."""
    top = max(one.speedup for one in found)
    good = [one for one in found if one.speedup >= AS_GOOD * top]
    return min(good, key=lambda one: (one.setting.how_many, -one.speedup))


def _fingerprint(folder: Path) -> ModelFingerprint:
    return {"folder": folder.name, "fingerprint": recommendation.fingerprint(folder)}


def _contest(tuning: Session, setting: Setting) -> Contest | None:
    """The rounds to report for a setting, the new ones if any; None if it was not in either contest."""
    return next((one for one in (tuning.remeasured, tuning.choosing) if setting in one.methods), None)


def measured_on(place: Place, models: PropertySet) -> dict[str, str]:
    """The versions and devices the results depend on; speculative/pair/recommendation.py compares them."""
    names = dict.fromkeys([models.device, models.draft_device])
    return {"openvino_genai": place.versions[0], **{name: place.devices[name].full_name for name in names}}


def _tokens_each(tuning: Session, one: Figures) -> float:
    """Block efficiency: tokens per main-model forward pass."""
    contest = _contest(tuning, one.setting)
    if not contest:
        return 1 + tuning.alpha[one.setting.draft]
    return metrics.block_efficiency([n for run in contest.methods[one.setting].runs() for n in run.gained]) or 1.0


# ---- sentences ------------------------------------------------------------------------------------------------------


def _sentences(tuning: Session, found: list[Figures], choice: TuningChoice, is_remeasured: bool) -> list[str]:
    best, best_alone = choice.drafted, choice.alone
    what = "this draft" if best.setting.draft else "suffix decoding"
    lines = [
        f"Use {what}: {best.setting} decodes {statistics.median(best.throughputs):.1f} tokens/s, "
        f"{_times(best.speedups)} the main model alone with its defaults{_rounds(best, is_remeasured)}."
    ]
    if best_alone.setting != tuning.baseline:
        lines.append(
            f"Speedup over the fastest method without {_questioned(tuning)} ({best_alone.setting}): "
            f"{_times(best.over(best_alone))}."
        )
    by_setting = {one.setting: one for one in found}
    usual = by_setting.get(tuning.usual)
    if usual and usual is not best:
        defaults = "speculative_decoding_lm.py with its defaults (K = 5)"
        if best.setting.copies:
            defaults = f"{recommendation.SAMPLE_OF[SUFFIX]} with its defaults"
        lines.append(
            f"Speedup over samples/{defaults}: {_times(best.over(usual))}{_in_steps(by_setting, usual, best)}."
        )
    tau = _tokens_each(tuning, best)
    if best.speedup > UNLIKELY * tau:
        lines.append(
            f"That is more than {tau:.1f} tokens per main-model forward pass can explain: the machine's speed changed "
            "during the measurement. Tune again when it is idle, or with more --minutes."
        )
    return lines


def _questioned(tuning: Session) -> str:
    """Property of the methods in `drafted`."""
    return "suffix decoding" if None in tuning.drafts else "a draft model"


def _times(ratios: list[float]) -> str:
    """Median and range over the rounds."""
    spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}x{spread}"


def _rounds(one: Figures, is_remeasured: bool) -> str:
    """How many rounds were measured, and whether before or after the choice."""
    rounds = len(one.speedups)
    counted = f"{rounds} rounds" if rounds > 1 else "one round only: give more --minutes"
    when = "measured after the choice" if is_remeasured else "the rounds that decided the choice, which overestimate it"
    return f" ({counted}; {when})"


def _steps(by_setting: dict[Setting, Figures], usual: Figures, best: Figures) -> list[Figures]:
    """The steps from the sample's settings to the best ones: properties, then K, then the engine."""
    models, draft = best.setting.models, best.setting.draft
    same_k = by_setting.get(Setting(models, GENAI, draft, usual.setting.draft_length))
    of_genai = [
        one
        for one in by_setting.values()
        if (one.setting.engine, one.setting.models, one.setting.draft) == (GENAI, models, draft)
    ]
    best_k = max(of_genai, key=lambda one: one.speedup, default=None)
    steps = [usual]
    for after in (same_k, best_k if draft and best.setting.engine == NATIVE else None, best):
        if after and after.setting != steps[-1].setting:
            steps.append(after)
    return steps[1:]


def _in_steps(by_setting: dict[Setting, Figures], usual: Figures, best: Figures) -> str:
    """Which changes contributed, each relative to the step before."""
    gains, before = [], usual
    for after in _steps(by_setting, usual, best):
        one, two = before.setting, after.setting
        changed = [str(two.models)] * (one.models != two.models)
        changed += [two.length] * (one.draft_length != two.draft_length)
        changed += ["our engine"] * (one.engine != two.engine)
        changed += [shown(two.scheduler)] * (two.scheduler not in ((), one.scheduler))
        gains.append(f"{' and '.join(changed)} {statistics.median(after.over(before)):.2f}x")
        before = after
    return f": {', '.join(gains)}" if gains else ""


def _alone_in_sample(tuning: Session, choice: TuningChoice) -> list[str]:
    """The gain over plain decoding's sample, if another method of those not in question is faster."""
    if choice.alone.setting == choice.sample_alone.setting:
        return []
    verb = "decodes at" if choice.alone.setting.copies else "is the Python code below:"
    ratios = choice.alone.over(choice.sample_alone)
    return [
        f"The fastest method without {_questioned(tuning)}, {choice.alone.setting}, {verb} {_times(ratios)} "
        f"samples/greedy_causal_lm.py ({choice.sample_alone.setting})."
    ]


def _why(tuning: Session, best: Figures) -> str:
    """Acceptance rate, cost ratio, verify ratio, and the main limit on the gain."""
    if best.setting.copies:
        return f"Why: {_copied(tuning, best)}."
    facts = _facts(tuning, best)
    if not facts:
        return "Why: not measured yet."
    tau, acceptance, k, c, v = facts
    predicted = metrics.predicted_speedup(tau, k, c, v)
    without = {
        f"acceptance ({(k + 1) / tau:.2f}x as fast if all draft tokens were accepted)": (k + 1) / tau,
        f"the draft's cost ({(v + k * c) / v:.2f}x as fast if it were free)": (v + k * c) / v,
        f"verification ({(v + k * c) / (1 + k * c):.2f}x as fast if {k + 1} tokens cost as much as one)": (
            (v + k * c) / (1 + k * c)
        ),
    }
    model = ov.Core().read_model(tuning.arguments.main / "openvino_model.xml")
    read = weights.read(model).bytes_per_step
    plain = tuning.costs[best.setting.models, best.setting.draft].main[1]
    bound = "memory-bound, so verifying several tokens is cheap" if v <= MEMORY_BOUND else (
        "no longer purely memory-bound, so verifying several tokens costs compute"
    )  # fmt: skip
    return (
        f"Why: {acceptance:.0%} of the draft tokens are accepted, so a main-model forward pass yields {tau:.1f} "
        f"tokens; a draft step costs {c:.2f} of a main-model step (c) and verifying {k + 1} tokens {v:.2f} of one (v), "
        f"which predicts {predicted:.1f}x. The main model reads {read / 1e9:.2f} GB per forward pass, "
        f"{read / plain / 1e9:.0f} GB/s ({bound}). The main limit is {max(without, key=without.__getitem__)}."
    )


def _why_not(tuning: Session, best: Figures, best_alone: Figures, gains: list[float]) -> str:
    """The measured speed, and how acceptance and costs explain it."""
    measured: Costs = tuning.costs[tuning.default, best.setting.draft]
    c, v = measured.draft / measured.main[1], measured.main[2] / measured.main[1]
    alpha, tau = tuning.alpha[best.setting.draft], _tokens_each(tuning, best)
    spread = f" ({min(gains):.2f}-{max(gains):.2f} over {len(gains)} rounds)" if len(gains) > 1 else ""
    seen = (
        f"{best.setting} decodes at {statistics.median(gains):.2f}x{spread} the fastest method without "
        f"{_questioned(tuning)} ({best_alone.setting}, {statistics.median(best_alone.throughputs):.1f} tokens/s)"
    )
    if best.setting.copies:
        return f"Run the main model alone: suffix decoding gains too little: {seen}; {_copied(tuning, best)}."
    costs = f"a draft step costs {c:.2f} of a main-model step and verifying two tokens {v:.2f} of one"
    contest = _contest(tuning, best.setting)
    runs = contest.methods[best.setting].runs() if contest else []
    proposed, gained = [n for run in runs for n in run.proposed], [n for run in runs for n in run.gained]
    drafted = sum(proposed) / len(proposed) if proposed else 0.0
    accepted = metrics.acceptance_rate(proposed, gained) if drafted >= HARDLY else None
    combined = best.setting.is_combined  # many of the accepted tokens are copies
    accepted = alpha if accepted is None or combined else accepted
    if accepted < FEW and (tau < WORTH_IT or combined):
        copies = ", copies included" if combined else ""
        return (
            f"Do not use this draft: hardly any of its tokens are accepted (probability {accepted:.2f}), so a "
            f"main-model forward pass yields {tau:.2f} tokens{copies}, which bounds the speedup. Measured: {seen}; "
            f"{costs}."
        )
    too_little = "even its best setting gains too little"
    if tau < WORTH_IT and drafted < HARDLY:
        too_little = f"its best setting drafts only {drafted:.2f} tokens per main-model forward pass"
    return (
        f"Do not use this draft: {too_little}: {seen}. A draft token is accepted with probability {alpha:.2f}; "
        f"{costs}, so break-even is at a probability of {max(v + c - 1, 0):.2f}."
    )


def _copied(tuning: Session, one: Figures) -> str:
    """How much suffix decoding drafts, how much of that is accepted, and what verification costs."""
    seconds = tuning.costs[tuning.default, None].main
    costs = f"verifying two tokens costs {seconds[2] / seconds[1]:.2f} of a main-model step"
    contest = _contest(tuning, one.setting)
    if not contest:
        return costs
    row = harness.row(contest.methods[one.setting], contest.methods[tuning.baseline])
    if row["acceptance_rate"] is None:
        return f"it found nothing worth copying; {costs}"
    return (
        f"it copies {row['mean_draft_length']:.2f} tokens per main-model forward pass, of which "
        f"{row['acceptance_rate']:.0%} are accepted, so a pass yields {row['block_efficiency']:.2f} tokens; {costs}"
    )


def _facts(tuning: Session, one: Figures) -> tuple[float, float, int, float, float] | None:
    """tau, acceptance rate, mean K (rounded), cost ratio, verify ratio."""
    measured = tuning.costs.get((one.setting.models, one.setting.draft))
    contest = _contest(tuning, one.setting)
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


def _text(tuning: Session, models: PropertySet) -> list[str]:
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


def _command(tuning: Session, setting: Setting, choice: TuningChoice) -> list[str]:
    """The command, with --recommended and with explicit options, and the Python code. Without any draft the command is
    that of `choice.sample_alone`, as no sample runs the main model alone in our engine or with a scheduler config."""
    main = str(tuning.arguments.main)
    python = _python(main, setting)
    setting = setting if setting.draft or setting.copies else choice.sample_alone.setting
    models = setting.models
    program = recommendation.SAMPLE_OF[setting.kept_as]
    folders = [main, str(setting.draft)] if setting.draft else [main]
    begin = ["python", f"samples/{program}", *folders, PROMPT]
    begin += ["--temperature", "0"] if setting.engine == NATIVE and setting.draft else []
    options = ["--device", models.device] if models.device != "CPU" else []
    for name, value in models.properties:
        options += ["--property", f"{name}={value}"]
    if setting.draft:
        options += ["--draft-device", models.draft_device] if models.draft_device != "CPU" else []
        if models.draft_properties != models.properties:
            for name, value in models.draft_properties:
                options += ["--draft-property", f"{name}={value}"]
        adaptive = isinstance(setting.draft_length, str)
        options += ["-k", "auto" if adaptive else f"{setting.draft_length:g}"]
        options += ["--suffix-decoding"] if setting.is_combined else []
    for name, value in setting.scheduler:
        options += ["--scheduler", f"{name}={value}"]
    beside = recommendation.place(tuning.arguments.main, choice.drafted.setting.draft)
    kept_beside = beside and not tuning.arguments.out
    return [
        *([f"Run it: {shlex.join([*begin, '--recommended'])}"] if kept_beside else []),
        f"{'or' if kept_beside else 'Run it'}, with explicit options: {shlex.join([*begin, *options])}",
        "In Python:",
        *("    " + line for line in python),
    ]


def _python(main: str, setting: Setting) -> list[str]:
    models = setting.models
    length = ""
    if isinstance(setting.draft_length, float):
        length = f", assistant_confidence_threshold={setting.draft_length}"
    elif setting.draft and not isinstance(setting.draft_length, str):
        length = f", num_assistant_tokens={setting.draft_length}"
    config = f"GenerationConfig(max_new_tokens=100{length})"
    if setting.engine == NATIVE:
        given = [f"ModelSpec({main!r}, {models.device!r}, {dict(models.properties)})"]
        if setting.draft:
            own = dict(models.draft_properties)
            given.append(f"ModelSpec({str(setting.draft)!r}, {models.draft_device!r}, {own})")
        if setting.copies or setting.is_combined:
            given.append(f"max_ngram_size={LONGEST_MATCH}")
        return [
            "from openvino_genai import GenerationConfig",
            "from speculative import ModelSpec, load",
            f"decoder = load({', '.join(given)})",
            f"config = {config}",
            f"print(decoder.generate({PROMPT!r}, config).text)",
        ]
    lines = ["import openvino_genai"]
    arguments = "".join(f", {name}={value!r}" for name, value in models.properties)
    if setting.scheduler:
        lines.append("scheduler = openvino_genai.SchedulerConfig()")
        lines += [f"scheduler.{name} = {value!r}" for name, value in setting.scheduler]
        arguments += ", scheduler_config=scheduler"
    if setting.draft:
        of_draft = "".join(f", {name}={value!r}" for name, value in models.draft_properties)
        lines.append(f"draft = openvino_genai.draft_model({str(setting.draft)!r}, {models.draft_device!r}{of_draft})")
        arguments = ", draft_model=draft" + arguments
    return [
        *lines,
        f"pipe = openvino_genai.LLMPipeline({main!r}, {models.device!r}{arguments})",
        f"config = openvino_genai.{config}",
        f"print(pipe.generate({PROMPT!r}, config))",
    ]


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(tuning: Session) -> str:
    """The tables: effect of each property set, and decoding speed of the finalists."""
    title, tried = f"properties, K = {tuning.k}", tuning.property_candidates.values()
    width = max(map(len, (title, *(str(one.models) for one in tried))))
    lines = [f"{title:<{width}} {'iteration':>9} {'alone':>6}   agreement   mean KL   grade"]
    for one in sorted(tried, key=lambda one: -one.speedup):
        quality = tuning.quality.get(one.models)
        text = f"{quality.agreement:9.1%}   {quality.mean_kl:7.5f}   {quality.grade}" if quality else ""
        lines.append(f"{one.models!s:<{width}} {one.speedup:8.2f}x {one.alone:5.2f}x   {text}")
    for name, reason in tuning.failed.items():
        lines.append(f"{name:<{width}} failed: {reason}")
    lines += _decoding("decoding, rounds that decided the choice", figures(tuning))
    lines += _decoding("decoding, new rounds after the choice", figures_of(tuning.remeasured, tuning.baseline))
    return "\n".join(lines)


def _decoding(title: str, found: list[Figures]) -> list[str]:
    """A table, fastest first; empty if there are no results."""
    width = max([len(title), *(len(str(one.setting)) for one in found)])
    lines = ["", f"{title:<{width}} tokens/s   speedup (range)"] if found else []
    for one in sorted(found, key=lambda one: -one.speedup):
        lines.append(
            f"{one.setting!s:<{width}} {statistics.median(one.throughputs):8.1f}   {one.speedup:.2f}x "
            f"({min(one.speedups):.2f}-{max(one.speedups):.2f})"
        )
    return lines


def rows(tuning: Session) -> list[MethodRow]:
    """The rows of the result object: the finalists, with the new rounds if measured again."""
    contests = {
        setting: _contest(tuning, setting) for setting in (*tuning.choosing.methods, *tuning.remeasured.methods)
    }
    return [harness.row(one.methods[setting], one.methods[tuning.baseline]) for setting, one in contests.items() if one]


def candidates(tuning: Session) -> list[CandidateRow | FailedCandidate]:
    """All candidates, failed ones included."""
    found: list[CandidateRow | FailedCandidate] = []
    last = {one.setting: one for one in figures(tuning)}
    remeasured = {one.setting: one for one in figures_of(tuning.remeasured, tuning.baseline)}
    tried: list[Candidate[PropertySet] | Candidate[Setting]] = []
    tried += tuning.property_candidates.values()
    tried += tuning.candidates.values()
    for one in tried:
        is_set = isinstance(one.setting, PropertySet)
        setting = Setting(one.models, NATIVE) if isinstance(one.setting, PropertySet) else one.setting
        final = None if is_set else remeasured.get(setting) or last.get(setting)
        settings: CandidateSettings = {**setting.as_dict()}
        if not is_set:
            settings["engine"] = setting.engine
        found.append(
            {
                "name": str(one.setting),
                "stage": "properties" if is_set else "draft length",
                "settings": settings,
                "throughput": statistics.median(final.throughputs) if final else one.throughput,
                "speedup": final.speedup if final else one.speedup,
                "spread": [min(final.speedups), max(final.speedups)] if final else None,
                "remeasured": one.setting in remeasured,
                **_quality(tuning.quality.get(one.models)),
                "dropped_in_round": one.dropped,
            }
        )
    found += [{"name": name, "failed": reason} for name, reason in tuning.failed.items()]
    return found


def _settings(one: Figures) -> RecommendedSettings:
    return {
        **one.setting.as_dict(),
        "throughput": statistics.median(one.throughputs),
        "speedup": one.speedup,
        "speedup_range": [min(one.speedups), max(one.speedups)],
    }


def _quality(quality: text_quality.Quality | None) -> QualityFigures:
    if not quality:
        return {}
    return {
        "agreement": quality.agreement,
        "near_ties": len(quality.margins) - quality.real,
        "real_differences": quality.real,
        "mean_kl": quality.mean_kl,
        "grade": quality.grade,
    }
