"""Trains a draft of any kind against the main model's probabilities: AdamW with cosine decay.

The loss begins as the cross-entropy. Later the total variation is added, which is what rejection sampling rejects at
temperature 1: the more is accepted already, the larger its weight (LK losses, arXiv 2602.23881).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from speculative.convert.draft_training.clock import Interval
from speculative.convert.draft_training.state_file import TextStates

STEP_WEIGHT = 0.8  # of each against the one before, as in EAGLE
RATE, MIN_RATE = 1e-3, 0.05
WARM_UP, WARM_UP_SHARE = 30, 0.1  # steps, but at most this share of the training
MIN_STEPS = 10  # of the optimizer, however short the time
CLIP = 0.5
ROWS, DEVICE_ROWS = 64, 4096  # of logits at a time, for the loss: on a CPU, on a GPU
VARIATION_FROM, VARIATION_FULL = 0.4, 0.6  # shares of the training between which the total variation is added
VARIATION_RATE = 3.0  # of its weight, 1 - exp(-rate * accepted share)
BATCH, DEVICE_BATCH = 256, 1024  # tokens: on a CPU, measured in docs/training-a-draft.md; on other devices
POOL = 256  # texts whose lengths are compared
SAVE_EVERY = 60.0  # seconds, at least


class Batch(NamedTuple):
    """Tensors [batch, tokens, ...]; `mask` is false for padding."""

    tokens: torch.Tensor
    states: torch.Tensor
    ids: torch.Tensor
    probabilities: torch.Tensor
    mask: torch.Tensor


class Scores(NamedTuple):
    """For each unrolled draft step, on held-out texts: how often the draft's most likely token is the main model's, and
    how likely rejection sampling accepts at temperature 1 (the overlap of the two distributions)."""

    agreement: list[float]
    overlap: list[float]


def load(file: Path, device: str) -> dict | None:
    """The state of a training; None if there is no such file."""
    return torch.load(file, map_location=device, weights_only=True) if file.exists() else None


class DraftLoss(torch.autograd.Function):
    """The loss of logits against soft targets, as a weighted sum over rows.

    It computes the gradient at once, from the same softmax: on a CPU a few rows at a time, which stay in its caches.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        variation: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and the accepted share: the overlap of the two distributions.

        `logits` [rows, vocabulary]. `targets` [rows, top] are the probabilities of `ids`, all others are 0; they sum
        to at most 1. The loss has the total variation with the weight `variation`, the cross-entropy with the rest.
        """
        loss, accepted = (torch.zeros((), device=logits.device) for _ in range(2))
        gradient = torch.empty_like(logits)
        size = ROWS if logits.device.type == "cpu" else DEVICE_ROWS
        for begin in range(0, len(logits), size):
            rows = slice(begin, begin + size)
            p, at, weight = targets[rows], ids[rows], weights[rows, None]
            log_q = logits[rows].float().log_softmax(-1)
            log_q_at = log_q.gather(-1, at)
            q_at = log_q_at.exp()
            overlap = (torch.minimum(p, q_at) * weight).sum()
            accepted += overlap
            entropy = -(p * log_q_at * weight).sum()
            loss += (1 - variation) * entropy + variation * (weight.sum() - overlap)
            kept = q_at * (q_at < p)  # probabilities whose growth lets more be accepted
            share = (1 - variation) * p.sum(-1, keepdim=True) + variation * kept.sum(-1, keepdim=True)
            pull = (1 - variation) * p + variation * kept
            gradient[rows] = log_q.exp_().mul_(share).scatter_add_(-1, at, -pull).mul_(weight)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(accepted)
        return loss, accepted

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(scale), None, None, None, None


class Training(ABC):
    """A draft in training. `load` and `save` keep and continue it."""

    rate = RATE  # highest learning rate
    unrolled = 1  # draft steps
    ahead = 0  # tokens between a row of logits of the first of them and what the main model computes for it

    def __init__(
        self,
        file: Path,
        saved_state: dict | None,
        model: nn.Module,
        vocabulary: np.ndarray,
        main_vocabulary: int,
        device: str,
    ):
        """Continues with the state `saved_state` of `file`, if there is one. `model` gives logits of `vocabulary`, ids
        of the main model's `main_vocabulary` tokens."""
        self._file, self._device = file, device
        self.model = model.to(device)
        self.vocabulary = vocabulary
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self.steps, self.tokens = 0, 0
        self.warm_up = WARM_UP
        self.batch_tokens = BATCH if device == "cpu" else DEVICE_BATCH
        self._accepted = [0.0] * self.unrolled  # share of each draft step, in the last batch
        if saved_state:
            model.load_state_dict(saved_state["model"])
            self._optimizer.load_state_dict(saved_state["optimizer"])
            self.steps, self.tokens = saved_state["steps"], saved_state["tokens"]
        self._draft_id_of = torch.full((main_vocabulary,), -1, device=device)  # in the draft's vocabulary
        self._draft_id_of[torch.from_numpy(vocabulary).to(device)] = torch.arange(len(vocabulary), device=device)
        self._random = np.random.default_rng(self.steps)
        self._has_bf16 = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    @abstractmethod
    def forward(self, batch: "Batch") -> Iterator[torch.Tensor]:
        """Logits [batch, rows, draft vocabulary] of each unrolled draft step."""

    @abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """Further content of a saved state, to continue the training from."""

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def is_enough(self) -> bool:
        """Whether the draft was trained at all."""
        return self.steps >= MIN_STEPS

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "tokens": self.tokens,
            **self.extra_state(),
        }
        partial = self._file.with_suffix(".new")
        try:
            with partial.open("wb") as file:
                torch.save(state, file)
            partial.replace(self._file)
        finally:
            partial.unlink(missing_ok=True)  # of a save that failed: the disk may be full

    def run(
        self,
        texts: list[TextStates],
        seconds_left: Callable[[], float],
        seconds: float,
        progress: Callable[[float], None],
    ) -> None:
        """Train until the time is up, at least MIN_STEPS. `seconds` is the whole time of the training, over all runs.
        Calls `progress` with the loss of each step. The state is saved every minute, or less often if that takes long,
        and at the end, also by Ctrl-C."""
        batches = self._batches(texts)
        saves = Interval(SAVE_EVERY)
        try:
            while (remaining := seconds_left()) > 0 or not self.is_enough:
                share = min(1 - remaining / seconds, self.steps / MIN_STEPS)
                progress(self._step(next(batches), share))
                saves.run(self.save)
        finally:
            self.save()

    def _step(self, texts: list[TextStates], share: float) -> float:
        """One optimizer step, when `share` of the training is over; returns the loss."""
        rate = MIN_RATE + (1 - MIN_RATE) * (1 + math.cos(math.pi * share)) / 2
        warm_up = min(1.0, max((self.steps + 1) / self.warm_up, share / WARM_UP_SHARE))
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * rate * warm_up
        batch = self._batch(texts)
        ramp = min(1.0, max(0.0, (share - VARIATION_FROM) / (VARIATION_FULL - VARIATION_FROM)))
        loss, accepted = torch.zeros((), device=self._device), []
        for i, logits in enumerate(self._logits(batch)):
            draft_ids, targets, mask = self._targets(batch, i)
            rows = (
                logits.flatten(0, 1),
                draft_ids.flatten(0, 1).clamp(min=0),
                targets.masked_fill(draft_ids < 0, 0).flatten(0, 1),
                (mask / mask.sum().clamp(min=1)).flatten(),
            )
            step_loss, step_accepted = DraftLoss.apply(
                *rows, ramp * (1 - math.exp(-VARIATION_RATE * self._accepted[i]))
            )
            loss = loss + STEP_WEIGHT**i * step_loss
            accepted.append(step_accepted)
        self._accepted = torch.stack(accepted).tolist()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self.steps += 1
        self.tokens += int(batch.mask.sum())
        return loss.item()

    @torch.no_grad()
    def evaluate(self, texts: list[TextStates]) -> Scores:
        """Scores on held-out texts, of at least 5 tokens each."""
        hits, overlap, rows = (np.zeros(self.unrolled) for _ in range(3))
        for text in texts:
            batch = self._batch([text])
            for i, logits in enumerate(self._logits(batch)):
                draft_ids, targets, mask = self._targets(batch, i)
                q = logits.float().softmax(-1).gather(-1, draft_ids.clamp(min=0)).masked_fill(draft_ids < 0, 0)
                hits[i] += int((logits.argmax(-1) == draft_ids[..., 0])[mask].sum())
                overlap[i] += float(torch.minimum(q, targets).sum(-1)[mask].sum())
                rows[i] += int(mask.sum())
        return Scores((hits / rows.clip(1)).tolist(), (overlap / rows.clip(1)).tolist())

    def _logits(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Logits [batch, rows, draft vocabulary] of each draft step, for rows that have a target."""
        tokens = batch.tokens.shape[1]
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16, enabled=self._has_bf16):
            for i, logits in enumerate(self.forward(batch)):
                yield logits[:, : tokens - self.ahead - i]

    def _targets(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The main model's most likely tokens after each row of a draft step, as places in the draft vocabulary (-1:
        outside), and their probabilities, [batch, rows, top]; and whether the row is of a text."""
        after = slice(step + self.ahead, None)
        return self._draft_id_of[batch.ids[:, after]], batch.probabilities[:, after], batch.mask[:, after]

    def _batch(self, texts: list[Any]) -> Batch:
        count, longest = len(texts), max(len(tokens) for tokens, _ in texts)
        tokens = np.zeros((count, longest), np.int64)
        mask = np.zeros((count, longest), bool)
        parts = []
        for values in zip(*(reading for _, reading in texts), strict=True):
            parts.append(np.zeros((count, longest, values[0].shape[1]), values[0].dtype))
            for i, value in enumerate(values):
                parts[-1][i, : len(value)] = value
        for i, (ids, _) in enumerate(texts):
            tokens[i, : len(ids)] = ids
            mask[i, : len(ids)] = True
        states, top, log_p = (torch.from_numpy(part).to(self._device) for part in parts)
        all_masks = torch.from_numpy(mask).to(self._device)
        all_tokens = torch.from_numpy(tokens).to(self._device)
        return Batch(all_tokens, states.float(), top.long(), log_p.float().exp(), all_masks)

    def _batches(self, texts: list[TextStates]) -> Iterator[list[TextStates]]:
        """Endless batches of about `batch_tokens` tokens, of texts of similar length, in random order."""
        while True:
            order = self._random.permutation(len(texts))
            batches: list[list[TextStates]] = []
            for pool in (order[start : start + POOL] for start in range(0, len(order), POOL)):
                batch: list[TextStates] = []
                for i in sorted(pool, key=lambda i: len(texts[i][0])):
                    if batch and (len(batch) + 1) * len(texts[i][0]) > self.batch_tokens:
                        batches.append(batch)
                        batch = []
                    batch.append(texts[i])
                batches.append(batch)
            for index in self._random.permutation(len(batches)):
                yield batches[index]
