"""Proposers of draft tokens: their protocol, and the draft model. `suffix.py` proposes tokens without a model."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from speculative.models.batch_model import Slot
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_head import EagleHead
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot, draw

Transform = Callable[[np.ndarray, np.ndarray], np.ndarray | OneHot]
"""Maps the logits float32 [V] after the given tokens (int64 [n]) to the distribution float32 [V] to sample from."""


class Proposer(Protocol):
    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        """Propose the token after `tokens` (int64 [n], all so far, draft tokens included), or None."""

    def reset(self) -> None:
        """Reset, for reproducible results."""


class DraftModelProposer:
    """Samples draft tokens from a draft model, with the same transform as the main model.

    `vocab_size` is the main model's number of logits. Models of one family may pad the vocabulary differently: extra
    logits are cut, missing ones get probability 0. Proposes nothing beyond the draft's context length, nor after a
    token that is not in its vocabulary.
    """

    def __init__(self, model: CachedModel | EagleHead | Slot, vocab_size: int):
        self.model = model
        self._vocab_size = vocab_size

    def can_read(self, tokens: np.ndarray) -> bool:
        """Whether `tokens` (int64 [n]) fit the draft's context and vocabulary, which may be smaller than main's."""
        return len(tokens) <= self.model.capacity and int(tokens.max()) < self.model.vocab_size

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        if not self.can_read(tokens):
            return None
        logits = self.model.logits(tokens)[0][: self._vocab_size]
        if len(logits) < self._vocab_size:
            logits = np.pad(logits, (0, self._vocab_size - len(logits)), constant_values=-np.inf)
        q = transform(logits, tokens)
        token = draw(q, random)
        return Proposal(token, q, lambda: softmax_at(logits, token))

    def reset(self) -> None:
        if not isinstance(self.model, Slot):  # a slot belongs to one sequence
            self.model.reset()


def softmax_at(logits: np.ndarray, token: int) -> float:
    """The probability of `token` at temperature 1."""
    return float(1 / np.exp(logits - logits[token]).sum())
