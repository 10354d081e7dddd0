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
    def computing(self, texts: Iterable[Sequence]) -> Iterator[None]:
        """Compute all masks that `Sequence.verify` may need. No other method of `texts` may be called in this context.

        An error is left to `verify`, which comes to it again if it needs that mask.
        """
        constrained = [text for text in texts if text.has_grammar]
        if not constrained:
            yield
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "masks")
        work = self._pool.submit(_compute, constrained)
        try:
            yield
        finally:
            work.result()


def _compute(texts: list[Sequence]) -> None:
    for text in texts:
        with suppress(Exception):
            text.compute_masks()
