"""What scripts/tune.py makes of its measurements: the recommendation, why, the command, the lines of Python."""

import shlex
import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import measuring
import openvino as ov
import text_quality
from device_places import Place
from tune_settings import PropertySet, Setting, shown

from speculative import metrics, recommendation, weights
from speculative.draft_length import LONGEST, Costs

WORTH_IT = 1.05  # speedup over the main model's best settings from which on a draft is recommended
AS_GOOD = 0.99  # of the fastest: there the fewest properties are preferred
MEMORY_BOUND = 1.25  # verify ratio up to which the weights' way from memory is what an inference waits for
UNLIKELY = 1.15  # speedup over block efficiency, beyond what two engines differ by
PROMPT = "def fib(n):"  # of the commands


@dataclass
class Verdict:
    """The decision. `settings` by engine, as in recommended.json."""

    main: Path
    draft: Path
    choice: Setting
    best: str
    reason: str
    sentences: list[str]
    settings: dict[str, dict]
    quality: dict
    measured_on: dict

    def as_dict(self) -> dict:
        return {
            "program": "scripts/tune.py",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "use_draft": self.best != "alone",
            "best": self.best,
            "reason": self.reason,
            "sentences": self.sentences,
            "settings": self.settings,
            "quality": self.quality,
            "main": {"folder": self.main.name, "fingerprint": recommendation.fingerprint(self.main)},
            "draft": {"folder": self.draft.name, "fingerprint": recommendation.fingerprint(self.draft)},
            "measured_on": self.measured_on,
        }


@dataclass
class Figures:
    """Of one setting, over the main model alone with its defaults: of the last stage, or of a round of halving."""

    setting: Setting
    throughputs: list[float]  # by round
    speedups: list[float]

    @property
    def speedup(self) -> float:
        return statistics.median(self.speedups)

    def over(self, other: "Figures") -> list[float]:
        """Throughput over another's, round by round."""
        return [one / two for one, two in zip(self.throughputs, other.throughputs, strict=True)]


def figures(tuning) -> list[Figures]:
    if tuning.ways:
        alone = tuning.ways[tuning.baseline]
        rounds = range(len(alone.rounds))
        return [
            Figures(
                setting,
                [way.throughput(i) for i in rounds],
                [way.throughput(i) / alone.throughput(i) for i in rounds],
            )
            for setting, way in tuning.ways.items()
        ]
    left = [one for one in tuning.candidates.values() if one.speedup and not one.dropped]
    return [Figures(one.setting, [one.throughput], [one.speedup]) for one in left]


def judge(tuning) -> Verdict | None:
    """None where nothing was decoded."""
    found = [one for one in figures(tuning) if tuning.fits(one.setting.models)]
    alone = [one for one in found if not one.setting.draft and one.setting.engine == "GenAI"]
    drafted = [one for one in found if one.setting.draft]
    if not alone or not drafted:
        return None
    best_alone, best = fastest(alone), fastest(drafted)
    gains = best.over(best_alone)
    # No draft gains more time than inferences: what does is noise.
    pays = statistics.median(gains) >= WORTH_IT and min(gains) > 1 and _tokens_each(tuning, best) >= WORTH_IT
    settings = {"alone": _settings(best_alone)}
    for engine in ("GenAI", "ours"):
        own = [one for one in drafted if one.setting.engine == engine]
        if own and pays and statistics.median(fastest(own).over(best_alone)) >= WORTH_IT:
            settings[engine] = _settings(fastest(own))
    chosen = best if pays else best_alone
    reason = _why(tuning, best) if pays else _why_not(tuning, best, best_alone, gains)
    sentences = _sentences(tuning, found, best, best_alone, gains, reason) if pays else [reason]
    sentences += _text(tuning, chosen.setting.models)
    sentences += _command(tuning, chosen.setting)
    if tuning.note:
        sentences.append(f"Note: {tuning.note}.")
    quality = tuning.quality.get(chosen.setting.models)
    return Verdict(
        tuning.arguments.main,
        best.setting.draft,
        chosen.setting,
        best.setting.engine if pays else "alone",
        reason,
        sentences,
        settings,
        _quality(quality),
        measured_on(tuning.place, chosen.setting.models),
    )


def fastest(found: list[Figures]) -> Figures:
    """The fastest; of those as good, the one with the fewest properties."""
    top = max(one.speedup for one in found)
    good = [one for one in found if one.speedup >= AS_GOOD * top]
    return min(good, key=lambda one: (one.setting.how_many, -one.speedup))


def measured_on(place: Place, models: PropertySet) -> dict:
    """What else the figures depend on; speculative/recommendation.py compares it."""
    names = dict.fromkeys([models.device, models.draft_device])
    return {"openvino_genai": place.versions[0], **{name: place.devices[name].full_name for name in names}}


def _tokens_each(tuning, one: Figures) -> float:
    """What an inference of the main model yields: block efficiency."""
    way = tuning.ways.get(one.setting)
    if not way:
        return 1 + tuning.alpha[one.setting.draft]
    return metrics.block_efficiency([n for run in way.runs() for n in run.gained])


# ---- in words -------------------------------------------------------------------------------------------------------


def _sentences(tuning, found, best, best_alone, gains, reason) -> list[str]:
    rounds = len(best.speedups)
    low, high = min(best.speedups), max(best.speedups)
    over = f"{low:.2f}-{high:.2f} over {rounds} rounds" if rounds > 1 else "one round only: give more --minutes"
    lines = [
        f"Use this draft: {best.setting} decodes {statistics.median(best.throughputs):.1f} tokens/s, "
        f"{best.speedup:.2f}x the main model alone with its defaults ({over}).",
    ]
    if best_alone.setting != tuning.baseline:
        lines.append(
            f"Over the main model alone at its best ({best_alone.setting.models}) it is "
            f"{statistics.median(gains):.2f}x ({min(gains):.2f}-{max(gains):.2f})."
        )
    by_setting = {one.setting: one for one in found}
    usual = by_setting.get(Setting(tuning.default, "GenAI", tuning.drafts[0], 5))
    if usual and usual is not best:
        ratios = best.over(usual)
        lines.append(
            f"Over samples/speculative_decoding_lm.py with its defaults (K = 5) it is {statistics.median(ratios):.2f}x "
            f"({min(ratios):.2f}-{max(ratios):.2f}){_steps(by_setting, usual, best)}."
        )
    tau = _tokens_each(tuning, best)
    if best.speedup > UNLIKELY * tau:
        lines.append(
            f"That is more than {tau:.1f} tokens an inference of the main model can explain: the machine's speed "
            "changed while this was measured; tune again when it is quiet, or with more --minutes."
        )
    return [*lines, reason]


def _steps(by_setting: dict[Setting, Figures], usual: Figures, best: Figures) -> str:
    """Which settings did it: properties, then K, then the engine, each over the one before."""
    models, draft = best.setting.models, best.setting.draft
    same_k = by_setting.get(Setting(models, "GenAI", draft, usual.setting.draft_length))
    of_genai = [
        one
        for one in by_setting.values()
        if (one.setting.engine, one.setting.models, one.setting.draft) == ("GenAI", models, draft)
    ]
    best_k = max(of_genai, key=lambda one: one.speedup, default=None)
    steps, before = [], usual
    for after in (same_k, best_k if best.setting.engine == "ours" else None, best):
        if after and after.setting != before.setting:
            one, two = before.setting, after.setting
            changed = [str(two.models)] * (one.models != two.models)
            changed += [two.length] * (one.draft_length != two.draft_length)
            changed += ["our engine"] * (one.engine != two.engine)
            changed += [shown(two.scheduler)] * (two.scheduler not in ((), one.scheduler))
            steps.append(f"{' and '.join(changed)} {statistics.median(after.over(before)):.2f}x")
            before = after
    return f": {', '.join(steps)}" if steps else ""


def _why(tuning, best: Figures) -> str:
    """Acceptance, cost ratio, verify ratio, and what limits the gain."""
    facts = _facts(tuning, best)
    if not facts:
        return "It was not measured yet why."
    tau, acceptance, k, c, v = facts
    predicted = metrics.predicted_speedup(tau, k, c, v)
    without = {
        f"acceptance (were all draft tokens accepted: {(k + 1) / tau:.2f}x as fast)": (k + 1) / tau,
        f"the draft's cost (were it free: {(v + k * c) / v:.2f}x as fast)": (v + k * c) / v,
        f"the check's cost (were {k + 1} tokens as cheap as one: {(v + k * c) / (1 + k * c):.2f}x as fast)": (
            (v + k * c) / (1 + k * c)
        ),
    }
    model = ov.Core().read_model(tuning.arguments.main / "openvino_model.xml")
    read = weights.read(model).bytes_per_step
    plain = tuning.costs[best.setting.models, best.setting.draft].main[1]
    bound = "memory-bound: that is why checking several tokens is cheap" if v <= MEMORY_BOUND else (
        "checking several tokens is no longer free: computing begins to count"
    )  # fmt: skip
    return (
        f"Why: {acceptance:.0%} of the draft tokens are accepted, so an inference of the main model yields {tau:.1f} "
        f"tokens; a draft step costs {c:.2f} of a main step (c), checking {k + 1} tokens costs {v:.2f} of one (v), "
        f"which predicts {predicted:.1f}x. The main model reads {read / 1e9:.2f} GB for each inference, "
        f"{read / plain / 1e9:.0f} GB/s ({bound}). What limits it most is {max(without, key=without.__getitem__)}."
    )


def _why_not(tuning, best: Figures, best_alone: Figures, gains: list[float]) -> str:
    """What was measured, and what its acceptance and costs make of it."""
    measured: Costs = tuning.costs[tuning.default, best.setting.draft]
    c, v = measured.draft / measured.main[1], measured.main[2] / measured.main[1]
    alpha, tau = tuning.alpha[best.setting.draft], _tokens_each(tuning, best)
    spread = f" ({min(gains):.2f}-{max(gains):.2f} over {len(gains)} rounds)" if len(gains) > 1 else ""
    seen = (
        f"{best.setting} decodes at {statistics.median(gains):.2f}x{spread} of the main model alone "
        f"({best_alone.setting.models}, {statistics.median(best_alone.throughputs):.1f} tokens/s)"
    )
    costs = f"a draft step costs {c:.2f} of a main step and checking two tokens {v:.2f} of one"
    if tau < WORTH_IT:
        return (
            f"Do not use this draft, because hardly any of its tokens is accepted (probability {alpha:.2f}): "
            f"an inference of the main model yields {tau:.2f} tokens, and no speedup can be larger. "
            f"Measured: {seen}; {costs}."
        )
    return (
        f"Do not use this draft, because even at its best it gains too little: {seen}. A draft token is accepted with "
        f"probability {alpha:.2f}, {costs}, so that it pays above a probability of {max(v + c - 1, 0):.2f}."
    )


def _facts(tuning, one: Figures) -> tuple[float, float, int, float, float] | None:
    """tau, acceptance rate, K (the mean one, rounded), cost ratio, verify ratio."""
    measured = tuning.costs.get((one.setting.models, one.setting.draft))
    way = tuning.ways.get(one.setting)
    if not measured or not way:
        return None
    row = measuring.row(way, tuning.ways[tuning.baseline])
    verify = measured.verify()
    k = min(max(1, round(row["mean_draft_length"])), LONGEST)
    return (
        row["block_efficiency"],
        row["acceptance_rate"] or 0.0,
        k,
        measured.draft / verify[1],
        verify[k + 1] / verify[1],
    )


def _text(tuning, models: PropertySet) -> list[str]:
    """What it does to the text, and what was faster but changes it too much."""
    quality = tuning.quality.get(models)
    if not quality:
        return []
    lines = [f"The text: {models}: {quality} (grade: {quality.grade})."]
    default = tuning.quality.get(tuning.default)
    if models != tuning.default and default:
        lines[0] += f" With OpenVINO's defaults: {default} (grade: {default.grade})."
    differences = _first_differences(tuning, models)
    if differences:
        lines.append(differences)
    marked = [one for one in tuning.quality if not tuning.quality[one].fits(default)]
    if marked:
        names = "; ".join(f"{one}: {tuning.quality[one]}" for one in marked)
        allowed = "--allow-quality-loss lets them be" if not tuning.arguments.allow_quality_loss else "now allowed"
        lines.append(f"These change the text beyond the limits and are not recommended ({allowed}): {names}.")
    return lines


def _first_differences(tuning, models: PropertySet) -> str:
    """Of the texts that were decoded in the last stage and have a reference."""
    references = {reference.prompt.tobytes(): reference for reference in tuning.references}
    total, found = 0, []
    for setting, way in tuning.ways.items():
        if setting.models != models:
            continue
        for prompt, run in zip(tuning.decoded_prompts, way.runs(), strict=True):
            reference = references.get(prompt.tobytes())
            if reference:
                total += 1
                difference = text_quality.first_difference(reference, run.tokens)
                found += [difference] if difference else []
    if not total:
        return ""
    real = sum(margin > text_quality.NEAR_TIE for _, margin in found)
    return (
        f"Of {total} texts decoded so, {total - len(found)} are the f32 text to the last compared token; the first "
        f"difference is a near-tie in {len(found) - real} and real in {real}."
    )


def _command(tuning, setting: Setting) -> list[str]:
    """As a command, with --recommended and spelled out, and as Python."""
    main = str(tuning.arguments.main)
    models = setting.models
    if not setting.draft:
        program, folders = "greedy_causal_lm.py", [main]
    else:
        program = "speculative_decoding_lm.py" if setting.engine == "GenAI" else "speculative_sampling_lm.py"
        folders = [main, str(setting.draft)]
    begin = ["python", f"samples/{program}", *folders, PROMPT]
    begin += ["--temperature", "0"] if setting.engine == "ours" else []
    options = ["--device", models.device] if models.device != "CPU" else []
    for name, value in models.properties:
        options += ["--property", f"{name}={value}"]
    if setting.draft:
        options += ["--draft-device", models.draft_device] if models.draft_device != "CPU" else []
        if models.draft_properties != models.properties:
            for name, value in models.draft_properties:
                options += ["--draft-property", f"{name}={value}"]
        options += ["-k", "auto" if setting.draft_length == "adaptive" else f"{setting.draft_length:g}"]
    for name, value in setting.scheduler:
        options += ["--scheduler", f"{name}={value}"]
    kept_beside = recommendation.place(tuning.arguments.main, tuning.drafts) and not tuning.arguments.out
    return [
        *([f"Run it: {shlex.join([*begin, '--recommended'])}"] if kept_beside else []),
        f"{'or' if kept_beside else 'Run it'}, spelled out: {shlex.join([*begin, *options])}",
        "In Python:",
        *("    " + line for line in _python(main, setting)),
    ]


def _python(main: str, setting: Setting) -> list[str]:
    models = setting.models
    properties, draft_properties = dict(models.properties), dict(models.draft_properties)
    length = ""
    if isinstance(setting.draft_length, float):
        length = f", assistant_confidence_threshold={setting.draft_length}"
    elif setting.draft and setting.draft_length != "adaptive":
        length = f", num_assistant_tokens={setting.draft_length}"
    config = f"GenerationConfig(max_new_tokens=100{length})"
    if setting.engine == "ours":
        return [
            "from openvino_genai import GenerationConfig",
            "from speculative import decoder",
            f"engine = decoder.load({main!r}, {models.device!r}, {str(setting.draft)!r}, {models.draft_device!r}, "
            f"{properties}, {draft_properties})",
            f"config = {config}",
            f"print(engine.generate({PROMPT!r}, config).text)",
        ]
    lines = ["import openvino_genai"]
    arguments = "".join(f", {name}={value!r}" for name, value in models.properties)
    if setting.scheduler:
        lines.append("scheduler = openvino_genai.SchedulerConfig()")
        lines += [f"scheduler.{name} = {value!r}" for name, value in setting.scheduler]
        arguments += ", scheduler_config=scheduler"
    if setting.draft:
        own = "".join(f", {name}={value!r}" for name, value in models.draft_properties)
        lines.append(f"draft = openvino_genai.draft_model({str(setting.draft)!r}, {models.draft_device!r}{own})")
        arguments = ", draft_model=draft" + arguments
    return [
        *lines,
        f"pipe = openvino_genai.LLMPipeline({main!r}, {models.device!r}{arguments})",
        f"config = openvino_genai.{config}",
        f"print(pipe.generate({PROMPT!r}, config))",
    ]


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(tuning) -> str:
    """The last ones, and what each property did."""
    lines = [f"{'properties, K = ' + str(tuning.k):<58} {'iteration':>9} {'alone':>6}   text as f32   mean KL   grade"]
    for one in sorted(tuning.property_candidates.values(), key=lambda one: -one.speedup):
        quality = tuning.quality.get(one.models)
        text = f"{quality.agreement:11.1%}   {quality.mean_kl:7.5f}   {quality.grade}" if quality else ""
        lines.append(f"{one.models!s:<58} {one.speedup:8.2f}x {one.alone:5.2f}x   {text}")
    for name, reason in tuning.failed.items():
        lines.append(f"{name:<58} failed: {reason}")
    lines += ["", f"{'decoding':<76} tokens/s   speedup (range)"]
    for one in sorted(figures(tuning), key=lambda one: -one.speedup):
        lines.append(
            f"{one.setting!s:<76} {statistics.median(one.throughputs):8.1f}   {one.speedup:.2f}x "
            f"({min(one.speedups):.2f}-{max(one.speedups):.2f})"
        )
    return "\n".join(lines)


def rows(tuning) -> list[dict]:
    """As in all result objects: the last ones."""
    return [measuring.row(way, tuning.ways[tuning.baseline]) for way in tuning.ways.values()]


def candidates(tuning) -> list[dict]:
    """All that was tried."""
    found = []
    last = {one.setting: one for one in figures(tuning)}
    for one in (*tuning.property_candidates.values(), *tuning.candidates.values()):
        is_set = isinstance(one.setting, PropertySet)
        final = last.get(one.setting)
        settings = Setting(one.models, "ours").as_dict() if is_set else one.setting.as_dict()
        found.append(
            {
                "name": str(one.setting),
                "stage": "properties" if is_set else "draft length",
                "settings": {**settings, **({} if is_set else {"engine": one.setting.engine})},
                "throughput": statistics.median(final.throughputs) if final else one.throughput,
                "speedup": final.speedup if final else one.speedup,
                "spread": [min(final.speedups), max(final.speedups)] if final else None,
                **_quality(tuning.quality.get(one.models)),
                "dropped_in_round": one.dropped,
            }
        )
    found += [{"name": name, "failed": reason} for name, reason in tuning.failed.items()]
    return found


def _settings(one: Figures) -> dict:
    return {
        **one.setting.as_dict(),
        "throughput": statistics.median(one.throughputs),
        "speedup": one.speedup,
        "speedup_range": [min(one.speedups), max(one.speedups)],
    }


def _quality(quality: text_quality.Quality | None) -> dict:
    if not quality:
        return {}
    return {
        "agreement": quality.agreement,
        "near_ties": len(quality.margins) - quality.real,
        "real_differences": quality.real,
        "mean_kl": quality.mean_kl,
        "grade": quality.grade,
    }
