"""EAGLE-3 head for many sequences in one forward pass: a `BatchModel` that reads hidden states of the main model."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from speculative.models.batch_model import BatchModel, ScheduledTokens, Slot
from speculative.models.block_pool import BlockTable
from speculative.models.eagle3_head import EagleHead, Entries
from speculative.models.paged_model import SequenceInput


class HeadSlot(Slot):
    """A sequence's slot in the head's cache, beside its slot `main` in the main model's."""

    def __init__(self, table: BlockTable, capacity: int, model: "BatchHead", main: Slot):
        super().__init__(table, capacity, model)
        self.targets = model.targets
        self.main = main
        self.entries = Entries(capacity)

    def num_known(self, tokens: np.ndarray) -> int:
        """The number of entries for `tokens` whose hidden state the main model has."""
        return min(self.main.common_prefix(tokens), len(tokens) - 1)

    def common_prefix(self, tokens: np.ndarray) -> int:
        """`tokens` less those to compute."""
        spans = self.entries.missing(tokens, self.num_known(tokens))
        return len(tokens) - sum(end - start for start, end in spans)


class BatchHead(BatchModel):
    """An EAGLE-3 head as a draft of `main`. Sequences share no blocks of its cache. Not thread-safe."""

    def __init__(self, head: EagleHead, main: BatchModel, context: int | None = None):
        """Takes over `head`, which must not be used directly. `context` is its longest sequence in tokens."""
        super().__init__(head, context, share=False)
        self._main = main
        self.targets, self._order = head.targets, head.order

    def slot(self, tokens: int, salt: bytes = b"", main: Slot | None = None) -> HeadSlot:
        """A slot for the draft of a sequence of up to `tokens` tokens, whose slot in the main model is `main`."""
        assert main is not None
        tokens = min(tokens, self.context)
        return HeadSlot(self.pool.reserve(tokens, salt), tokens, self, main)

    def logits(self, parts: Sequence[ScheduledTokens]) -> list[np.ndarray]:
        """Logits float32 [1, draft vocabulary] after the tokens of each part, of the `targets`."""
        slots, texts = [cast(HeadSlot, part.slot) for part in parts], [part.tokens for part in parts]
        num_known = [slot.num_known(tokens) for slot, tokens in zip(slots, texts, strict=True)]
        logits = [np.zeros((1, len(self.targets)), np.float32) for _ in parts]
        missing = {i: slot.entries.missing(texts[i], num_known[i]) for i, slot in enumerate(slots)}
        while missing := {i: spans for i, spans in missing.items() if spans}:  # once, unless an iteration has failed
            spans = {i: rest.pop(0) for i, rest in missing.items()}
            runs, states = [], []
            for i, (start, end) in spans.items():
                slots[i].entries.cut(start)
                runs.append(SequenceInput(slots[i].blocks(end), start, texts[i][start + 1 : end + 1], 1))
                by_head = slots[i].entries.hidden
                states.append(self._main.hidden_states(slots[i].main, start, end) if end <= num_known[i] else by_head)
            rows = self._backend.run_together(runs, np.concatenate(states))
            own_states = self._backend.hidden_states
            assert own_states is not None
            last = -1
            for row, (i, (start, end)) in zip(rows, spans.items(), strict=True):
                last += end - start
                slots[i].entries.commit(texts[i], start, end, own_states[last : last + 1], verified=end <= num_known[i])
                logits[i][0] = row[self._order]
        return logits
