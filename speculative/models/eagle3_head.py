"""EAGLE-3 head with a KV cache that can be rolled back: a draft model that also reads the main model's hidden states.

    main, head = eagle3_head.load(ModelSpec("models/main"), ModelSpec("models/head"))
    main.logits(tokens[:-1])
    logits = head.logits(tokens)  # of the draft vocabulary, head.targets

Entry t of the head's cache comes from token t + 1 and the hidden state of token t. The main model has the hidden states
of verified tokens; behind them the head continues with its own, one entry at a time. Such entries are replaced as soon
as the main model has verified their tokens.
"""

import numpy as np

from speculative.models import cached_model
from speculative.models.cached_model import CachedModel, common_prefix
from speculative.models.eagle3_graph import HeadGraph
from speculative.models.paged_model import PagedModel
from speculative.models.spec import ModelSpec

MIN_PASS = 4  # entries to which a forward pass over fewer is padded: OpenVINO prepares passes of another size again
NEEDS_PAGED = "an EAGLE-3 draft and its main model need paged attention: run both on a CPU or GPU"


class Entries:
    """The entries in the cache of one sequence of a head."""

    def __init__(self, capacity: int):
        self.hidden = np.zeros((1, 0), np.float32)  # the head's own hidden state [1, size] of the last entry
        self._tokens = np.zeros(capacity + 1, np.int64)  # entry t is that of tokens t and t + 1
        self._length = 0  # entries in the cache
        self._verified = 0  # of these, the leading ones that come from the main model's hidden states

    def missing(self, tokens: np.ndarray, num_known: int) -> list[tuple[int, int]]:
        """Ranges (start, end) of the entries to compute, in order, for the logits after `tokens`: at most one
        range from the main model's hidden states, of which `num_known` (1 or more) exist, then one entry at a time."""
        n = len(tokens) - 1  # entries needed
        matching = self._common_prefix(tokens)
        start, first_own = min(matching, self._verified), n - 1
        if start < num_known or not matching == self._length == n - 1:
            start, first_own = min(start, num_known - 1), num_known
        verified = [(start, num_known)] if first_own == num_known and start < num_known else []
        return [*verified, *((entry, entry + 1) for entry in range(first_own, n))]

    def lack_only_last(self, tokens: np.ndarray) -> bool:
        """Whether the cache has all entries for `tokens` but the last one, and no others."""
        n = len(tokens) - 1
        # with cold CPU caches, a comparison of bytes is faster than one of arrays
        return self._length == n - 1 and self._tokens[:n].tobytes() == tokens[:n].tobytes()

    def cut(self, start: int) -> None:
        """Count nothing from entry `start` on as cached."""
        self._length = start
        self._verified = min(self._verified, start)

    def commit(self, tokens: np.ndarray, start: int, end: int, hidden: np.ndarray, verified: bool) -> None:
        """Record the entries from `start` to `end`, and the own hidden state [1, size] of the last one."""
        self._tokens[start : end + 1] = tokens[start : end + 1]
        self._length = end
        if verified:
            self._verified = end
        self.hidden = hidden.copy()

    def _common_prefix(self, tokens: np.ndarray) -> int:
        """The number of leading entries that are of `tokens`."""
        return max(common_prefix(self._tokens[: self._length + 1], tokens), 1) - 1


class EagleHead:
    """One sequence of an EAGLE-3 head, as a draft of `main`, whose sequence is the same. Not thread-safe.

    To `DraftModelProposer` it is a draft model that reads the main model's vocabulary and drafts a part of it.
    """

    def __init__(self, model: CachedModel, main: CachedModel, targets: np.ndarray):
        """Takes over `model`, the compiled head, which must not be used directly. Its logits are of the main model's
        token ids `targets` int64 [draft vocabulary]. Raises ValueError if one of them has no paged cache."""
        if not isinstance(model.backend, PagedModel) or main.hidden_states is None:
            raise ValueError(NEEDS_PAGED)
        self.backend = model.backend
        self.note = model.note
        self.capacity = model.capacity  # longest sequence, in tokens
        self.vocab_size = main.vocab_size
        is_sorted = bool((np.diff(targets) > 0).all())
        self.order = slice(None) if is_sorted else targets.argsort()  # of its logits, by token id
        self.targets = targets[self.order]
        self._main = main
        self._states = main.hidden_states
        self._logits = np.zeros((1, len(targets)), np.float32)
        self._entries = Entries(self.capacity)
        self._num_known = 0  # leading tokens of the last call that the main model had computed
        self._main_version = -1  # `version` of the main model's cache then

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits float32 [1, draft vocabulary] of the `targets` after `tokens` (int64 [2 or more], the whole sequence).
        The main model must have computed a prefix of `tokens`.

        The array is a view that the next call overwrites. Raises ValueError if `tokens` is longer than `capacity`, or
        the main model has not computed their first token.
        """
        if self._extend_last_call(tokens):
            self._run(tokens, len(tokens) - 2, len(tokens) - 1)
            return self._logits
        self._num_known = self._main.common_prefix(tokens)
        if len(tokens) > self.capacity or not self._num_known:
            raise ValueError(
                f"an EAGLE-3 draft cannot continue {len(tokens)} tokens: its cache fits {self.capacity}, and the main "
                f"model has computed {self._num_known}"
            )
        for start, end in self._entries.missing(tokens, min(self._num_known, len(tokens) - 1)):
            for begin in range(start, end, self.backend.chunk):
                self._run(tokens, begin, min(begin + self.backend.chunk, end))
        self._main_version = self._main.version
        return self._logits

    def reset(self) -> None:
        """Clear the cache."""
        self._entries.cut(0)

    def clear(self) -> None:
        """Clear the cache and its memory, see `CachedModel.clear`."""
        self.reset()
        self.backend.clear()

    def _extend_last_call(self, tokens: np.ndarray) -> bool:
        """Whether `tokens` are those of the last call and one more, with the main model's cache as it was: each draft
        token but the first. Then the main model's tokens need not be compared again."""
        return (
            self._main_version == self._main.version
            and self._num_known < len(tokens) - 1 < self.capacity
            and self._entries.lack_only_last(tokens)
        )

    def _run(self, tokens: np.ndarray, start: int, end: int) -> None:
        """Compute the entries from `start` to `end`, dropping everything from `start` on."""
        self._entries.cut(start)
        verified, n = end <= self._num_known, end - start
        states = self._states[start:end] if verified else self._entries.hidden
        padding = MIN_PASS - n if n < MIN_PASS <= self.capacity - start else 0  # later passes overwrite it
        logits = self.backend.run(start, tokens[start + 1 : end + 1], 1, states, padding=padding)
        self._logits = logits[:, self.order]
        own_states = self.backend.hidden_states
        assert own_states is not None
        self._entries.commit(tokens, start, end, own_states[n - 1 : n], verified=verified)


def has_paged_attention(device: str) -> bool:
    """Whether models on this device have paged attention by default."""
    return device.partition(".")[0] in ("CPU", "GPU")


def load(
    main: ModelSpec, head: ModelSpec, *, capacity: int | None = None, head_capacity: int | None = None
) -> tuple[CachedModel, EagleHead]:
    """Compile a main model and its EAGLE-3 head; see `cached_model.load`.

    Raises ValueError if the head does not fit the main model, before anything is compiled, or without paged attention.
    """
    if without := [spec for spec in (main, head) if not has_paged_attention(spec.device)]:
        raise ValueError(f"{without[0].folder}: {NEEDS_PAGED}, not on {without[0].device}")
    graph = HeadGraph(head.folder)
    model = cached_model.load(main, capacity=capacity, prepare=graph.attach)
    return model, EagleHead(cached_model.compile_graph(graph.model, head, capacity=head_capacity), model, graph.targets)
