"""EAGLE-3 head for many sequences in one forward pass: a `BatchModel` that reads hidden states of the main model."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from speculative.models.batch_model import BatchModel, ScheduledTokens, Slot
from speculative.models.block_pool import BlockTable
from speculative.models.eagle3_head import MIN_PASS, EagleHead, Entries
from speculative.models.paged_model import SequenceInput


class Missing(NamedTuple):
    """What a sequence's next logits need: ranges (start, end) of entries. The main model has the hidden states of the
    first `num_known`."""

    num_known: int
    spans: list[tuple[int, int]]


class HeadSlot(Slot):
    """A sequence's slot in the head's cache, beside its slot `main` in the main model's."""

    def __init__(self, table: BlockTable, capacity: int, model: "BatchHead", main: Slot):
        super().__init__(table, capacity, model)
        self.targets = model.targets
        self.main = main
        self.entries = Entries(capacity)
        self._missing: tuple[bytes, int, Missing] | None = None  # the last one: of tokens, main.version

    def missing(self, tokens: np.ndarray) -> Missing:
        """What the logits after `tokens` need."""
        key = tokens.tobytes()
        if self._missing is None or self._missing[:2] != (key, self.main.version):
            num_known = min(self.main.common_prefix(tokens), len(tokens) - 1)
            self._missing = key, self.main.version, Missing(num_known, self.entries.missing(tokens, num_known))
        return self._missing[2]

    def cut(self, start: int) -> None:
        """Count no entry from `start` on as cached."""
        self._missing = None
        self.entries.cut(start)

    def common_prefix(self, tokens: np.ndarray) -> int:
        """`tokens` less those to compute."""
        return len(tokens) - sum(end - start for start, end in self.missing(tokens).spans)


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
        """Logits float32 [1, draft vocabulary] after the tokens of each part, of the `targets`, as views that the next
        call overwrites."""
        slots, texts = [cast(HeadSlot, part.slot) for part in parts], [part.tokens for part in parts]
        logits = [np.zeros((0, len(self.targets)), np.float32) for _ in parts]
        needed = [slot.missing(tokens) for slot, tokens in zip(slots, texts, strict=True)]
        missing = {i: list(spans) for i, (_, spans) in enumerate(needed)}
        while missing := {i: spans for i, spans in missing.items() if spans}:  # once, unless an iteration has failed
            logits = [rows.copy() for rows in logits]  # the next forward pass overwrites them
            spans = {i: rest.pop(0) for i, rest in missing.items()}
            runs, states = [], []
            for i, (start, end) in spans.items():
                slots[i].cut(start)
                runs.append(SequenceInput(slots[i].blocks(end), start, texts[i][start + 1 : end + 1], 1))
                by_head = slots[i].entries.hidden
                states.append(
                    self._main.hidden_states(slots[i].main, start, end) if end <= needed[i].num_known else by_head
                )
            rows = self._backend.run_together(runs, np.concatenate(states), width=MIN_PASS)
            own_states = self._backend.hidden_states
            assert own_states is not None
            last = -1
            for row, (i, (start, end)) in zip(rows, spans.items(), strict=True):
                last += end - start
                is_known = end <= needed[i].num_known
                slots[i].entries.commit(texts[i], start, end, own_states[last : last + 1], verified=is_known)
                logits[i] = row[np.newaxis, self._order]
        return logits
