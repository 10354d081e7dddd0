"""Which method scripts/tune.py chooses: the fastest with a draft, and the fastest without, by its measurements."""

import statistics
from dataclasses import dataclass, replace

from speculative.bench.tuning.session import Contest, Session
from speculative.bench.tuning.settings import Setting
from speculative.pair.engines import GENAI, NATIVE
from speculative.sequence import metrics

WORTH_IT = 1.05  # minimum speedup of drafting over the fastest method without, to recommend it
AS_GOOD = 0.99  # fraction of the fastest within which the fewest properties win


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

    def with_figures(self, results: dict[Setting, Figures]) -> "TuningChoice":
        """The same choice with other results."""
        drafted, alone, sample_alone, *by_engine = (results[setting] for setting in self.settings)
        return TuningChoice(drafted, alone, sample_alone, dict(zip(self.of_engine, by_engine, strict=True)))

    def unless_slower_than(self, sample: Figures | None) -> "TuningChoice":
        """The same choice, but drafting with the sample's defaults (`sample`) if they were faster in every round."""
        if not sample or max(self.drafted.over(sample)) >= 1:
            return self
        return replace(self, drafted=sample, of_engine={**self.of_engine, sample.setting.engine: sample})


def figures(tuning: Session) -> list[Figures]:
    """The results the choice is based on."""
    if tuning.choosing.methods:
        return figures_of(tuning.choosing, tuning.baseline)
    remaining = [one for one in tuning.candidates.values() if one.speedup and not one.dropped]
    return [Figures(one.setting, [one.throughput], [one.speedup]) for one in remaining if one.throughput is not None]


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
    candidates = [
        one for one in figures(tuning) if tuning.fits(one.setting.models) and str(one.setting) not in tuning.failed
    ]
    drafted = [one for one in candidates if tuning.drafts_with(one.setting)]
    alone = [one for one in candidates if not tuning.drafts_with(one.setting)]
    sample_alone = [one for one in alone if one.setting.engine == GENAI and not one.setting.scheduler]
    if not sample_alone or not drafted:
        return None
    by_engine = {engine: [one for one in drafted if one.setting.engine == engine] for engine in (GENAI, NATIVE)}
    of_engine = {engine: fastest(candidates) for engine, candidates in by_engine.items() if candidates}
    best = fastest(drafted)
    of_engine[best.setting.engine] = best
    return TuningChoice(best, fastest(alone), fastest(sample_alone), of_engine)


def fastest(candidates: list[Figures]) -> Figures:
    """The fastest; among near-equals, the one with the fewest properties."""
    top = max(one.speedup for one in candidates)
    good = [one for one in candidates if one.speedup >= AS_GOOD * top]
    return min(good, key=lambda one: (one.setting.how_many, -one.speedup))


def is_worth_it(tuning: Session, one: Figures, best_alone: Figures) -> bool:
    """Whether a method that drafts gains enough over the fastest one without: 5 % in the median round, and some even in
    the worst round. A draft cannot save more time than forward passes: a larger gain is noise."""
    gains = one.over(best_alone)
    return statistics.median(gains) >= WORTH_IT and min(gains) > 1 and tokens_each(tuning, one) >= WORTH_IT


def to_remeasure(tuning: Session) -> list[Setting]:
    """The choice and everything its gain is reported against."""
    choice = choose(tuning)
    if not choice:
        return []
    by_setting = {one.setting: one for one in figures(tuning)}
    sample_setting = tuning.sample_setting
    steps = (
        [one.setting for one in steps_to(by_setting, by_setting[sample_setting], choice.drafted)]
        if sample_setting in by_setting
        else []
    )
    return list(dict.fromkeys([tuning.baseline, *choice.settings, *([sample_setting] if steps else []), *steps]))


def steps_to(by_setting: dict[Setting, Figures], sample: Figures, best: Figures) -> list[Figures]:
    """The steps from the sample's settings to the best ones: properties, then K, then the engine."""
    models, draft = best.setting.models, best.setting.draft
    same_k = by_setting.get(Setting(models, GENAI, draft, sample.setting.draft_length))
    of_genai = [
        one
        for one in by_setting.values()
        if (one.setting.engine, one.setting.models, one.setting.draft) == (GENAI, models, draft)
    ]
    best_k = max(of_genai, key=lambda one: one.speedup, default=None)
    steps = [sample]
    for after in (same_k, best_k if draft and best.setting.engine == NATIVE else None, best):
        if after and after.setting != steps[-1].setting:
            steps.append(after)
    return steps[1:]


def contest_of(tuning: Session, setting: Setting) -> Contest | None:
    """The rounds to report for a setting, the new ones if any; None if it was not in either contest."""
    return next((one for one in (tuning.remeasured, tuning.choosing) if setting in one.methods), None)


def tokens_each(tuning: Session, one: Figures) -> float:
    """Block efficiency: tokens per main-model forward pass."""
    contest = contest_of(tuning, one.setting)
    if not contest:
        return 1 + tuning.alpha[one.setting.draft]
    return metrics.block_efficiency([n for run in contest.methods[one.setting].runs() for n in run.gained]) or 1.0
