"""The recommendation of scripts/tune.py: decision, reason, command and Python code, from its measurements.

A draft's gain is measured against the fastest method without one: GenAI's pipeline with any scheduler, this project's
engine, or suffix decoding. If no draft is given, suffix decoding takes its place. The rounds that decide are not the
rounds reported, as the fastest of many is partly the luckiest.
"""

import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from speculative.bench.cluster.hosts import Place
from speculative.bench.result import ModelFingerprint, QualityFigures, Recommendation, RecommendedSettings
from speculative.bench.tuning import reasons
from speculative.bench.tuning.choice import Figures, choose, figures, figures_of, is_worth_it
from speculative.bench.tuning.command import command
from speculative.bench.tuning.session import Session
from speculative.bench.tuning.settings import PropertySet, Setting
from speculative.pair import recommendation
from speculative.pair.engines import GENAI, NATIVE


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


def judge(tuning: Session) -> Verdict | None:
    """The verdict; None if nothing was decoded."""
    choice = choose(tuning)
    if not choice:
        return None
    remeasured = {one.setting: one for one in figures_of(tuning.remeasured, tuning.baseline)}
    is_remeasured = set(choice.settings) <= set(remeasured)
    found = list(remeasured.values()) if is_remeasured else figures(tuning)
    if is_remeasured:
        choice = choice.with_figures(remeasured).unless_slower_than(remeasured.get(tuning.sample_setting))
    best, best_alone = choice.drafted, choice.alone
    gains = best.over(best_alone)
    use_draft = is_worth_it(tuning, best, best_alone)
    chosen = best if use_draft else best_alone
    worth_it = [one for one in choice.of_engine.values() if use_draft and is_worth_it(tuning, one, best_alone)]
    kept: dict[str, Figures] = {}
    for one in (choice.sample_alone, *worth_it, chosen):
        kept.setdefault(one.setting.kept_as, one)
    models = kept[chosen.setting.kept_as].setting.models  # not the chosen method's if only the Python code runs that
    if use_draft:
        reason = reasons.why_it_helps(tuning, best)
        sentences = [*reasons.gains(tuning, found, choice, is_remeasured), reason]
    else:
        reason = reasons.why_it_does_not(tuning, best, best_alone, gains)
        sentences = [reason, *reasons.gain_of_another(tuning, choice)]
    sentences += reasons.effect_on_quality(tuning, chosen.setting.models)
    sentences += command(tuning, chosen.setting, choice)
    if tuning.note:
        sentences.append(f"Note: {tuning.note}.")
    quality = tuning.quality.get(models)
    return Verdict(
        tuning.arguments.main,
        best.setting.draft,
        chosen.setting,
        chosen.setting.kept_as,
        reason,
        sentences,
        {name: _settings(one) for name, one in kept.items()},
        quality.figures() if quality else {},
        measured_on(tuning.place, models),
    )


def measured_on(place: Place, models: PropertySet) -> dict[str, str]:
    """The versions and devices the results depend on; speculative/pair/recommendation.py compares them."""
    names = dict.fromkeys([models.device, models.draft_device])
    return {"openvino_genai": place.versions[0], **{name: place.devices[name].full_name for name in names}}


def _fingerprint(folder: Path) -> ModelFingerprint:
    return {"folder": folder.name, "fingerprint": recommendation.fingerprint(folder)}


def _settings(one: Figures) -> RecommendedSettings:
    return {
        **one.setting.as_dict(),
        "throughput": statistics.median(one.throughputs),
        "speedup": one.speedup,
        "speedup_range": [min(one.speedups), max(one.speedups)],
    }
