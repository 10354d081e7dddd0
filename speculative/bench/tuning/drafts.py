"""Reference texts in f32, then acceptance and cost of each draft with default properties."""

from speculative.bench.tuning.client import TuningClient
from speculative.bench.tuning.session import (
    DRAFTS_BY,
    FIRST_TOKENS,
    MIN_PROMPTS_PER_ROUND,
    REFERENCE_BY,
    Ended,
    Session,
)
from speculative.sequence import metrics

MAX_REFERENCES = 8  # texts in f32


class DraftStage:
    """Makes the reference texts and measures the drafts."""

    def __init__(self, session: Session):
        self.session = session

    def make_references(self) -> None:
        self.session.clock.tick("f32 reference")
        self.session.on_one(self.references_on)
        self.session.remember("take_references", self.session.references)

    def references_on(self, bench: TuningClient) -> None:
        self.session.references.clear()
        exact = self.session.default.exact
        tokens = min(64, self.session.arguments.max_new_tokens)
        for ids in self.session.prompts:
            reference = self.session.attempt(bench, exact, "reference", exact, ids, tokens)
            if not reference:
                break
            self.session.references.append(reference)
            enough = len(self.session.references) >= MAX_REFERENCES or self.session.clock.until(REFERENCE_BY) < 0
            if enough and len(self.session.references) >= MIN_PROMPTS_PER_ROUND:
                break

    def try_drafts(self) -> None:
        """Acceptance and cost of each draft with default properties, for a first estimate of K."""
        self.session.clock.tick("drafts")
        self.session.on_one(self.try_drafts_on)
        if not self.session.drafts:
            raise Ended([*self.session.failed.values()][-1])  # the first ones may be of one engine only
        self.session.drafts.sort(
            key=lambda draft: max(self.session.predicted(self.session.default, draft).values()), reverse=True
        )
        best = self.session.predicted(self.session.default, self.session.drafts[0])
        self.session.k = max(best, key=best.__getitem__)

    def try_drafts_on(self, bench: TuningClient) -> None:
        for draft in list(self.session.drafts):
            setting, runs = self.session.drafting(self.session.default, draft, 4), []
            for ids in self.session.prompts[:4]:
                run = self.session.decode(bench, setting, ids, 2 * FIRST_TOKENS)
                runs += [run] if run else []
                if not run or self.session.clock.until(DRAFTS_BY) < 0:
                    break
            if not runs or not self.session.measure_costs(bench, self.session.default, draft):
                self.session.drafts.remove(draft)
                continue
            proposed = [n for run in runs for n in run.proposed]
            accepted = [n for run in runs for n in run.accepted]
            self.session.alpha[draft] = metrics.per_token_acceptance(proposed, accepted) or 0.0
