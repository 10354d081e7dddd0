"""What scripts/tune.py measured: the printed tables, and the rows of its result."""

import statistics

from speculative.bench import harness
from speculative.bench.result import CandidateRow, CandidateSettings, FailedCandidate, MethodRow, QualityFigures
from speculative.bench.tuning.choice import Figures, contest_of, figures, figures_of
from speculative.bench.tuning.session import Candidate, Session
from speculative.bench.tuning.settings import PropertySet, Setting
from speculative.pair.engines import NATIVE


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
        setting: contest_of(tuning, setting) for setting in (*tuning.choosing.methods, *tuning.remeasured.methods)
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
        quality = tuning.quality.get(one.models)
        compared: QualityFigures = quality.figures() if quality else {}
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
                **compared,
                "dropped_in_round": one.dropped,
            }
        )
    found += [{"name": name, "failed": reason} for name, reason in tuning.failed.items()]
    return found
