"""Masks of texts with a grammar, computed while a forward pass of the main model runs.

    masks = MaskThread()
    with masks.computing([text]):
        logits = main.logits(text.token_ids, last=text.num_logits)
    step = text.verify(logits)

OpenVINO and llguidance release Python's global lock, so both compute at the same time.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from speculative.sequence.sequence import Sequence


class MaskThread:
    """One thread, which starts with the first text that has a grammar."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def computing(self, sequences: Iterable[Sequence]) -> Iterator[None]:
        """Compute all masks that `Sequence.verify` may need. No other method of `sequences` may be called in this
        context.

        Errors are ignored here: `verify` meets them again if it needs that mask.
        """
        with_grammar = [sequence for sequence in sequences if sequence.has_grammar]
        if not with_grammar:
            yield
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "masks")
        future = self._pool.submit(_compute, with_grammar)
        try:
            yield
        finally:
            future.result()


def _compute(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        with suppress(Exception):
            sequence.compute_masks()
