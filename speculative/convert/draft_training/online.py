"""Online training of a head: each batch's hidden states and probabilities are computed with it, not stored before."""

from typing import Any

import numpy as np
import torch

from speculative.convert.draft_training.head import HeadTraining
from speculative.convert.draft_training.torch_main import TorchMain
from speculative.convert.draft_training.training import Batch

UNROLLED = 4  # draft steps
RATE, WARM_UP = 1.2e-3, 100
BATCH, BATCH_NUMBERS = 16384, 9_500_000  # most tokens, and most numbers in a batch's hidden states, on a GPU
PADDING = 32  # texts are padded to multiples
TOP = 64  # next tokens that are targets

OnlineText = tuple[np.ndarray, int]
"""Tokens of a text int64 [n], and the place of its answer's first token: the head is not trained on the prompt."""


class OnlineHeadTraining(HeadTraining):
    """A head in training beside its main model."""

    unrolled = UNROLLED

    def __init__(self, main: TorchMain, *arguments: Any):
        """`arguments` are those of HeadTraining."""
        super().__init__(*arguments)
        self._main = main
        self.rate, self.warm_up = RATE, WARM_UP
        if main.device != "cpu":
            self.batch_tokens = min(BATCH, BATCH_NUMBERS // self.config.hidden_size)

    def _batch(self, texts: list[OnlineText]) -> Batch:
        longest = max(len(tokens) for tokens, _ in texts)
        shape = len(texts), -(-longest // PADDING) * PADDING
        tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for row, (ids, answer) in enumerate(texts):
            tokens[row, : len(ids)] = ids
            mask[row, answer - 1 : len(ids) - 1] = True  # where the next token is one of an answer
        on_device, where = (torch.from_numpy(values).to(self._device) for values in (tokens, mask))
        states, next_ids, probabilities = self._main.read(on_device, where, min(TOP, self._main.vocabulary))
        return Batch(on_device, states, next_ids, probabilities, where)
