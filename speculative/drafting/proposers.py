"""Proposers of draft tokens: their protocol, and the draft model. `suffix.py` proposes tokens without a model."""

import warnings
from typing import Protocol

import numpy as np

from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.tree import top_tokens
from speculative.models.batch_model import Slot
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_batch import HeadSlot
from speculative.models.eagle3_head import EagleHead
from speculative.sampling.distribution import InvalidLogits
from speculative.sampling.grammar import NothingAllowed
from speculative.sampling.proposal import Proposal
from speculative.sampling.rejection_sampling import OneHot, Probabilities, draw


class Transform(Protocol):
    def __call__(self, logits: np.ndarray, tokens: np.ndarray, targets: np.ndarray | None = None) -> Probabilities:
        """Map the `logits` float32 [V] after `tokens` (int64 [n]) to the distribution float32 [V] to sample from. With
        `targets` int64 [m], ascending, there are logits for these token ids only, float32 [m]."""


class Proposer(Protocol):
    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        """Propose the token after `tokens` (int64 [n], all so far, draft tokens included), or None."""

    def reset(self) -> None:
        """Reset, for reproducible results."""


class DraftModelProposer:
    """Samples draft tokens from a draft model, with the same transform as the main model.

    `vocab_size` is the main model's number of logits. Models of one family may pad the vocabulary differently: extra
    logits are cut, missing ones get probability 0. A draft with another tokenizer needs a `retokenizer` and proposes
    tokens that both vocabularies have. Proposes nothing beyond the draft's context length, nor after a token that it
    cannot read, nor where the grammar allows no token that the draft has, nor where its logits are not finite.
    """

    def __init__(self, model: CachedModel | EagleHead | Slot, vocab_size: int, retokenizer: Retokenizer | None = None):
        self.model = model
        self.retokenizer = retokenizer
        self._vocab_size = vocab_size

    @property
    def continues_copies(self) -> bool:
        """Whether it drafts after draft tokens that are not its own. An EAGLE-3 head would need a forward pass for
        each, a draft with another tokenizer would encode the text again if they are rejected."""
        return not isinstance(self.model, (EagleHead, HeadSlot)) and not self.retokenizer

    def draft_ids(self, tokens: np.ndarray) -> np.ndarray | None:
        """`tokens` (int64 [n]) as the draft reads them; None if they do not fit its context and its vocabulary, which
        may be smaller than the main model's."""
        ids = self.retokenizer.ids(tokens) if self.retokenizer else tokens
        if ids is None or len(ids) > self.model.capacity:
            return None
        reads_all = self.model.vocab_size >= self._vocab_size and not self.retokenizer
        return ids if reads_all or int(ids.max()) < self.model.vocab_size else None

    def final_ids(self, tokens: np.ndarray) -> np.ndarray:
        """The `draft_ids` of verified `tokens` that later ones do not change."""
        return self.retokenizer.final_ids if self.retokenizer else tokens

    def propose(self, tokens: np.ndarray, transform: Transform, random: np.random.Generator) -> Proposal | None:
        ids = self.draft_ids(tokens)
        if ids is None:
            return None
        logits, targets = self._main_logits(self.model.logits(ids)[0])
        try:
            q = transform(logits, tokens, targets)
        except NothingAllowed:
            return None
        except InvalidLogits as error:  # a bad draft costs time, not the answer
            warnings.warn(f"nothing is drafted where the draft model fails: {error}", stacklevel=2)
            return None
        token = draw(q, random)
        if self.retokenizer:
            self.retokenizer.draft(token)

        def index() -> int:
            return token if targets is None else int(targets.searchsorted(token))

        def alternatives(n: int) -> list[int]:
            indices = top_tokens(logits, n, without=index())
            return indices if targets is None else targets[indices].tolist()

        def confidence() -> float:
            return softmax_at(logits, index()) if isinstance(q, OneHot) else float(q[token])

        return Proposal(token, q, confidence, alternatives)

    def reset(self) -> None:
        if not isinstance(self.model, Slot):  # a slot belongs to one sequence
            self.model.reset()
        if self.retokenizer:
            self.retokenizer.reset()

    def _main_logits(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The draft's logits by the main model's token ids, float32 [V]; or those that it has, and their token ids."""
        if self.retokenizer:
            return logits[self.retokenizer.shared.draft_ids], self.retokenizer.shared.main_ids
        if self.model.targets is not None:
            return logits, self.model.targets
        logits = logits[: self._vocab_size]
        if len(logits) < self._vocab_size:
            logits = np.pad(logits, (0, self._vocab_size - len(logits)), constant_values=-np.inf)
        return logits, None


def softmax_at(logits: np.ndarray, token: int) -> float:
    """The probability of `token` at temperature 1."""
    return float(1 / np.exp(logits - logits[token]).sum())
