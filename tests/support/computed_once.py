"""A model that computes each text once, to sample many short texts of few different tokens."""

from collections.abc import Sequence

import numpy as np


class ComputedOnce:
    """Caches the logits after each text in `known`. It records the sizes of forward passes, but does not pad them;
    passes over texts of at most `prompt` tokens count as prefill."""

    def __init__(self, model, prompt: int, known: dict):
        self._model, self._prompt, self._known, self.pass_width = model, prompt, known, None

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def logits(self, tokens: np.ndarray, last: int = 1, leaves: Sequence[tuple[int, int]] = ()) -> np.ndarray:
        if self.pass_width and len(tokens) <= self._prompt:
            self.pass_width.reset()
        elif self.pass_width:
            self.pass_width.width_for(last + len(leaves))
        text = tokens.tobytes(), last, tuple(leaves)
        if text not in self._known:
            self._known[text] = self._model.logits(tokens, last, leaves).copy()
        return self._known[text]
