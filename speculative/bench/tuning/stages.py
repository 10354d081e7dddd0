"""The stages of tune.py: drafts, devices and properties, then engine and draft length, then the finalists.

Every stage interleaves its candidates with their baseline: the default properties, or the main model alone with them.
On a cluster each machine measures part of the candidates and the baseline, so that both sides of a ratio come from one
machine; finalists are measured on all machines, each round on one. The models run in separate processes
(tuning/client.py): a crash costs only the current candidate.
"""

from speculative.bench.tuning.drafts import DraftStage
from speculative.bench.tuning.finals import Finals
from speculative.bench.tuning.lengths import LengthStage
from speculative.bench.tuning.properties import PropertyStage
from speculative.bench.tuning.session import Session
from speculative.drafting.policy import LONGEST


class Tuning(Session):
    """One tuning run."""

    def run(self) -> None:
        longest = max(len(ids) for ids in self.prompts) + self.arguments.max_new_tokens
        self.remember("open", self.arguments.main, max(longest + LONGEST + 2, 128))
        drafts, finals = DraftStage(self), Finals(self)
        drafts.make_references()
        drafts.try_drafts()
        PropertyStage(self).try_properties()
        LengthStage(self).halve()
        finals.compare(self.choosing, finals.finalists())
        finals.remeasure()
