"""Exhaustive check of tune.py's choice: every setting is decoded, none pruned by a prediction or a first guess.

    python scripts/tune.py MAIN DRAFT --minutes 10 --exhaustive 15

It covers all property sets within the quality limits with each engine: plain, ten draft lengths up to 16, adaptive and
by confidence, in the same process and session as tuning. As in tuning, the better half is measured longer, and the
finalists in rounds interleaved with the choice.
"""

import statistics
from functools import partial

from speculative.bench.methods import ADAPTIVE_LOOKUP, TWO_SOURCES
from speculative.bench.result import ExhaustiveCheck
from speculative.bench.tuning.choice import figures
from speculative.bench.tuning.finals import Finals
from speculative.bench.tuning.lengths import THRESHOLDS, LengthStage
from speculative.bench.tuning.session import LENGTHS_BY, Clock, Contest, Session
from speculative.bench.tuning.settings import PropertySet, Setting
from speculative.pair.engines import GENAI, NATIVE

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)  # beyond 6, neighbours are as good as each other
LAST = 6  # settings in the final rounds, besides the choice and the main model alone


class EverySetting(LengthStage):
    """Every engine, draft and draft length with every property set within the quality limits."""

    def __init__(self, session: Session, choice: Setting):
        super().__init__(session)
        self.choice = choice

    def settings(self) -> list[Setting]:
        sets = [one.models for one in self.session.measured_sets() if self.session.fits(one.models)]
        return self.session.possible([self.choice, *(one for models in sets for one in self.all_with(models))])

    def all_with(self, models: PropertySet) -> list[Setting]:
        settings = [
            Setting(models, GENAI),
            Setting(models, NATIVE),
            Setting(models, NATIVE, draft_length=ADAPTIVE_LOOKUP),
        ]
        for draft in filter(None, self.session.drafts):
            settings += [
                self.session.with_draft(models, engine, draft, k) for k in LENGTHS for engine in (GENAI, NATIVE)
            ]
            if self.session.on_one(partial(self.session.measure_costs, models=models, draft=draft)):
                settings += [
                    self.session.with_draft(models, NATIVE, draft, rule)
                    for rule in ("adaptive", TWO_SOURCES, *THRESHOLDS)
                ]
        return settings


class FastestAndChoice(Finals):
    """The fastest of all settings, the choice, and the main model alone."""

    def __init__(self, session: Session, choice: Setting):
        super().__init__(session)
        self.choice = choice

    def finalists(self) -> list[Setting]:
        candidates = sorted(self.session.candidates.values(), key=lambda one: -one.speedup)
        fastest = [one.setting for one in candidates if one.speedup and not one.dropped]
        return list(dict.fromkeys([self.session.baseline, self.choice, *fastest[:LAST]]))


class Exhaustive(Session):
    """Continues from `tuning`, which is finished and chose `choice`; `tuning` itself is not modified."""

    def __init__(self, tuning: Session, choice: Setting, minutes: float):
        self.__dict__.update(tuning.__dict__)
        self.choice = choice
        self.seconds = 60 * minutes
        self.clock = Clock(self.seconds)
        self.candidates, self.choosing = {}, Contest(1.0)

    def run(self) -> None:
        EverySetting(self, self.choice).halve()
        self.clock.bar.close()
        self.clock = Clock((1 - LENGTHS_BY) * self.seconds)  # for the finalists, however long the sweep took
        finals = FastestAndChoice(self, self.choice)
        finals.compare(self.choosing, finals.finalists())

    def result(self) -> ExhaustiveCheck:
        """For the result object: number of settings decoded, the fastest finalist, the choice's ratio to it."""
        last = {one.setting: one for one in figures(self)}
        over = {setting: one.over(last[self.choice]) for setting, one in last.items()}  # the choice, round by round
        fastest = max(over, key=lambda setting: statistics.median(over[setting]))
        return {
            "decoded": len(self.candidates),
            "choice": str(self.choice),
            "fastest": str(fastest),
            "ratio": 1 / statistics.median(over[fastest]),
            "spread": [1 / max(over[fastest]), 1 / min(over[fastest])],
            "rounds": len(over[fastest]),
            "last": {str(setting): statistics.median(one.throughputs) for setting, one in last.items()},
        }


def sentence(result: ExhaustiveCheck | None) -> str:
    if not result:
        return "The exhaustive check of the choice did not finish."
    if result["fastest"] == result["choice"]:
        return f"Exhaustive check: the choice is the fastest of all {result['decoded']} settings decoded."
    low, high = result["spread"]
    return (
        f"Exhaustive check: of all {result['decoded']} settings decoded, the fastest is {result['fastest']}; the "
        f"choice reaches {result['ratio']:.2f} of its speed ({low:.2f}-{high:.2f})."
    )
