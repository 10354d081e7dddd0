"""The draft-length policy of a batch without the clock, for tests that must not depend on this machine's speed."""

from speculative.drafting.batch_policy import BatchDraftLength


class Untimed(BatchDraftLength):
    """Decides by the given costs, whatever time this machine takes."""

    def update_draft(self, tokens, seconds, search_seconds=0.0):
        super().update_draft(tokens, float(self.round_cost(tokens)))

    def update_main(self, verified, prompts, gained, seconds):
        super().update_main(verified, prompts, gained, float(self.main(verified + prompts)))
