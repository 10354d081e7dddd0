"""Several sequences of one model, each with its own text, in one inference: `CachedModel` for many.

    model = BatchModel(cached_model.load(Path("models/embedded/main"), capacity=8192))
    one, other = model.slot(longest=500), model.slot(longest=200)
    rows = model.logits([ScheduledTokens(one, tokens_of_one, last=3), ScheduledTokens(other, tokens_of_other, last=1)])

As there, every call gives the whole text so far of each, and what the cache holds of it is not computed again. That may
come from other texts, which began alike: `share` and `adopt` say when.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speculative.models.block_pool import BlockPool, BlockTable
from speculative.models.cached_model import CachedModel
from speculative.models.paged_model import PagedModel, SequenceInput

TRIED = 24  # tokens to see whether one that was rolled back leaves a trace; all in one block


class Slot:
    """A text's place in the cache: its blocks, what they hold, and the logits computed last.

    To `DraftModelProposer` it is the model of one text, whose logits are there already.
    """

    def __init__(self, lease: BlockTable, capacity: int, model: "BatchModel"):
        self.capacity = capacity  # longest text, in tokens
        self.rows = np.zeros((0, 0), np.float32)  # [last, V]: the caller's, from what `BatchModel.logits` returned
        self._lease = lease
        self._model = model
        self._held = np.zeros(capacity, np.int64)
        self._length = 0
        self._written = 0  # tokens that were there at some time, rejected ones too
        self._pure = capacity  # tokens at the beginning with no trace of a rejected one

    @property
    def width(self) -> int:
        return self._model.width

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [1, V] behind `tokens`, the text that was asked for last."""
        return self.rows[-1:]

    def blocks(self, tokens: int) -> np.ndarray:
        """The numbers, int32, of the blocks for the first `tokens` tokens."""
        return self._lease.blocks(tokens)

    def give_back(self) -> None:
        """The blocks, and what else takes memory; the text is gone."""
        self._lease.give_back()
        self.rows = np.zeros((0, 0), np.float32)
        self._held = np.zeros(0, np.int64)

    def common_prefix(self, tokens: np.ndarray) -> int:
        """How many of `tokens` the cache holds."""
        n = min(self._length, len(tokens))
        differ = self._held[:n] != tokens[:n]
        first = int(differ.argmax()) if n else 0
        return first if n and differ[first] else n

    def adopt(self, tokens: np.ndarray) -> int:
        """Have in common with other texts what they shared of the beginning of `tokens`; the last one is left to
        compute. Returns how many tokens that spares."""
        held = self.common_prefix(tokens)
        if not self._model.shares or len(tokens) - held <= self._model.pool.block_size:
            return 0
        found = self._lease.adopt(tokens[:-1])
        if found <= held:
            return 0
        self.hold(held, tokens[held:found])
        self._written = max(self._written, found)
        return found - held

    def share(self, tokens: np.ndarray) -> None:
        """Share with other texts what the cache holds of `tokens`, which are certain: none of them is ever rejected."""
        if self._model.shares:
            certain = min(self._length, self._pure, len(tokens) - 1)
            if certain >= self._lease.shared + self._model.pool.block_size:
                self._lease.share(tokens[: min(certain, self.common_prefix(tokens))])

    def begin(self, start: int, end: int) -> None:
        """An inference is to compute the tokens from `start` to `end`: should it fail, nothing there is trusted."""
        if start < self._lease.shared:
            raise ValueError(f"{self._lease.shared} tokens are shared with other texts, and not to be computed anew")
        if start < self._written and self._model.leaves_traces:
            self._pure = min(self._pure, start - start % self._model.pool.block_size)
        self._length = start
        self._written = max(self._written, end)

    def hold(self, start: int, tokens: np.ndarray) -> None:
        """Note that `tokens` are in the cache, from `start` on, and nothing behind."""
        self._length = start + len(tokens)
        self._held[start : self._length] = tokens


class ScheduledTokens(NamedTuple):
    """A text's share in an inference: all its `tokens` (int64 [n]) so far; logits are wanted after the `last` ones."""

    slot: Slot
    tokens: np.ndarray
    last: int

    @property
    def start(self) -> int:
        """Where the inference on it starts: tokens before are in the cache."""
        return min(self.slot.common_prefix(self.tokens), len(self.tokens) - self.last)

    @property
    def missing(self) -> int:
        """How many tokens the inference computes."""
        return len(self.tokens) - self.start


class BatchModel:
    """The texts of one model. Not thread-safe."""

    def __init__(self, model: CachedModel, context: int | None = None, share: bool = True):
        """`model` is not to be used otherwise as soon as there are texts; its capacity is that of all texts together.

        `context` is the longest text, in tokens, by default as long as the capacity. Without `share`, texts have
        nothing in common. Raises ValueError where the cache is not paged: only there several texts fit one inference.
        """
        if not isinstance(model.backend, PagedModel):
            raise ValueError(
                f"several texts in one inference need a paged cache, and this model has one of the kind "
                f"{model.backend.kind!r}: take a model and a device (CPU, GPU) with paged attention, or a decoder for "
                "each text"
            )
        self.width = model.width
        self.context = min(context or model.capacity, model.capacity)
        self.cache_bytes = model.backend.cache_bytes
        self.pool = BlockPool(model.backend.blocks, model.backend.block_size)
        self.shares = share
        self.leaves_traces = share and _leaves_traces(model)
        self._backend = model.backend

    def has_room(self, tokens: int) -> bool:
        """Whether a text of up to so many tokens would get a slot."""
        return self.pool.has_room(min(tokens, self.context))

    def slot(self, tokens: int, salt: bytes = b"") -> Slot:
        """Room for a text of up to so many tokens, or as many as the context has. Raises OutOfBlocks."""
        tokens = min(tokens, self.context)
        return Slot(self.pool.promise(tokens, salt), tokens, self)

    def logits(self, parts: Sequence[ScheduledTokens]) -> list[np.ndarray]:
        """Logits float32 [last, V] of each part: views that the next call overwrites."""
        runs = []
        for slot, tokens, last in parts:
            start = ScheduledTokens(slot, tokens, last).start
            slot.begin(start, len(tokens))
            runs.append(SequenceInput(slot.blocks(len(tokens)), start, tokens[start:], last))
        logits = self._backend.run_together(runs)
        for part, run in zip(parts, runs, strict=True):
            part.slot.hold(run.start, run.tokens)
        return np.split(logits, np.cumsum([part.last for part in parts])[:-1])


def _leaves_traces(model: CachedModel) -> bool:
    """Whether a token that was rolled back changes what is computed behind it. In a cache of 8 or 4 bits it does, where
    the keys of a block share their scales: the largest key that ever was there set them."""
    ids = (np.arange(TRIED, dtype=np.int64) * 7919 + 1) % model.width
    run, text, rest, other = model.backend.run, *np.split(ids, 3)
    run(0, text, 1)
    expected = run(len(text), rest, len(rest)).copy()
    run(0, text, 1)
    run(len(text), other[::-1], 1)
    return not np.array_equal(run(len(text), rest, len(rest)), expected)
