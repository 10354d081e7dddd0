"""Batched model with a paged KV cache: like `CachedModel`, but many sequences in one forward pass.

    model = BatchModel(cached_model.load("models/embedded/main", capacity=8192))
    one, other = model.slot(longest=500), model.slot(longest=200)
    rows = model.logits([ScheduledTokens(one, tokens_of_one, last=3), ScheduledTokens(other, tokens_of_other, last=1)])

As there, every call passes all tokens of each sequence, and the cached prefix is not computed again. The prefix may
come from other sequences: `cache_full_blocks` adds blocks to the prefix cache, `match_prefix` reuses them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speculative.models.block_pool import BlockPool, BlockTable
from speculative.models.cached_model import CachedModel, common_prefix
from speculative.models.eagle3_head import EagleHead
from speculative.models.paged_model import PagedModel, SequenceInput, rounded_up
from speculative.models.pass_width import PassWidth

TRACE_TEST_TOKENS = 24  # tokens to test whether rolled-back tokens leave traces; they fit in one block


class Slot:
    """A sequence's slot in the KV cache: its block table, the tokens they hold, and the latest logits.

    To `DraftModelProposer` it acts as a model of one sequence whose logits are already computed.
    """

    targets: np.ndarray | None = None  # int64 [n], ascending: the token ids that its logits are of; None: 0, 1, ...

    def __init__(self, table: BlockTable, capacity: int, model: "BatchModel"):
        self.capacity = capacity  # longest sequence, in tokens
        self.rows = np.zeros((0, 0), np.float32)  # [last, V]: set by the caller from the output of `BatchModel.logits`
        self._table = table
        self._model = model
        self._tokens = np.zeros(capacity, np.int64)
        self._length = 0
        self._written = 0  # tokens ever written, rejected ones included
        self._clean_length = capacity  # leading tokens without traces of a rejected one
        self.version = 0  # increases with each change to what the cache holds

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def block_size(self) -> int:
        return self._model.pool.block_size

    def has_uncached_full_block(self, tokens: int) -> bool:
        """Whether a block that `tokens` tokens fill, and that may be shared, is not in the cache yet."""
        return self._model.shares and self._length // self.block_size < (tokens - 1) // self.block_size

    def shares_with(self, other: "Slot") -> bool:
        """Whether the two sequences may share blocks."""
        return self._table.salt == other._table.salt

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [1, V] after `tokens`, which must be those of the last `BatchModel.logits`."""
        return self.rows[-1:]

    def blocks(self, tokens: int) -> np.ndarray:
        """The block numbers int32 for the first `tokens` tokens."""
        return self._table.blocks(tokens)

    def free_blocks(self) -> None:
        """Free the blocks and all other memory of the sequence."""
        self._table.free_blocks()
        self.rows = np.zeros((0, 0), np.float32)
        self._tokens = np.zeros(0, np.int64)

    def common_prefix(self, tokens: np.ndarray) -> int:
        """The number of leading `tokens` in the cache."""
        return common_prefix(self._tokens[: self._length], tokens)

    def match_prefix(self, tokens: np.ndarray) -> int:
        """Reuse the shared blocks of other sequences for the longest prefix of `tokens` without the last token.
        Returns the number of tokens saved."""
        if not self._model.shares:
            return 0
        cached = self.common_prefix(tokens)
        if len(tokens) - cached <= self.block_size:
            return 0
        matched = self._table.match_prefix(tokens[:-1])
        if matched <= cached:
            return 0
        self.commit(cached, tokens[cached:matched])
        return matched - cached

    def cache_full_blocks(self, tokens: np.ndarray) -> None:
        """Share the cached blocks of `tokens`, which must be verified tokens, with other sequences."""
        if self._model.shares:
            final = min(self._length, self._clean_length, len(tokens) - 1)
            if final >= self._table.shared + self.block_size:
                self._table.cache_full_blocks(tokens[: min(final, self.common_prefix(tokens))])

    def start_write(self, start: int, end: int) -> None:
        """Prepare for a forward pass over the tokens from `start` to `end`; if it fails, they count as not cached."""
        if start < self._table.shared:
            raise ValueError(f"{self._table.shared} tokens are shared with other sequences and must not be overwritten")
        if start < self._written and self._model.rollback_leaves_traces:
            self._clean_length = min(self._clean_length, start - start % self.block_size)
        self.version += 1
        self._length = start
        self._written = max(self._written, end)

    def commit(self, start: int, tokens: np.ndarray) -> None:
        """Record that the cache holds `tokens` from `start` on, and nothing after them."""
        self.version += 1
        self._length = start + len(tokens)
        self._tokens[start : self._length] = tokens


class ScheduledTokens(NamedTuple):
    """A sequence in a forward pass: all its `tokens` (int64 [n]) so far, with logits after each of the `last` ones."""

    slot: Slot
    tokens: np.ndarray
    last: int

    @property
    def start(self) -> int:
        """Where its computation starts: the tokens before are in the cache."""
        return min(self.slot.common_prefix(self.tokens), len(self.tokens) - self.last)

    @property
    def missing(self) -> int:
        """The number of tokens to compute."""
        return len(self.tokens) - self.start

    @property
    def has_full_block(self) -> bool:
        """Whether the tokens to compute fill a block that others may share."""
        return self.slot.has_uncached_full_block(len(self.tokens))

    def can_wait_for(self, other: "ScheduledTokens") -> bool:
        """Whether `other` computes its next full block, which it can share then."""
        if not self.slot.shares_with(other.slot):
            return False
        start, size = self.start, self.slot.block_size
        end = start - start % size + size
        is_common = other.start < end < min(len(self.tokens), len(other.tokens))
        return is_common and np.array_equal(self.tokens[:end], other.tokens[:end])


class BatchModel:
    """A model that runs many sequences in one forward pass. Not thread-safe."""

    def __init__(self, model: CachedModel | EagleHead, context: int | None = None, share: bool = True):
        """Takes over `model`, which must not be used directly; its capacity is shared by all sequences.

        `context` is the longest sequence in tokens, by default the whole capacity. Without `share`, sequences share no
        blocks. Raises ValueError if the cache is not paged, which batching needs.
        """
        if not isinstance(model.backend, PagedModel):
            raise ValueError(
                f"batching needs a paged cache, but this model has one of kind {model.backend.kind!r}: use a model and "
                "a device (CPU, GPU) with paged attention, or one decoder per request"
            )
        self.vocab_size = model.vocab_size
        self.context = min(context or model.capacity, model.capacity)
        self.pass_width: PassWidth | None = None  # if set, pads the forward passes
        self.cache_bytes = model.backend.cache_bytes
        self.pool = BlockPool(model.backend.blocks, model.backend.block_size)
        self.shares = share
        self.rollback_leaves_traces = share and _rollback_leaves_traces(model)
        self._backend = model.backend
        self._hidden_states: np.ndarray | None = None  # float32 [entries of all blocks, size], None if not returned
        if model.backend.hidden_states is not None:
            entries, size = self.pool.block_size * model.backend.blocks, model.backend.hidden_states.shape[1]
            self._hidden_states = np.empty((entries, size), np.float32)

    def has_room(self, tokens: int) -> bool:
        """Whether a slot is available for a sequence of up to `tokens` tokens."""
        return self.pool.has_room(min(tokens, self.context))

    def slot(self, tokens: int, salt: bytes = b"", main: Slot | None = None) -> Slot:
        """A slot for a sequence of up to `tokens` tokens, at most the context length. `main` is the sequence's slot in
        the main model, which only EAGLE-3 drafts need. Raises OutOfBlocks."""
        tokens = min(tokens, self.context)
        return Slot(self.pool.reserve(tokens, salt), tokens, self)

    def logits(self, parts: Sequence[ScheduledTokens]) -> list[np.ndarray]:
        """Logits float32 [last, V] of each part, as views that the next call overwrites."""
        runs = []
        for part in parts:
            slot, tokens, last = part
            start = part.start
            slot.start_write(start, len(tokens))
            runs.append(SequenceInput(slot.blocks(len(tokens)), start, tokens[start:], last))
        width = rounded_up(sum(len(run.tokens) for run in runs))
        logits = self._backend.run_together(runs, width=self.pass_width.width_for(width) if self.pass_width else width)
        states, end, end_of_rows, rows = self._backend.hidden_states, 0, 0, []
        for part, run in zip(parts, runs, strict=True):
            part.slot.commit(run.start, run.tokens)
            begin, end = end, end + len(run.tokens)
            if self._hidden_states is not None and states is not None:
                self._hidden_states[self._entries(part.slot, run.start, len(part.tokens))] = states[begin:end]
            begin_of_rows, end_of_rows = end_of_rows, end_of_rows + part.last
            rows.append(logits[begin_of_rows:end_of_rows])
        return rows

    def hidden_states(self, slot: Slot, start: int, end: int) -> np.ndarray:
        """The hidden states float32 [end - start, size] of the cached tokens from `start` to `end`."""
        assert self._hidden_states is not None
        return self._hidden_states[self._entries(slot, start, end)]

    def _entries(self, slot: Slot, start: int, end: int) -> np.ndarray | slice:
        """Where the blocks hold the tokens from `start` to `end`: int64 [end - start], or a range."""
        size, blocks = self.pool.block_size, slot.blocks(end)
        if start // size == (end - 1) // size:
            offset = (int(blocks[-1]) - (end - 1) // size) * size
            return slice(start + offset, end + offset)
        positions = np.arange(start, end)
        return blocks[positions // size].astype(np.int64) * size + positions % size


def _rollback_leaves_traces(model: CachedModel | EagleHead) -> bool:
    """Whether a rolled-back token changes what is computed after it. It does in 8-bit or 4-bit caches whose keys share
    scales within a block: the largest key ever written there determines the scale."""
    ids = (np.arange(TRACE_TEST_TOKENS, dtype=np.int64) * 7919 + 1) % model.vocab_size
    run, text, rest, other = model.backend.run, *np.split(ids, 3)
    run(0, text, 1)
    expected = run(len(text), rest, len(rest)).copy()
    run(0, text, 1)
    run(len(text), other[::-1], 1)
    return not np.array_equal(run(len(text), rest, len(rest)), expected)
